"""The load report (ORCA) for load balancers. It is in a header of the replies to completions and chats that ask for it.

Source: vLLM, `vllm/entrypoints/serve/utils/orca_metrics.py`. Unlike vLLM, Slipway also sends the report with streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from engines.interface import Engine
from handlers.contract import Call, Reply, ReplyWriter

_FORMAT = b"endpoint-load-metrics-format"


def report_format(call: Call) -> str:
    """Return the form of the report that a call asks for: `json` or `text`. Empty if it asks for none."""
    form = call.headers.get(_FORMAT, b"").lower()
    return form.decode() if form in (b"json", b"text") else ""


class LoadReportWriter:
    """Adds the report to a successful reply."""

    def __init__(self, writer: ReplyWriter, engine: Engine, form: str) -> None:
        """Create the writer.

        Args:
            writer: Sends the reply.
            engine: The engine whose load is reported.
            form: `json` or `text`.
        """
        self._writer, self._engine, self._form = writer, engine, form
        # Parts of a reply are passed on unchanged.
        self.write: Callable[[bytes], None] = writer.write
        self.write_latest: Callable[[Callable[[], bytes]], None] = writer.write_latest
        self.end: Callable[[bytes], None] = writer.end
        self.drain: Callable[[], Coroutine[Any, Any, None]] = writer.drain

    def reply(self, reply: Reply) -> None:
        self._writer.reply(replace(reply, headers=self._with_report(reply.status, reply.headers)))

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._writer.start(status, content_type, self._with_report(status, headers))

    def _with_report(self, status: int, headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        if status != 200:
            return headers
        load = self._engine.status()
        metrics = {"num_requests_waiting": float(load.waiting_requests), "kv_cache_usage_perc": load.kv_cache_usage}
        if self._form == "json":
            report = f"JSON {json.dumps({'named_metrics': metrics})}"
        else:
            report = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        return (*headers, ("endpoint-load-metrics", report))
