"""A pytest plugin that writes JUnit XML for each part of the proof after every test, and enforces each part's limit.

    GPU_PROOF_RESULTS=DIR GPU_PROOF_PART_SECONDS=420 python -m pytest -p tests.gpu.junit

So a run that is cut short still leaves its results so far. pytest's `--junitxml` writes only at the end. The attribute
`planned` is the number of the part's tests, and `tests` is the number of tests that have ended. On SIGTERM and at the
limit, fixtures stop their servers.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

import pytest

_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OUTCOMES = ("failure", "error", "skipped")
_OVER = "the time is over"
_POOL_SECONDS = 2.0
"""The time that a thread pool may wait for its calls once the limit is reached."""
_OF_PART = re.compile(r"(?:.*/)?tests/gpu/test_(\w+)\.py")


def part_of(nodeid: str) -> str:
    """Return the part that a test belongs to. Tests outside this folder belong to the part `internals`."""
    found = _OF_PART.match(nodeid)
    return found[1] if found else "internals"


@dataclass(slots=True)
class Case:
    """One test that has ended."""

    seconds: float = 0.0
    outcome: str = ""
    """The name of a JUnit element. Empty if the test passed."""
    text: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    """Figures that the test recorded with `record_property`."""
    output: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """The tests of a part that have ended, by id."""

    planned: int = 0
    cases: dict[str, Case] = field(default_factory=dict)


class Results:
    """The results of all parts, each in its own file, and the limit of the current part."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds
        self._parts: dict[str, Part] = {}
        self._setup_seconds = 0.0
        self._running = ""
        self._limit: threading.Timer | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name = part_of(report.nodeid)
            part = self._parts.setdefault(name, Part())
            part.cases[report.nodeid] = Case(outcome="error", text=report.longreprtext)
            self.write(name)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._parts.setdefault(part_of(item.nodeid), Part()).planned += 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = part_of(nodeid)
        if name == self._running:
            return
        self.pytest_sessionfinish()
        self._running = name
        self._limit = threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGTERM))
        self._limit.daemon = True
        self._limit.start()
        self.write(name)

    def pytest_sessionfinish(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            self._setup_seconds = report.duration  # The test's outcome is not known yet.
            return
        name = part_of(report.nodeid)
        case = self._parts[name].cases.setdefault(report.nodeid, Case(self._setup_seconds))
        self._setup_seconds = 0.0
        case.seconds += report.duration
        if not report.passed and not case.outcome:
            case.outcome = "skipped" if report.skipped else "failure" if report.when == "call" else "error"
            case.text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
        case.figures = {key: str(value) for key, value in report.user_properties}
        case.output = [f"{title}\n{text}" for title, text in report.sections]
        self.write(name)

    def write(self, name: str) -> None:
        """Replace a part's file as a whole, so that it is valid XML at every moment."""
        part = self._parts[name]
        suite = ElementTree.Element("testsuite", name=name, tests=str(len(part.cases)), planned=str(part.planned))
        outcomes = [case.outcome for case in part.cases.values()]
        for attribute, outcome in zip(("failures", "errors", "skipped"), _OUTCOMES, strict=True):
            suite.set(attribute, str(outcomes.count(outcome)))
        suite.set("time", f"{sum(case.seconds for case in part.cases.values()):.3f}")
        for nodeid, case in part.cases.items():
            module, _, test = nodeid.partition("::")
            name_of_case = {"classname": module, "name": test or module}
            element = ElementTree.SubElement(suite, "testcase", name_of_case, time=f"{case.seconds:.3f}")
            for key, value in case.figures.items():
                ElementTree.SubElement(element, "property", name=key, value=_NOT_XML.sub("?", value))
            if case.outcome:
                text = _NOT_XML.sub("?", case.text)
                ElementTree.SubElement(element, case.outcome, message=text.strip().rpartition("\n")[2]).text = text
            if case.output:
                ElementTree.SubElement(element, "system-out").text = _NOT_XML.sub("?", "\n".join(case.output))
        file = self._directory / f"{name}.xml"
        partial = file.with_name(file.name + ".partial")
        ElementTree.ElementTree(suite).write(partial, encoding="utf-8", xml_declaration=True)
        partial.replace(file)


def pytest_configure(config: pytest.Config) -> None:
    results = Results(Path(os.environ["GPU_PROOF_RESULTS"]), float(os.environ["GPU_PROOF_PART_SECONDS"]))
    config.pluginmanager.register(results)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End the run. If the calls of a test's thread pool do not end, leave the pool: the server may hang."""
    signal.signal(signal.SIGALRM, _leave_pool)  # Replaces pytest-timeout's handler.
    signal.setitimer(signal.ITIMER_REAL, _POOL_SECONDS, _POOL_SECONDS)
    pytest.exit(_OVER)


def _leave_pool(number: int, frame: FrameType | None) -> None:
    # The shutdown of a pool is interrupted. All other code may go on, because it may be stopping a server.
    if any(each.f_code is ThreadPoolExecutor.shutdown.__code__ for each, _ in traceback.walk_stack(frame)):
        pytest.exit(_OVER)
