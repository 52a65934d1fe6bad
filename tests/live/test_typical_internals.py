"""Locally typical sampling on vLLM: both interfaces of vLLM cut the same tokens as transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import InvalidParameter

VOCABULARY = 17
# Numbers that float32 can hold. None is so near to 1 that only rounding decides whether anything is cut.
MASSES = st.none() | st.just(1.0) | st.floats(0.0625, 1 - 2**-10, width=32)
LOGITS = st.lists(st.floats(-20, 20, width=32) | st.just(float("-inf")), min_size=VOCABULARY, max_size=VOCABULARY)
ROWS = st.lists(
    st.tuples(LOGITS.filter(lambda row: max(row) > -20), MASSES, st.floats(0.3, 2.0)), min_size=1, max_size=6
)


def params(mass: float | None, temperature: float = 1.0) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, extra_args=None if mass is None else {"typical_p": mass})


def warped(logits: Any, mass: float | None, temperature: float = 1.0) -> Any:
    """Return one row of logits after transformers' cut. The temperature is applied before the cut."""
    from transformers import TypicalLogitsWarper

    if mass is None or mass == 1.0:
        return logits
    cut = TypicalLogitsWarper(mass)(None, logits[None] / temperature)[0]
    return logits.masked_fill(cut.isinf(), float("-inf"))


@settings(max_examples=60)
@given(rows=ROWS)
def test_each_row_keeps_the_same_tokens_as_with_transformers(
    rows: list[tuple[list[float], float | None, float]],
) -> None:
    import torch
    from vllm.v1.sample.logits_processor import BatchUpdate

    from engines.vllm.sampling import TypicalLogitsProcessor

    logits = torch.tensor([row for row, _, _ in rows])
    expected = [warped(row, mass) for row, (_, mass, _) in zip(logits, rows, strict=True)]
    processor = TypicalLogitsProcessor(None, "cpu", False)
    added = [(place, params(mass), None, []) for place, (_, mass, _) in enumerate(rows)]
    processor.update_state(BatchUpdate(len(rows), (), added, ()))
    assert torch.equal(processor.apply(logits.clone()), torch.stack(expected))


@settings(max_examples=60)
@given(rows=ROWS, shift=st.integers(0, 5))
def test_the_newer_runners_processor_keeps_the_same_tokens_at_any_temperature(
    rows: list[tuple[list[float], float | None, float]], shift: int
) -> None:
    import numpy as np
    import torch

    from engines.vllm.sampling import TypicalProcessor

    logits = torch.tensor([row for row, _, _ in rows])
    expected = [warped(row, mass, temperature) for row, (_, mass, temperature) in zip(logits, rows, strict=True)]
    processor = TypicalProcessor(None, SimpleNamespace(device="cpu", max_num_reqs=12))
    places = [11 - (place + shift) for place in range(len(rows))]
    asks = [processor.add_request(at, params(mass, t)) for at, (_, mass, t) in zip(places, rows, strict=True)]
    assert asks == [mass is not None and mass < 1.0 for _, mass, _ in rows]
    batch = SimpleNamespace(idx_mapping_np=np.array(places))
    assert torch.equal(processor.apply(logits.clone(), batch), torch.stack(expected))


def test_rows_are_cut_wherever_vllm_moves_their_requests_and_no_more_once_these_have_left() -> None:
    import torch
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from engines.vllm.sampling import TypicalLogitsProcessor

    row = torch.tensor([3.0, 2.0, 1.0, 0.0])
    cut = warped(row, 0.2)
    assert not torch.equal(cut, row)
    processor = TypicalLogitsProcessor(None, "cpu", False)
    processor.update_state(BatchUpdate(2, (), [(0, params(0.2), None, []), (1, params(None), None, [])], ()))
    assert torch.equal(processor.apply(torch.stack((row, row))), torch.stack((cut, row)))
    processor.update_state(BatchUpdate(2, (), (), [(0, 1, MoveDirectionality.SWAP)]))
    assert torch.equal(processor.apply(torch.stack((row, row))), torch.stack((row, cut)))
    processor.update_state(BatchUpdate(1, (1,), (), ()))
    assert torch.equal(processor.apply(torch.stack((row, row))), torch.stack((row, row)))


def test_greedy_requests_are_left_alone_by_the_newer_runners_processor() -> None:
    import numpy as np
    import torch

    from engines.vllm.sampling import TypicalProcessor

    processor = TypicalProcessor(None, SimpleNamespace(device="cpu", max_num_reqs=2))
    assert processor.add_request(0, params(0.2)) is True
    assert processor.add_request(0, params(0.2, temperature=0.0)) is False, "the place of the former request"
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert torch.equal(processor.apply(logits.clone(), SimpleNamespace(idx_mapping_np=np.array([0]))), logits)


@pytest.fixture(scope="module")
def config(sample_model: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=str(sample_model), max_model_len=256, kv_cache_memory_bytes=1 << 26)


@pytest.mark.parametrize("new_runner", [False, True])
def test_each_of_vllms_model_runners_accepts_the_processor_that_is_loaded_for_it(config: Any, new_runner: bool) -> None:
    from vllm.v1.sample import logits_processor as older
    from vllm.v1.worker.gpu.sample import logits_processor as newer

    from engines.vllm.sampling import load_typical

    engine = SimpleNamespace(
        speculative_config=None,
        model_config=SimpleNamespace(logits_processors=None, return_sampling_mask=False),
        use_v2_model_runner=new_runner,
    )
    assert load_typical(engine) == ""  # type: ignore[arg-type]
    given = engine.model_config.logits_processors
    if new_runner:
        newer.build_custom_logits_processors_params_validator(given)(params(0.5))
    else:
        older.validate_logits_processors_parameters(given, params(0.5))
    whole = config.create_engine_config()
    assert load_typical(whole) == ""
    of_this_device = whole.model_config.logits_processors == given
    assert of_this_device is (bool(whole.use_v2_model_runner) is new_runner)


def test_beside_speculative_decoding_nothing_is_loaded_and_typical_p_is_refused_by_name(config: Any) -> None:
    import copy

    from engines.request import GenerationRequest, SamplingParameters
    from engines.vllm.sampling import SamplingTranslator, load_typical
    from handlers.openai.vllm.parameter_checks import check_parameters

    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    arguments = copy.copy(config)
    arguments.speculative_config = ngram
    engine = arguments.create_engine_config()
    refusal = load_typical(engine)
    assert not engine.model_config.logits_processors
    limits = SamplingTranslator(16, 1, 9, typical_refusal=refusal)
    request = GenerationRequest(request_id="r", prompt="x", sampling=SamplingParameters(typical_p=0.5))
    with pytest.raises(InvalidParameter, match=r"^`typical_p` cannot be used together with speculative decoding$"):
        limits.sampling_params(request, 1)
    with pytest.raises(InvalidParameter, match=r"^`typical_p` cannot be used together with speculative decoding$"):
        check_parameters(params(0.5), limits, None)
    check_parameters(params(None), limits, None)
