"""The scripted engines of the benchmarks speak the same protocol as vLLM's engine process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TOKEN_IDS = list(range(1000, 2000))


class FrontEnd:
    """The other side of the protocol, with vLLM's own encoding."""

    def __init__(self, directory: Path, number: int) -> None:
        import zmq
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        from benchmarks.scripted_front_end import addresses

        where = addresses(directory, number)
        self._context = zmq.Context()
        self._requests, self._outputs = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        self._requests.bind(where["input_address"])
        self._outputs.bind(where["output_address"])
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def ready(self) -> Any:
        from vllm.v1.engine import EngineCoreReadyResponse
        from vllm.v1.serial_utils import MsgpackDecoder

        assert self._requests.poll(30_000)
        self._engine, message = self._requests.recv_multipart()
        return MsgpackDecoder(EngineCoreReadyResponse).decode(message)

    def send(self, kind: Any, message: Any) -> None:
        self._requests.send_multipart([self._engine, kind.value, *self._encoder.encode(message)])

    def add(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), *, pooled: bool = False, **params: Any) -> None:
        from vllm import PoolingParams, SamplingParams
        from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=None if pooled else SamplingParams(**params),
            pooling_params=PoolingParams(task="embed") if pooled else None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.send(EngineCoreRequestType.ADD, request)

    def read(self) -> Any:
        assert self._outputs.poll(30_000)
        return self._decoder.decode(self._outputs.recv_multipart())

    def outputs_until_finished(self, request_id: str) -> list[Any]:
        outputs: list[Any] = []
        while not (outputs and outputs[-1].finish_reason is not None):
            outputs += [output for output in self.read().outputs if output.request_id == request_id]
        return outputs

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def front_ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FrontEnd]]:
    """Start the engines of a script. Returns the front end of each."""
    from benchmarks.scripted_engine import ScriptedEngine
    from benchmarks.scripted_front_end import Script

    script = Script(model="none", **request.param)
    directory = tmp_path_factory.mktemp("e")  # the path of a Unix socket is short
    front_ends = [FrontEnd(directory, number) for number in range(script.engines)]
    for number in range(script.engines):
        engine = ScriptedEngine(directory, TOKEN_IDS, script, number)
        threading.Thread(target=engine.run, daemon=True).start()
    try:
        yield front_ends
    finally:
        for front_end in front_ends:
            front_end.close()


@pytest.mark.parametrize("front_ends", [{"step_ms": 1.0}], indirect=True)
def test_requests_get_their_tokens_utilities_their_results_and_aborted_requests_nothing(
    front_ends: list[FrontEnd],
) -> None:
    from vllm.v1.engine import EngineCoreRequestType, FinishReason

    (front_end,) = front_ends
    assert front_end.ready().max_model_len == 2048

    front_end.add("a", max_tokens=5, logprobs=1)
    outputs = front_end.outputs_until_finished("a")
    ids = [token_id for output in outputs for token_id in output.new_token_ids]
    assert ids == list(range(ids[0], ids[0] + 5))
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert outputs[0].prefill_stats.num_prompt_tokens == 3
    assert outputs[1].new_logprobs.logprob_token_ids.tolist() == [[ids[1], 100]]
    assert outputs[1].new_logprobs.logprobs.tolist() == [[-0.5, -1.5]]

    front_end.send(EngineCoreRequestType.UTILITY, (0, 7, "get_supported_tasks", ()))
    utility = front_end.read().utility_output
    assert (utility.call_id, list(utility.result.result)) == (7, ["generate"])

    front_end.add("long", max_tokens=10**6)
    assert front_end.read().outputs[0].request_id == "long"
    front_end.send(EngineCoreRequestType.ABORT, ["long"])
    front_end.add("b", max_tokens=1)
    last = front_end.read()
    while "b" not in {output.request_id for output in last.outputs}:
        last = front_end.read()
    front_end.add("c", max_tokens=3)
    for _ in range(3):
        assert [output.request_id for output in front_end.read().outputs] == ["c"]


@pytest.mark.parametrize("front_ends", [{"task": "embed", "step_ms": 60_000.0}], indirect=True)
def test_requests_for_vectors_get_them_at_once(front_ends: list[FrontEnd]) -> None:
    from vllm.v1.engine import EngineCoreRequestType, FinishReason

    (front_end,) = front_ends
    front_end.ready()
    front_end.send(EngineCoreRequestType.UTILITY, (0, 7, "get_supported_tasks", ()))
    assert list(front_end.read().utility_output.result.result) == ["embed"]
    for request_id in ("a", "b"):
        front_end.add(request_id, pooled=True)
        (output,) = front_end.outputs_until_finished(request_id)
        assert (output.finish_reason, output.pooling_output.shape) == (FinishReason.STOP, (64,))
        assert output.prefill_stats.num_prompt_tokens == 3


@pytest.mark.parametrize("front_ends", [{"step_ms": 1.0, "engines": 2, "cache_blocks": 4}], indirect=True)
def test_each_engine_has_a_prefix_cache_of_the_latest_blocks(front_ends: list[FrontEnd]) -> None:
    first, second = front_ends
    first.ready()
    second.ready()
    prompts = {name: [TOKEN_IDS[place]] * 48 for place, name in enumerate("ab")}

    def found(front_end: FrontEnd, prompt: list[int]) -> tuple[int, int, int]:
        front_end.add("one", prompt, max_tokens=1)
        outputs = front_end.read()
        looked_up, prefill = outputs.scheduler_stats.prefix_cache_stats, outputs.outputs[0].prefill_stats
        assert (prefill.num_prompt_tokens, prefill.num_cached_tokens) == (len(prompt), looked_up.hits)
        return looked_up.requests, looked_up.queries, looked_up.hits

    assert found(first, prompts["a"]) == (1, 48, 0)
    assert found(first, prompts["a"]) == (1, 48, 32), "the last token is computed in any case"
    assert found(first, [*prompts["a"], 1]) == (1, 49, 48)
    assert found(second, prompts["a"]) == (1, 48, 0)
    assert found(first, prompts["b"]) == (1, 48, 0)
    assert found(first, [*prompts["a"], 1]) == (1, 49, 16), "its last blocks were dropped first"
