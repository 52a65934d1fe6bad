"""Writes YAML: CloudFormation templates, KubeRay manifests, and configurations for Ray Serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_yaml(value: Mapping[str, Any]) -> str:
    """Return JSON values as YAML, with the keys in their given order."""
    import yaml  # `slipway serve` imports this module but does not need yaml.

    # yaml writes an alias for an object that occurs twice, but CloudFormation does not support aliases.
    unshared = json.loads(json.dumps(value, default=str))
    return str(yaml.safe_dump(unshared, sort_keys=False, allow_unicode=True, width=120))
