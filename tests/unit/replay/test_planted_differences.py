"""Each planted difference is found, and none is invented."""

from __future__ import annotations

from typing import Any

import pytest

from replay.comparison import Kind
from tests.unit.replay.planted import EQUAL, PLANTED, Planted
from tests.unit.replay.stand_in import CASE, Run, replay, serving, write_source


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compare two servers: the old answers, and those with planted differences."""
    pairs = (*PLANTED, *EQUAL)
    directory = tmp_path_factory.mktemp("planted")
    records: list[dict[str, Any]] = [
        {"id": pair.name, "path": pair.path, "headers": {CASE: pair.name}, "body": pair.body} for pair in pairs
    ]
    source = write_source(directory / "source.jsonl", records)
    with (
        serving({pair.name: pair.old for pair in pairs}) as old,
        serving({pair.name: pair.new for pair in pairs}) as new,
    ):
        return replay(source, directory / "out", "--to", new.url, "--against", old.url)


def test_each_kind_of_difference_is_planted() -> None:
    assert {kind for pair in PLANTED for kind, _ in pair.found} == set(Kind)


@pytest.mark.parametrize("pair", [*PLANTED, *EQUAL], ids=lambda pair: pair.name)
def test_the_planted_differences_are_found_and_no_others(run: Run, pair: Planted) -> None:
    found = {(one["kind"], one["where"]) for one in run.results[pair.name].get("differences", ())}
    assert found == set(pair.found)


def test_the_report_counts_each_difference_once(run: Run) -> None:
    groups = run.report["differences"]
    assert sum(group["count"] for group in groups) == sum(len(pair.found) for pair in PLANTED)
    assert run.code == 1
    assert not run.report["passed"]
    assert run.report["equal"] == len(EQUAL)
