"""Has the weights of remote models fetched before an engine loads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from container.sources.remote_model import RemoteModel
from container.sources.source_error import FetchTimeout, SourceError
from handlers.daemon_thread import in_daemon_thread
from handlers.engines.protocol import EngineStartError


async def fetch_weights(models: Sequence[RemoteModel], seconds: float) -> None:
    """Fetch what is not here yet, in a thread that ends when this is cancelled.

    Raises:
        EngineStartError: it is not possible, or not in so many seconds.
    """
    if not models:
        return
    stop = threading.Event()

    def fetch() -> None:
        deadline = time.monotonic() + seconds
        for model in models:
            model.fetch_weights(max(deadline - time.monotonic(), 0.0), stop)

    try:
        await in_daemon_thread(fetch)
    except FetchTimeout as error:
        raise EngineStartError(f"{error}; option.model_loading_timeout sets the limit ({seconds:g} s)") from error
    except SourceError as error:
        raise EngineStartError(str(error)) from error
    finally:
        stop.set()
