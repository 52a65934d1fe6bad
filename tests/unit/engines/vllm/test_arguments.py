"""The table of vLLM's arguments, and the record of the arguments that were tried."""

from __future__ import annotations

from engines.vllm import RELEASE
from engines.vllm.arguments.table import ARGUMENTS, FRONT_END, ROWS, TABLE
from tests.engine_arguments import PAGE, TRIALS, results_in


def test_each_argument_of_the_engine_and_of_the_front_end_has_a_trial_and_its_result_is_written_down() -> None:
    names = {name for name, row in TABLE.items() if "of" in row}
    assert TRIALS.keys() == names
    page = PAGE.read_text()
    results = results_in(page)
    assert results.keys() == names
    assert [name for name, result in results.items() if "FAILS" in result] == []
    assert f"of vLLM {RELEASE}.0 was tried" in " ".join(page.split())


def test_the_arguments_of_the_next_release_are_not_those_of_this_one() -> None:
    following = {name for name, row in ROWS.items() if row.get("since", "") > RELEASE}
    assert not following & (TABLE.keys() | ARGUMENTS.keys() | FRONT_END)
    assert ROWS.keys() - TABLE.keys() == following
