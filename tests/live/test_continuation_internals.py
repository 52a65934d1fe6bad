"""Requests that go on in the next engine process: those that may, what it gets, and a request that kills engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engines.statistics import EngineStatistics
from tests.waiting import until

pytestmark = pytest.mark.live


def _request(request_id: str, **given: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(**{"max_tokens": 10, "min_tokens": 4, "temperature": 0.0} | given)
    return EngineCoreRequest(
        request_id=request_id,
        external_req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class _Detokenizer:
    def __init__(self, tokens: list[int]) -> None:
        self.output_token_ids = tokens

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


class _State(SimpleNamespace):
    """A sequence of vLLM's front end, with the tokens that have come."""

    def __init__(self, request: Any, tokens: list[int]) -> None:
        errors: list[Exception] = []
        super().__init__(
            request_id=request.request_id,
            external_req_id=request.request_id,
            core_request=request,
            detokenizer=_Detokenizer(tokens),
            errors=errors,
            queue=SimpleNamespace(put=errors.append),
        )


def _config(**given: Any) -> Any:
    structured = SimpleNamespace(reasoning_parser=given.get("reasoning_parser", ""), enable_in_reasoning=False)
    model = SimpleNamespace(logits_processors=given.get("logits_processors"))
    return SimpleNamespace(structured_outputs_config=structured, model_config=model)


def _continued(tokens: list[int], config: Any = None, **given: Any) -> Any:
    from engines.vllm.copies.continuation import continued

    state: Any = _State(_request("a", **given), tokens)
    return continued(state, config or _config())


def test_the_next_process_gets_the_prompt_with_the_tokens_that_have_come_and_makes_the_rest() -> None:
    request = _continued([4, 5], prompt_logprobs=1)
    assert request.prompt_token_ids == [1, 2, 3, 4, 5]
    params = request.sampling_params
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (8, 2, None)
    assert _continued([4] * 9).sampling_params.min_tokens == 0


def test_a_request_without_tokens_is_sent_as_it_was() -> None:
    request = _continued([], prompt_logprobs=1, presence_penalty=1.0, seed=3, temperature=1.0)
    assert request.prompt_token_ids == [1, 2, 3]
    assert (request.sampling_params.max_tokens, request.sampling_params.prompt_logprobs) == (10, 1)


@pytest.mark.parametrize(
    ("given", "config", "reason"),
    [
        ({"presence_penalty": 0.1}, {}, "count the tokens of the answer alone"),
        ({"frequency_penalty": 0.1}, {}, "count the tokens of the answer alone"),
        ({"seed": 1, "temperature": 1.0}, {}, "random numbers of its seed"),
        ({"thinking_token_budget": 5}, {}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, {}, "repetition_detection"),
        ({"extra_args": {"kv_transfer_params": {"a": 1}}}, {}, "from another server"),
        ({}, {"logits_processors": ["their.module:Processor"]}, "option.logits_processors"),
    ],
)
def test_a_request_whose_rest_depends_on_what_is_lost_is_refused(given: Any, config: Any, reason: str) -> None:
    from engines.vllm.copies.continuation import CannotContinue

    with pytest.raises(CannotContinue, match=reason):
        _continued([4], _config(**config), **given)


def test_a_seed_without_sampling_and_slipways_own_processor_are_no_reason() -> None:
    own = _config(logits_processors=["engines.vllm.sampling:TypicalLogitsProcessor"])
    assert _continued([4], own, seed=1).prompt_token_ids == [1, 2, 3, 4]


def test_a_constraint_that_begins_after_the_reasoning_is_refused() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from engines.vllm.copies.continuation import SENT, CannotContinue

    form = StructuredOutputsParams(regex="a+")
    assert _continued([4, 5], structured_outputs=form).reasoning_parser_kwargs == {SENT: 2}
    with pytest.raises(CannotContinue, match="where the reasoning ends"):
        _continued([4, 5], _config(reasoning_parser="qwen3"), structured_outputs=form)


def test_images_and_sounds_are_not_kept() -> None:
    from engines.vllm import internals
    from engines.vllm.copies.continuation import CannotContinue, continued

    request = _request("a")
    assert internals.kept(request) is request
    request.mm_features = [object()]
    state: Any = _State(request, [])
    state.core_request = internals.kept(request)
    with pytest.raises(CannotContinue, match="images or sounds"):
        continued(state, _config())


@pytest.mark.asyncio
async def test_a_request_that_kills_each_engine_is_found_and_gets_the_error_alone() -> None:
    from engines.errors import EngineDead
    from engines.vllm.copies.continuation import Continuations

    states: dict[str, Any] = {name: _State(_request(name), [4]) for name in ("a", "killer", "b")}
    sent: list[str] = []

    async def add(request: Any) -> None:
        sent.append(request.request_id)
        if request.request_id != "killer":
            states[request.request_id].detokenizer.output_token_ids.append(5)

    llm: Any = SimpleNamespace(
        vllm_config=_config(),
        output_processor=SimpleNamespace(request_states=states),
        engine_core=SimpleNamespace(add_request_async=add),
    )
    statistics = EngineStatistics()
    continuations = Continuations(llm, statistics, None, deaths=1)

    async def restarted() -> asyncio.Task[None]:
        continuations.engine_died()
        continuations.engine_replaced()
        sent.clear()
        return asyncio.create_task(continuations.send_all())

    await (await restarted())
    assert sent == ["a", "killer", "b"], "after the first death, all go on together"
    assert statistics.continued_requests == 3
    trial = await restarted()
    await until(lambda: sent == ["a", "killer"])
    trial.cancel()  # as the engine does when it has died
    await asyncio.wait([trial])
    assert not states["killer"].errors
    following = await restarted()
    assert [str(error) for error in states["killer"].errors] == [EngineDead().message]
    del states["killer"]  # its call has ended
    await following
    assert sent == ["a", "b"]
    assert not states["a"].errors
    assert not states["b"].errors
