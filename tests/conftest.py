"""How the tests are shared out when several processes run them (pytest-xdist), and what tests of any kind use."""

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
settings.load_profile("slow")

_SHARED = re.compile(r"[\[-](lmi-dist|host)[-\]]")
"""In the names of live tests whose server many files share: the value of their fixture `engine` or `host`."""
_INTERNALS = "_internals.py"
"""Ends the names of live tests' files that import vLLM here; that takes ten seconds and a gigabyte in each process."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What many files share comes first: one process runs all of it, and others should not wait for that."""
    items.sort(key=lambda item: _shared(item.nodeid) == "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged goes from process to process as UTF-8, and some tests log what that cannot write."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def no_collection_by_itself() -> Iterator[None]:
    """Reference cycles stay until somebody has them collected."""
    gc.disable()
    yield
    gc.enable()


class ByServer(LoadScopeScheduling):
    """Tests that share a server, or vLLM, run in one process; else those of a file do."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared(nodeid) or nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer:
    """See pytest-xdist. Its own grouping by marks does nothing with pytest 9.2, whose items keep their ids."""
    config.option.loadscopereorder = False
    return ByServer(config, log)


def _shared(nodeid: str) -> str:
    """What a live test shares with those of other files: a server, or vLLM in this process; "" if nothing."""
    path, _, name = nodeid.partition("::")
    if not path.startswith("tests/live/"):
        return ""
    server = _SHARED.search(name)
    return server[1] if server else _INTERNALS if path.endswith(_INTERNALS) else ""
