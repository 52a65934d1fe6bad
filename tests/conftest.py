"""The distribution of tests to several processes (pytest-xdist), and fixtures for any kind of test."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# On a busy machine, one example may take several seconds. The examples differ in each run.
settings.register_profile(
    "slow", settings.default, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# A second run, with another Python, uses this profile.
settings.register_profile("few", settings.get_profile("slow"), max_examples=10)
settings.load_profile("slow")

_SHARED = re.compile(r"[\[-](lmi-dist|sample|host)[-\]]")
"""Finds the value of the fixture `engine`, `sample_server` or `host` in a live test's name.

Tests in many files share these servers.
"""
_INTERNALS = "_internals.py"
"""The suffix of live test files that import vLLM into the test's process.

In each process, this import takes ten seconds and a gigabyte.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests with a shared server first, and then files with slow tests.

    One process runs all tests of a server or a file. The other processes should not wait for it at the end.
    """
    if not hasattr(config, "workerinput"):
        return  # There is only one process.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_shared(item.nodeid) == "", item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape the characters in logs that UTF-8 cannot encode. Logs are passed between processes as UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def no_collection_by_itself() -> Iterator[None]:
    """Disable the automatic collection of reference cycles. An explicit call collects the test's cycles alone.

    Without `freeze`, each call would traverse all objects of the packages that other tests have imported.
    """
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


class ByServer(LoadScopeScheduling):
    """A scheduler that runs tests in one process if they share a server or use vLLM. Other tests are run by file."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared(nodeid) or nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer:
    """Return the scheduler for pytest-xdist.

    xdist's own grouping by marks has no effect with pytest 9.2, because items keep their ids.
    """
    config.option.loadscopereorder = False
    return ByServer(config, log)


def _shared(nodeid: str) -> str:
    """Return the name of the shared server that a live test uses.

    Without a shared server, return `_INTERNALS` for a live test that imports vLLM, and "" for any other test.
    """
    path, _, name = nodeid.partition("::")
    if not path.startswith("tests/live/"):
        return ""
    server = _SHARED.search(name)
    return server[1] if server else _INTERNALS if path.endswith(_INTERNALS) else ""
