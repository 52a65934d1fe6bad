"""The progress of a replay on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from replay.report import Report
from replay.sources import Source


class Progress:
    """A progress bar, if standard error is a terminal. Its length is the limit, or else the source's size in bytes."""

    def __init__(self, source: Source, limit: int | None, report: Report) -> None:
        self._source, self._limit, self._report = source, limit, report
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("replay", total=limit or max(1, source.total_bytes), said="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self) -> None:
        """Show the report's figures."""
        report = self._report
        done = report.requests if self._limit else self._source.bytes_read
        said = f"{report.requests} requests, {report.unexplained} with unexplained differences"
        self._bar.update(self._task, completed=done, said=said)
