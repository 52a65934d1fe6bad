"""The distribution of tests to several processes (pytest-xdist), and fixtures for tests of any kind."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A busy machine can keep one example waiting for seconds.
settings.register_profile("slow", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For a second run on another Python.
settings.register_profile("few", settings.get_profile("slow"), max_examples=10)
settings.load_profile("slow")

_SHARED = re.compile(r"[\[-](lmi-dist|sample|host)[-\]]")
"""Finds the value of the fixture `engine`, `sample_server` or `host` in a live test's name.

Many files share their servers.
"""
_INTERNALS = "_internals.py"
"""The end of the names of live tests' files that import vLLM into the test's process.

This import takes ten seconds and a gigabyte in each process.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests with a shared server first. One process runs all of them, and the others should not wait for it."""
    if not hasattr(config, "workerinput"):
        return  # There is one process.
    items.sort(key=lambda item: _shared(item.nodeid) == "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape the characters of logs that UTF-8 cannot encode. Logs go from process to process as UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def no_collection_by_itself() -> Iterator[None]:
    """Turn the collector of reference cycles off. Only an explicit call collects cycles, and only those of the test.

    Without `freeze`, each call walks over all objects of the packages that other tests have imported.
    """
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


class ByServer(LoadScopeScheduling):
    """A scheduler that runs tests with a shared server, or with vLLM, in one process. Other tests go by file."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared(nodeid) or nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer:
    """Return the scheduler for pytest-xdist.

    xdist's own grouping by marks has no effect with pytest 9.2, because items keep their ids.
    """
    config.option.loadscopereorder = False
    return ByServer(config, log)


def _shared(nodeid: str) -> str:
    """Return the server that a live test shares with other files, a sign for vLLM in this process, or ""."""
    path, _, name = nodeid.partition("::")
    if not path.startswith("tests/live/"):
        return ""
    server = _SHARED.search(name)
    return server[1] if server else _INTERNALS if path.endswith(_INTERNALS) else ""
