"""Requests that continue in the next engine process.

The tests look at the requests that the next process gets, and at requests that kill a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from engines.statistics import EngineStatistics
from tests.stand_ins.recorder import Recorder
from tests.stand_ins.vllm_clients import Started, engine_request, late_interaction
from tests.waiting import until

pytestmark = pytest.mark.live


def _request(request_id: str, **given: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(**{"max_tokens": 10, "min_tokens": 4, "temperature": 0.0} | given)
    return engine_request(request_id, sampling_params=params)


class _Detokenizer:
    def __init__(self, tokens: list[int]) -> None:
        self.output_token_ids = tokens

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


class _State(SimpleNamespace):
    """A sequence of vLLM's front end, with the tokens that have arrived."""

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
        ({"bad_words": ["a"], "_bad_words_token_ids": [[7, 8]]}, {}, "bad_words of several tokens"),
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
    from engines.vllm.copies.continuation import CannotContinue, continued
    from engines.vllm.output import PooledState
    from engines.vllm.output_processor import LeanOutputProcessor

    def states(request: Any) -> list[Any]:
        """Return the state of a sequence of Slipway, and the state of a sequence of vLLM's front end."""
        processor = LeanOutputProcessor(None, log_stats=True)
        processor.add_request(request, None)
        return [PooledState(request, Recorder(), EngineStatistics()), processor.request_states["a"]]

    request = _request("a")
    assert all(state.core_request is request for state in states(request))
    for state in states(engine_request("a", mm_features=[object()])):
        with pytest.raises(CannotContinue, match="images or sounds"):
            continued(state, _config())


def test_a_document_is_not_sent_to_a_copy_without_the_vectors_of_its_query() -> None:
    from engines.vllm.copies.continuation import CannotContinue, continued

    query: Any = _State(late_interaction("a", "cache_query"), [])
    assert continued(query, _config()).request_id == "a"
    document: Any = _State(late_interaction("a", "score_doc"), [])
    with pytest.raises(CannotContinue, match="vectors of its query"):
        continued(document, _config())


class _Sequences:
    """Sequences on copies, with stand-ins for the copies' processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copies: int, names: Iterable[str]) -> None:
        from engines.vllm.copies.continuation import Continuations

        self.started = Started(monkeypatch, copies)
        self.client = self.started.client
        self.states: dict[str, Any] = {name: _State(_request(name), [4]) for name in names}
        llm: Any = SimpleNamespace(
            vllm_config=_config(), output_processor=SimpleNamespace(request_states=self.states), engine_core=self.client
        )
        self.statistics = EngineStatistics()
        self.continuations = Continuations(llm, self.client, self.statistics, None, deaths=1)

    def where(self, name: str) -> Any:
        return self.client.placed[name].copy

    def give_token(self, name: str) -> None:
        self.states[name].detokenizer.output_token_ids.append(5)

    def kill(self, copy: Any) -> None:
        self.continuations.copy_died(copy, self.started.kill(copy))

    def errors(self, name: str) -> list[str]:
        return [str(error) for error in self.states[name].errors]


async def test_a_sequence_goes_on_after_the_tokens_that_are_still_to_be_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's output loop lets other tasks run in the middle of a message with many sequences, and may be late with
    messages.
    """
    sequences = _Sequences(monkeypatch, 2, ("a", "b"))
    for state in sequences.states.values():
        await sequences.client.add_request_async(state.core_request)
    first, second = sequences.where("a"), sequences.where("b")
    assert first is not second

    async def handle(message: Any) -> None:
        for name in message.names:
            sequences.give_token(name)
            await asyncio.sleep(0)

    def message(*names: str) -> Any:
        return SimpleNamespace(outputs=[], names=names, engine_index=0)

    second.client.queue.put_nowait(message(*["b"] * 5))
    for _ in range(3):
        first.client.queue.put_nowait(message("a"))
    sequences.kill(first)
    first.client.queue.put_nowait(message("a"))  # This message is dropped: the other copy generates the token.
    async with sequences.started.reading(handle):
        await sequences.continuations.send_on()
    assert second.client.added[-1].prompt_token_ids == [1, 2, 3, 4, 5, 5, 5]
    assert sequences.states["a"].detokenizer.output_token_ids == [4, 5, 5, 5]


async def test_suspects_that_wait_for_a_copy_get_an_error_if_none_will_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.errors import EngineDead

    sequences = _Sequences(monkeypatch, 1, ("a", "b"))
    for state in sequences.states.values():
        await sequences.client.add_request_async(state.core_request)
    (copy,) = sequences.started.copies
    sequences.kill(copy)
    sequences.continuations.fail_suspects()
    assert not sequences.errors("a")
    sequences.continuations.copy_died(copy, ["a"])
    for _ in range(2):
        sequences.continuations.fail_suspects()
        assert sequences.errors("a") == [EngineDead().message]
    assert not sequences.errors("b"), "it ran at one death"


async def test_a_suspect_that_another_copy_has_got_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies start at once. The second copy tries one suspect while the first copy waits for another suspect."""
    from engines.errors import EngineDead

    sequences = _Sequences(monkeypatch, 1, ("a", "b", "killer"))
    started, continuations = sequences.started, sequences.continuations
    for state in sequences.states.values():
        await sequences.client.add_request_async(state.core_request)
    async with started.reading():
        sequences.kill(started.copies[0])
        second = started.start(1)
        await continuations.send_to(second)
        sequences.kill(second)
        copies = [started.start(number) for number in (1, 2)]
        trials = [asyncio.create_task(continuations.send_to(copy)) for copy in copies]
        await until(lambda: [copy.client.added_ids for copy in copies] == [["a"], ["b"]])
        sequences.give_token("a")
        await until(lambda: copies[0].client.added_ids == ["a", "killer"])
        for trial in trials:
            trial.cancel()
        await asyncio.wait(trials)
        sequences.kill(copies[0])
    assert sequences.errors("killer") == [EngineDead().message]
    assert not sequences.errors("a")
    assert not sequences.errors("b")
