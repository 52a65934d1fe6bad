"""How long downloading and starting a model may take, estimated from its size. All in seconds and gigabytes."""

from __future__ import annotations

from deploy.sagemaker import instances

SHORTEST, LONGEST = 60, 3600
"""What SageMaker allows for either limit."""

_SHARE_OF_MEMORY = 0.7
"""Of the GPUs' memory, that weights take at most; the rest is KV cache."""
_UNKNOWN_SIZE = 40.0
# Slow on purpose: a limit that is too long costs nothing, one that is too short costs the deployment.
_DOWNLOAD_RATE = 0.1
_LOAD_RATE = 0.25
_DOWNLOAD_BASE = 120
_START_BASE = 420
"""Starting the process, compiling, capturing CUDA graphs and warming up."""


def size_estimate(instance_type: str, given: float | None) -> float:
    """Gigabytes of weights: what was given, else the most that the instance's GPUs hold."""
    if given is not None:
        return given
    memory = instances.gpu_memory(instance_type)
    return _UNKNOWN_SIZE if memory is None else memory * _SHARE_OF_MEMORY


def download_timeout(gigabytes: float) -> int:
    """For SageMaker's own download from S3."""
    return _limit(_DOWNLOAD_BASE + gigabytes / _DOWNLOAD_RATE)


def startup_timeout(gigabytes: float, *, container_downloads: bool) -> int:
    """Until the container is healthy; it downloads the model itself when that comes from a hub."""
    download = gigabytes / _DOWNLOAD_RATE if container_downloads else 0
    return _limit(_START_BASE + download + gigabytes / _LOAD_RATE)


def _limit(seconds: float) -> int:
    whole_minutes = -(-int(seconds) // 60) * 60
    return min(max(whole_minutes, SHORTEST), LONGEST)
