"""Engine cores without a model: they speak vLLM's protocol, and send the tokens of a fixed text at a fixed rate.

So a measurement covers only the front end. A request gets its first token at once, and one more token with each step. A
request for a vector gets the vector at once. The protocol is that of vLLM 0.32 between `AsyncMPClient` and its engine
process: requests arrive on a DEALER socket, outputs leave on a PUSH socket, and messages are encoded in msgpack.

The prefix cache is only simulated, and saves no time: an engine counts the prompt tokens that a cache would have held.

    python -m benchmarks.scripted_engine DIRECTORY SCRIPT

SCRIPT is a `scripted_front_end.Script` in JSON. The sockets are in DIRECTORY (`scripted_front_end.addresses`). Each
engine is a process that runs until it is killed.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from transformers import AutoTokenizer
from vllm import __version__ as vllm_version
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from benchmarks.scripted_front_end import BLOCK, MAX_MODEL_LEN, Script, addresses

MAX_SEQUENCES = 1024
_TEXT_CHARACTERS = 20_000
_VECTOR = torch.linspace(-1, 1, 64)
# Each answer starts this many tokens further on in the scripted text than the previous answer, so that answers differ.
_STRIDE = 37
_READY = EngineCoreReadyResponse(
    max_model_len=MAX_MODEL_LEN,
    num_gpu_blocks=10_000,
    block_size=BLOCK,
    dp_stats_address=None,
    dtype="float32",
    vllm_version=vllm_version,
    world_size=1,
    data_parallel_size=1,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    decode_context_parallel_size=1,
    data_parallel_rank=0,
    max_num_seqs=MAX_SEQUENCES,
    max_num_batched_tokens=8192,
    instance_id="scripted",
    supports_lora=False,
    max_loras=0,
)


@dataclass(slots=True)
class _Sequence:
    request_id: str
    place: int  # The position of the next token in the text.
    left: int  # The number of tokens still to send.
    logprobs: int | None
    prefill: PrefillStats
    begun: bool = False
    pooled: bool = False  # The request gets a vector instead of tokens.


class PrefixCache:
    """The complete blocks of the latest prompts."""

    def __init__(self, size: int) -> None:
        """Create an empty cache with room for `size` blocks."""
        self._size = size
        # The keys are hashes of all tokens up to the end of a block.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, token_ids: Sequence[int]) -> int:
        """Add a prompt to the cache.

        Returns:
            The number of the prompt's tokens that were in the cache. The last token never counts, because vLLM always
            computes it.
        """
        keys, key = [], 0
        for end in range(BLOCK, len(token_ids) + 1, BLOCK) if self._size else ():
            key = hash((key, *token_ids[end - BLOCK : end]))
            keys.append(key)
        known = next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):  # The end of a prompt is evicted before its beginning.
            self._blocks.pop(key, None)
            self._blocks[key] = None
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)
        return min(known, (len(token_ids) - 1) // BLOCK) * BLOCK


class ScriptedEngine:
    """The engine core's side of the protocol."""

    def __init__(self, directory: Path, token_ids: list[int], script: Script, number: int = 0) -> None:
        """Create the engine with this number, and connect it."""
        self._task = script.task
        self._cache, self._looked_up = PrefixCache(script.cache_blocks), PrefixCacheStats()
        context, where = zmq.Context(), addresses(directory, number)
        self._input = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
        self._output = context.socket(zmq.PUSH)
        for socket, address in ((self._input, where["input_address"]), (self._output, where["output_address"])):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        self._token_ids, self._step_seconds = token_ids, script.step_ms / 1000
        self._requests, self._others = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._running: dict[str, _Sequence] = {}
        self._place = 0

    def run(self) -> None:
        """Serve forever."""
        self._input.send(self._encoder.encode(_READY)[0])
        due = 0.0
        while True:
            wait = due - time.monotonic() if self._running else None
            if wait is None or wait > 0.0:
                if self._input.poll(None if wait is None else int(wait * 1000)):
                    was_idle = not self._running
                    self._advance(self._read())
                    if was_idle:
                        due = time.monotonic() + self._step_seconds
                elif wait is not None and (rest := due - time.monotonic()) > 0:
                    time.sleep(rest)  # This is less than a millisecond, which is too short for `poll`.
                continue
            due = max(due + self._step_seconds, time.monotonic())  # A late step delays all later steps.
            self._advance([*self._running.values(), *self._read()])

    def _read(self) -> list[_Sequence]:
        """Read all messages that have arrived. Return the new sequences."""
        new: list[_Sequence] = []
        while True:
            try:
                kind, *frames = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return new
            if kind == EngineCoreRequestType.ADD.value:
                new.append(self._sequence(self._requests.decode(frames)))
            elif kind == EngineCoreRequestType.ABORT.value:
                aborted = set(self._others.decode(frames))
                new = [sequence for sequence in new if sequence.request_id not in aborted]
                for request_id in aborted:
                    self._running.pop(request_id, None)
            elif kind == EngineCoreRequestType.UTILITY.value:
                _, call_id, method, _ = self._others.decode(frames)
                result = (self._task,) if method == "get_supported_tasks" else method != "reset_mm_cache" or None
                self._send(EngineCoreOutputs(utility_output=UtilityOutput(call_id, result=UtilityResult(result))))

    def _sequence(self, request: EngineCoreRequest) -> _Sequence:
        prompt, prefill = request.prompt_token_ids or (), PrefillStats()
        cached = self._cache.take(prompt)
        prefill.set(len(prompt), cached, 0)
        self._looked_up.record(len(prompt), cached, preempted=False)
        if (params := request.sampling_params) is None:
            return _Sequence(request.request_id, 0, 1, None, prefill, pooled=True)
        self._place = (self._place + _STRIDE) % len(self._token_ids)
        return _Sequence(request.request_id, self._place, params.max_tokens, params.logprobs, prefill)

    def _advance(self, sequences: Iterable[_Sequence]) -> None:
        """Send the next token of each sequence, or the vector of a request for a vector."""
        outputs = [self._output_of(sequence) for sequence in sequences]
        if not outputs:
            return
        finished = {output.request_id for output in outputs if output.finish_reason is not None}
        stats = SchedulerStats(num_running_reqs=len(self._running), prefix_cache_stats=self._looked_up)
        self._looked_up = PrefixCacheStats()
        self._send(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, finished_requests=finished or None))

    def _output_of(self, sequence: _Sequence) -> EngineCoreOutput:
        if sequence.pooled:
            return EngineCoreOutput(
                sequence.request_id,
                [],
                pooling_output=_VECTOR,
                finish_reason=FinishReason.STOP,
                prefill_stats=sequence.prefill,
            )
        token_id = self._token_ids[sequence.place]
        sequence.place = (sequence.place + 1) % len(self._token_ids)
        sequence.left -= 1
        output = EngineCoreOutput(sequence.request_id, [token_id])
        if not sequence.begun:
            sequence.begun = True
            self._running[sequence.request_id] = sequence
            output.prefill_stats = sequence.prefill
        if sequence.left <= 0:
            del self._running[sequence.request_id]
            output.finish_reason = FinishReason.LENGTH
        if sequence.logprobs is not None:
            output.new_logprobs = _logprobs(token_id, sequence.logprobs)
        return output

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._output.send_multipart(self._encoder.encode(outputs), copy=False)


def _logprobs(token_id: int, alternatives: int) -> LogprobsLists:
    """Return the log probabilities of the chosen token, followed by those of `alternatives` other tokens."""
    ids = np.array([[token_id, *range(100, 100 + alternatives)]], dtype=np.int32)
    values = np.array([[-0.5 - place for place in range(1 + alternatives)]], dtype=np.float32)
    return LogprobsLists(ids, values, np.array([1], dtype=np.int32))


def main() -> None:
    """Serve the front end that uses the sockets in the given directory."""
    directory, text = sys.argv[1:]
    script = msgspec.json.decode(text, type=Script)
    tokenizer: Any = AutoTokenizer.from_pretrained(script.model)
    said = "\n".join(pydoc_data.topics.topics.values())[:_TEXT_CHARACTERS]
    token_ids = tokenizer.encode(said, add_special_tokens=False)
    # This process is the first engine. The other engines are its children, and share its memory.
    number = next((number for number in range(1, script.engines) if os.fork() == 0), 0)
    ScriptedEngine(Path(directory), token_ids, script, number).run()


if __name__ == "__main__":
    main()
