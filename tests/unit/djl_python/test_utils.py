from __future__ import annotations

from pathlib import Path

import pytest

from djl_python.utils import (
    IdCounter,
    find_model_file,
    is_beam_search,
    is_best_of,
    is_multiple_sequences,
    is_streaming,
    wait_till_generation_finished,
)


def test_a_counter_starts_again_at_its_limit_and_when_reset() -> None:
    counter = IdCounter()
    assert [counter.next_id(), counter.next_id(), counter.get_id()] == [0, 1, 2]
    counter.id = IdCounter.MAX_ID - 1
    assert [counter.next_id(), counter.next_id()] == [IdCounter.MAX_ID - 1, 0]
    counter.reset()
    assert counter.get_id() == 0


@pytest.mark.parametrize("name", ["best_of", "n", "num_beams"])
def test_only_more_than_one_sequence_has_to_be_waited_for(name: str) -> None:
    assert wait_till_generation_finished({name: 2})
    assert not any(wait_till_generation_finished({name: number}) for number in (None, 0, 1))
    assert not wait_till_generation_finished({})
    several = [is_best_of({name: 2}), is_multiple_sequences({name: 2}), is_beam_search({name: 2})]
    assert several == [name == "best_of", name == "n", name == "num_beams"]


def test_streaming_is_off_unless_asked_for() -> None:
    assert is_streaming({"stream": True})
    assert is_streaming({"stream": False}) is False
    assert is_streaming({}) is False


def test_the_one_model_file_is_found(tmp_path: Path) -> None:
    assert find_model_file(str(tmp_path), ["joblib"]) is None
    (tmp_path / "a.joblib").touch()
    (tmp_path / "b.txt").touch()
    assert find_model_file(str(tmp_path), ["pkl", "joblib"]) == str(tmp_path / "a.joblib")
    (tmp_path / "c.pkl").touch()
    with pytest.raises(ValueError, match="Multiple model files found"):
        find_model_file(str(tmp_path), ["pkl", "joblib"])
