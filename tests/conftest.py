"""How the tests are shared out when several processes run them (pytest-xdist), and what tests of any kind use."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_SHARED = re.compile(r"\[lmi-dist[-\]]")
"""In the names of live tests whose server many files share: the value of their fixture `engine`."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the servers that many files share come first: one process runs them all, and others should not wait."""
    items.sort(key=lambda item: not _is_shared(item.nodeid))


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
    """Tests that share a server run in one process: those of conftest.py, or those of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return "shared" if _is_shared(nodeid) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer:
    """See pytest-xdist. Its own grouping by marks does nothing with pytest 9.2, whose items keep their ids."""
    config.option.loadscopereorder = False
    return ByServer(config, log)


def _is_shared(nodeid: str) -> bool:
    path, _, name = nodeid.partition("::")
    return path.startswith("tests/live/") and _SHARED.search(name) is not None
