"""The process of `slipway local`: the runtime API on a port, and the container behind it."""

from __future__ import annotations

import asyncio
import logging
import signal

from container.server import http_server, listen
from deploy.local.container_process import ContainerProcess
from deploy.local.runtime import RuntimeApi
from deploy.local.settings import LocalSettings

logger = logging.getLogger(__name__)


async def serve(settings: LocalSettings, host: str, port: int, child: ContainerProcess | None) -> int:
    """Serve until told to stop, or until the container that was started ends.

    Returns:
        The exit code: the container's, or 0 where it is none of ours.
    """
    try:
        listener = listen(host, port)
    except SystemExit:
        if child is not None:
            child.stop()
            await child.wait()
        raise
    api = RuntimeApi(settings, whole_container=True)
    server = http_server(api)
    watching = asyncio.create_task(child.wait()) if child is not None else None

    def on_signal(number: int) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        if child is None:
            server.should_exit = True
        else:
            child.stop()  # what it still streams goes through us, so we end after it

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if watching is not None:
        watching.add_done_callback(lambda _: setattr(server, "should_exit", True))
    with listener:
        await server.serve([listener])
    await api.close()
    if watching is None:
        return 0
    code = await watching
    if code:
        logger.error("the container ended with exit code %d", code)
    return code
