"""boto3's client for the SageMaker runtime, for a local endpoint."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config


def runtime_at(url: str) -> Any:
    """Return an unmodified client that sends each call once.

    Each client has its own session, because boto3's default session must not create clients in several threads.
    """
    session = boto3.session.Session(aws_access_key_id="local", aws_secret_access_key="local", region_name="us-east-1")
    return session.client("sagemaker-runtime", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}))
