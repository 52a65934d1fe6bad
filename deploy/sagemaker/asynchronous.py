"""The part of an endpoint configuration that makes an endpoint asynchronous: requests and answers go through S3."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.configuration import Asynchronous


def asynchronous_config(asynchronous: Asynchronous, kms_key: str | None) -> dict[str, Any]:
    """`AsyncInferenceConfig`, encrypted with `kms_key` where there is one."""
    output: dict[str, Any] = {"S3OutputPath": asynchronous.output}
    if asynchronous.failure:
        output["S3FailurePath"] = asynchronous.failure
    if kms_key:
        output["KmsKeyId"] = kms_key
    topics = {"SuccessTopic": asynchronous.success_topic, "ErrorTopic": asynchronous.error_topic}
    notification = {key: topic for key, topic in topics.items() if topic}
    if notification:
        output["NotificationConfig"] = notification
    config: dict[str, Any] = {"OutputConfig": output}
    if asynchronous.concurrency:
        config["ClientConfig"] = {"MaxConcurrentInvocationsPerInstance": asynchronous.concurrency}
    return config
