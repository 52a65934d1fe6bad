"""The program `slipway`, which also records each request that goes to an engine's process.

RECORDED=FILE python -m tests.live.recorded_requests serve --model-dir DIRECTORY
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RECORDED = "RECORDED"
"""The environment variable that names the file."""


def main() -> None:
    from engines.vllm.copies.client import CopiesClient
    from engines.vllm.explanation import shown_parameters
    from slipway.cli import app

    file, send = Path(os.environ[RECORDED]), CopiesClient.add_request_async

    def record(request: Any) -> None:
        parameters = shown_parameters(request.sampling_params or request.pooling_params)
        line = {"token_ids": list(request.prompt_token_ids), "parameters": parameters, "priority": request.priority}
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    async def add_request_async(self: CopiesClient, request: Any, copy: Any = None) -> None:
        record(request)
        await send(self, request, copy)

    CopiesClient.add_request_async = add_request_async  # type: ignore[method-assign]
    app()


if __name__ == "__main__":
    main()
