"""Names, tags and fingerprints of what a deployment is made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

LONGEST_NAME = 48
"""Characters of a deployment's name: SageMaker's names have up to 63, and a fingerprint or an adapter follows."""
LONGEST_SAGEMAKER_NAME = 63

NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
VARIANT = "AllTraffic"
ENDPOINT_TAG = "slipway:endpoint"
FINGERPRINT_TAG = "slipway:fingerprint"

_FINGERPRINT_LENGTH = 10
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]+")
_ARCHIVE = re.compile(r"\.(tar\.gz|tgz|tar)$")


def name_from_model(model: str) -> str:
    """A deployment's name made of a hub id or an S3 location; empty if nothing in it can be part of a name.

    "meta-llama/Llama-3.1-8B-Instruct" gives "llama-3-1-8b-instruct".
    """
    parts = [part for part in model.removeprefix("s3://").split("/") if part]
    last = _ARCHIVE.sub("", parts[-1]) if parts else ""
    plain = _NOT_IN_NAMES.sub("-", last).strip("-").lower()
    return plain[:LONGEST_NAME].strip("-")


def fingerprint(parameters: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that change with anything in `parameters`, except the order of keys."""
    text = json.dumps(parameters, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_LENGTH]


def versioned(name: str, parameters: Mapping[str, Any]) -> str:
    """A name for something that cannot be changed once it is there: another content is another name."""
    return f"{name}-{fingerprint(parameters)}"


def is_versioned(versioned_name: str, name: str) -> bool:
    """Whether `versioned` could have given the name to something of the deployment `name`."""
    return re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{{_FINGERPRINT_LENGTH}}}", versioned_name) is not None


def adapter_component(name: str, adapter: str) -> str:
    """The inference component of an adapter, of the deployment `name`."""
    return f"{name}-{adapter}"


def role_name(name: str) -> str:
    """The execution role that is made for a deployment."""
    return f"slipway-{name}"


def role_description(name: str) -> str:
    """What that role is for."""
    return f"Execution role of the endpoint {name}"


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as most services want them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_map(tags: object) -> dict[str, str]:
    """Tags as some service gives them: a list of pairs, or a map."""
    if isinstance(tags, Mapping):
        return {str(key): str(value) for key, value in tags.items()}
    if isinstance(tags, list):
        return {str(tag["Key"]): str(tag["Value"]) for tag in tags}
    return {}
