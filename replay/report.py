"""The report of a replay: groups of equal differences, and latencies. A bar shows its figures while the replay runs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from replay.explanations import BY_NAME
from replay.request import printable
from replay.results import Found, Result, Side
from replay.sources import MalformedLine, Source

MOST_GROUPS = 500  # The maximum number of groups with an example. Further differences are only counted.
KEPT_ANSWER = 8000  # The maximum length of each answer in an example, in characters.
_SHOWN_LINES = 20  # The maximum number of malformed lines in the report.
_SHOWN_HEADERS = 20
_SHOWN_PLACES = 3  # The maximum number of places in a row of the table on the terminal.
_PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Group:
    """Equal differences of several requests."""

    route: str
    example: Found
    request_id: str
    place: str
    answers: dict[str, str]  # The beginnings of the old and the new answer. Empty if the results contain no texts.
    count: int = 0

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": self.example.kind,
            "route": self.route,
            "where": self.example.where,
            "count": self.count,
            "example": {
                "id": self.request_id,
                "place": self.place,
                "old": self.example.old,
                "new": self.example.new,
                "answers": self.answers,
            },
            "explanation": None,
        }
        if (explained := BY_NAME.get(self.example.explanation or "")) is not None:
            found["explanation"] = {
                "statement": explained.statement,
                "page": explained.link,
                "setting": explained.setting,
            }
        return found


@dataclass(slots=True)
class Times:
    """The latencies of the old or the new answers, in seconds."""

    answers: int = 0
    failures: int = 0
    seconds: array[float] = field(default_factory=lambda: array("d"))
    first_bytes: array[float] = field(default_factory=lambda: array("d"))

    def add(self, side: Side) -> None:
        if side.failure:
            self.failures += 1
            return
        self.answers += 1
        if side.seconds is not None:
            self.seconds.append(side.seconds)
        if side.first_byte is not None:
            self.first_bytes.append(side.first_byte)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"answers": self.answers, "without_answer": self.failures}
        for name, times in (("seconds", self.seconds), ("first_byte_seconds", self.first_bytes)):
            if times:
                points = np.percentile(np.frombuffer(times), _PERCENTILES)
                found[name] = {f"p{at}": round(float(point), 6) for at, point in zip(_PERCENTILES, points, strict=True)}
        return found


class Report:
    """The figures of a replay. Of each request, only the latencies and the similarity stay in memory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._groups: dict[tuple[str, str, str, str | None], Group] = {}
        # The numbers of differences beyond `MOST_GROUPS`. The key tells whether the differences are explained.
        self._beyond: Counter[bool] = Counter()
        self.requests = self._compared = self._equal = self._explained = self._unexplained = 0
        self._without_answer = self._sampled = 0
        self._malformed: list[MalformedLine] = []
        self._malformed_count = 0
        self._unsent_requests = 0
        self._unsent_headers: Counter[str] = Counter()
        self._new, self._old = Times(), Times()
        self._similarities = array("d")
        self.ended = ""  # The reason why the replay ended early.

    def add(self, result: Result) -> None:
        self.requests += 1
        self._compared += result.compared
        self._sampled += result.compared and result.similarity is not None and not result.greedy
        if result.failed:
            self._without_answer += 1
        elif any(found.explanation is None for found in result.differences):
            self._unexplained += 1
        elif result.differences:
            self._explained += 1
        else:
            self._equal += result.compared
        self._new.add(result.new)
        if result.old is not None:
            self._old.add(result.old)
        if result.similarity is not None:
            self._similarities.append(result.similarity)
        for found in result.differences:
            key = (found.kind, result.route, found.where, found.explanation)
            group = self._groups.get(key)
            if group is None:
                if len(self._groups) >= MOST_GROUPS:
                    self._beyond[found.explanation is not None] += 1
                    continue
                bodies = result.bodies
                answers = {name: _beginning(bodies.get(name, "")) for name in ("old", "new")} if bodies else {}
                group = self._groups[key] = Group(result.route, found, result.id, result.place, answers)
            group.count += 1

    def add_malformed(self, line: MalformedLine) -> None:
        """Add a line that is not a request."""
        self._malformed_count += 1
        if len(self._malformed) < _SHOWN_LINES:
            self._malformed.append(line)

    def add_unsent(self, header: str) -> None:
        """Add a header that was removed from a request. An empty name stands for a whole request that was not sent."""
        if not header:
            self._unsent_requests += 1
        elif header in self._unsent_headers or len(self._unsent_headers) < _SHOWN_HEADERS:
            self._unsent_headers[header] += 1

    @property
    def unexplained(self) -> int:
        """The number of requests that have an unexplained difference or no answer."""
        return self._unexplained + self._without_answer

    @property
    def passed(self) -> bool:
        """True if answers were compared, every difference is explained, and nothing failed."""
        return bool(self._compared) and not (self.unexplained or self._malformed_count or self.ended)

    def as_json(self) -> dict[str, Any]:
        # The groups without an explanation come first. In each of the two parts, large groups come first.
        groups = sorted(
            self._groups.values(),
            key=lambda one: (one.example.explanation is not None, -one.count, one.example.kind, one.example.where),
        )
        similarity = None
        if self._similarities:
            values = np.frombuffer(self._similarities)
            similarity = {"mean": round(float(values.mean()), 4), "least": round(float(values.min()), 4)}
        return {
            "passed": self.passed,
            "ended": self.ended or None,
            "options": self._options,
            "requests": self.requests,
            "compared": self._compared,
            "equal": self._equal,
            "sampled": self._sampled,
            "with_explained_differences": self._explained,
            "with_unexplained_differences": self._unexplained,
            "without_answer": self._without_answer,
            "without_recorded_answer": self.requests - self._compared - self._without_answer,
            "malformed_lines": {
                "count": self._malformed_count,
                "first": [{"place": line.place, "message": line.message} for line in self._malformed],
            },
            "not_sent": {
                "management_requests": self._unsent_requests,
                "headers": dict(sorted(self._unsent_headers.items())),
            },
            "text_similarity": similarity,
            "differences": [group.as_json() for group in groups],
            "differences_without_group": {
                "explained": self._beyond[True],
                "unexplained": self._beyond[False],
            },
            "latency": {"old": self._old.as_json(), "new": self._new.as_json()},
        }

    def show(self, console: Console) -> None:
        """Print the report as tables."""
        report = self.as_json()
        for line in report["malformed_lines"]["first"]:
            console.print(escape(printable(f"{line['place']}: {line['message']}")), style="red", soft_wrap=True)
        if report["differences"]:
            console.print(_differences(report["differences"]))
        console.print(_latencies(report["latency"]))
        for line in summary(report):
            console.print(escape(printable(line)), soft_wrap=True, highlight=False)


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
        self.bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task("replay", total=limit or max(1, source.total_bytes), said="")

    def update(self) -> None:
        """Show the report's figures."""
        report = self._report
        done = report.requests if self._limit else self._source.bytes_read
        said = f"{report.requests} requests, {report.unexplained} with unexplained differences"
        self.bar.update(self._task, completed=done, said=said)


def _beginning(answer: str) -> str:
    return answer if len(answer) <= KEPT_ANSWER else f"{answer[:KEPT_ANSWER]}... (results.jsonl has more)"


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the sentences that summarize a report."""
    if not report["requests"]:
        found = ["No request was sent."]
    else:
        found = [
            f"{_count(report['requests'], 'request')}: {report['equal']} with equal answers, "
            f"{report['with_explained_differences']} with explained differences only, "
            f"{report['with_unexplained_differences']} with unexplained differences."
        ]
    if count := report["sampled"]:
        found.append(f"{_count(count, 'answer')} may be sampled: the form was compared, and not the text.")
    if count := report["without_answer"]:
        found.append(f"{_count(count, 'request')} without an answer.")
    if count := report["without_recorded_answer"]:
        found.append(f"{_count(count, 'request')} without a recorded answer, so nothing was compared.")
    if count := report["malformed_lines"]["count"]:
        found.append(f"{_count(count, 'malformed line')} in the source.")
    not_sent = report["not_sent"]
    if count := not_sent["management_requests"]:
        found.append(f"{_count(count, 'management request')} not sent: --management sends them, too.")
    if names := not_sent["headers"]:
        found.append(f"Headers that were not sent: {', '.join(names)}. --pass-header sends one.")
    if similarity := report["text_similarity"]:
        found.append(
            f"Similarity of the texts: {similarity['mean']:.0%} on average, {similarity['least']:.0%} at least."
        )
    if report["ended"]:
        found.append(f"The replay ended early: {report['ended']}.")
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rows(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the report's table.

    Explained groups with the same explanation, kind and route share a row, which lists the `where` of each group.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        explanation = group["explanation"]
        key: tuple[Any, ...] = (group["kind"], group["route"], group["where"])
        if explanation is not None:
            key = (group["kind"], group["route"], None, explanation["page"], explanation["statement"])
        row = found.setdefault(key, {**group, "places": [], "count": 0})
        row["count"] += group["count"]
        row["places"].append(group["where"])
    return [row | {"places": [place for place in row["places"] if place]} for row in found.values()]


def _differences(groups: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="Differences", title_justify="left", header_style="bold")
    for name in ("count", "kind", "route", "where", "old", "new", "explanation"):
        table.add_column(name, justify="right" if name == "count" else "left", overflow="fold")
    for group in rows(groups):
        explanation = group["explanation"]
        said = "[red]none[/red]"
        if explanation is not None:
            said = escape(explanation["setting"] or "documented") + f"\n[dim]{escape(explanation['page'])}[/dim]"
        example = group["example"]
        places, more = group["places"][:_SHOWN_PLACES], len(group["places"]) - _SHOWN_PLACES
        where = "\n".join(map(printable, places)) + (f"\nand {more} more" if more > 0 else "")
        route, old, new = map(printable, (group["route"], example["old"], example["new"]))
        cells = (str(group["count"]), group["kind"], route, where, old, new)
        table.add_row(*map(escape, cells), said)
    return table


def _latencies(latency: Mapping[str, Any]) -> Table:
    table = Table(title="Seconds", title_justify="left", header_style="bold")
    table.add_column("side")
    for name in ("answers", "without answer"):
        table.add_column(name, justify="right")
    for name in ("first byte", "whole"):
        for at in _PERCENTILES:
            table.add_column(f"{name} p{at}", justify="right")
    for side in ("old", "new"):
        times = latency[side]
        cells = [str(times["answers"]), str(times["without_answer"])]
        for name in ("first_byte_seconds", "seconds"):
            points = times.get(name, {})
            cells += [f"{points[f'p{at}']:.3f}" if points else "-" for at in _PERCENTILES]
        table.add_row(side, *cells)
    return table
