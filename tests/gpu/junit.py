"""A pytest plugin that writes JUnit's XML after each test, so that a run that is cut short leaves all it has found.

    GPU_PROOF_JUNIT=FILE python -m pytest -p tests.gpu.junit

pytest's `--junitxml` writes at the end alone. SIGTERM ends the run in order here: fixtures stop their servers.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

import pytest

_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OUTCOMES = ("failure", "error", "skipped")


@dataclass(slots=True)
class Case:
    """One test that has ended."""

    seconds: float = 0.0
    outcome: str = ""
    """An element of JUnit's; empty: passed."""
    text: str = ""
    output: list[str] = field(default_factory=list)


class Results:
    """The tests that have ended, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cases: dict[str, Case] = {}
        self._setup_seconds = 0.0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._cases[report.nodeid] = Case(outcome="error", text=report.longreprtext)
            self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            self._setup_seconds = report.duration  # nothing is known of the test yet
            return
        case = self._cases.setdefault(report.nodeid, Case(self._setup_seconds))
        self._setup_seconds = 0.0
        case.seconds += report.duration
        if not report.passed and not case.outcome:
            case.outcome = "skipped" if report.skipped else "failure" if report.when == "call" else "error"
            case.text = report.longreprtext
        case.output = [f"{title}\n{text}" for title, text in report.sections]
        self.write()

    def write(self) -> None:
        """Replace the file as a whole: it is XML at every moment."""
        suite = ElementTree.Element("testsuite", name="gpu-proof", tests=str(len(self._cases)))
        outcomes = [case.outcome for case in self._cases.values()]
        for name, outcome in zip(("failures", "errors", "skipped"), _OUTCOMES, strict=True):
            suite.set(name, str(outcomes.count(outcome)))
        suite.set("time", f"{sum(case.seconds for case in self._cases.values()):.3f}")
        for nodeid, case in self._cases.items():
            file, _, name = nodeid.partition("::")
            element = ElementTree.SubElement(suite, "testcase", classname=file, name=name, time=f"{case.seconds:.3f}")
            if case.outcome:
                text = _NOT_XML.sub("?", case.text)
                ElementTree.SubElement(element, case.outcome, message=text.strip().rpartition("\n")[2]).text = text
            if case.output:
                ElementTree.SubElement(element, "system-out").text = _NOT_XML.sub("?", "\n".join(case.output))
        partial = self._file.with_name(self._file.name + ".partial")
        ElementTree.ElementTree(suite).write(partial, encoding="utf-8", xml_declaration=True)
        partial.replace(self._file)


def pytest_configure(config: pytest.Config) -> None:
    results = Results(Path(os.environ["GPU_PROOF_JUNIT"]))
    results.write()
    config.pluginmanager.register(results)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    pytest.exit("the time is over")
