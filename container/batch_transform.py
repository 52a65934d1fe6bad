"""`/execution-parameters`: SageMaker's batch transform asks this route how to send records. LMI has no such route.

The values of a transform job override this reply. The reply is derived from settings, before a model is loaded.
"""

from __future__ import annotations

import msgspec

from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from handlers.contract import JSON, Reply

_MEBIBYTE = 1 << 20
_PAYLOAD = 6  # SageMaker's default for MaxPayloadInMB. A larger payload would allow fewer concurrent calls.
_ROOM = 100  # SageMaker's limit on the product of MaxPayloadInMB and MaxConcurrentTransforms.


def execution_parameters(models: Models, server_config: ServerConfig) -> Reply:
    """Return the reply of the route.

    A record is a body of `/invocations`, and a body holds one request. So records are never joined (SINGLE_RECORD).
    MaxConcurrentTransforms is the number of calls that each model can run at the same time, or less if SageMaker's
    limit requires it.
    """
    payload = max(1, min(_PAYLOAD, server_config.max_request_size // _MEBIBYTE))
    together = min((_together(model, server_config) for model in models), default=1)
    parameters = {
        "MaxConcurrentTransforms": min(together, _ROOM // payload),
        "BatchStrategy": "SINGLE_RECORD",
        "MaxPayloadInMB": payload,
    }
    return Reply(200, JSON, msgspec.json.encode(parameters))


def _together(model: Model, server_config: ServerConfig) -> int:
    """Return how many calls a model can run at the same time. A custom handler's calls must also fit into its queue."""
    given = model.lifecycle.config
    return min(given.rolling_batch_size, server_config.job_queue_size) if given.handler else given.rolling_batch_size
