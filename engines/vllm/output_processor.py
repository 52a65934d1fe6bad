"""vLLM's output processor and message decoder, with a fast path for common tokens.

For each token, vLLM's own decoder would make three arrays of log probabilities, and its processor would make an object.
`engines.vllm.output` has the sequences that handle common tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder

from engines.statistics import EngineStatistics


class SentLogprobs:
    """The log probabilities of one output, as the engine sent them.

    The engine sends three arrays. A common token needs only one value of them, so the arrays are not created.
    """

    __slots__ = ("_buffers", "_parts")

    def __init__(self, parts: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Keep the parts.

        Args:
            parts: The fields of `LogprobsLists`. An array consists of its data type, its shape, and its data. For a
                large array, the index of a buffer replaces the data.
            buffers: The data of large arrays.
        """
        self._parts, self._buffers = parts, buffers

    def chosen(self) -> float:
        """Return the log probability of the first chosen token."""
        dtype, _, data = self._parts[1]
        if dtype == "<f4" and not isinstance(data, int):
            number: float = _FLOAT32.unpack_from(data)[0]
            return number
        return float(self.arrays().logprobs[0, 0])

    def arrays(self) -> LogprobsLists:
        """Return vLLM's object with the arrays."""
        ids, logprobs, ranks, *rest = self._parts
        arrays = [_array(part, self._buffers) for part in (ids, logprobs, ranks)]
        return LogprobsLists(*arrays, *rest)


_FLOAT32 = struct.Struct("<f")


class SentNumbers:
    """The result of a pooled prompt, as the engine sent it: a data type, a shape, and the data."""

    __slots__ = ("_buffers", "_decoder", "_part")

    def __init__(self, part: Sequence[Any], decoder: MsgpackDecoder) -> None:
        """Keep the data. Instead of large data, `part` has the index of the message frame that contains them."""
        self._part, self._decoder, self._buffers = part, decoder, decoder.aux_buffers

    def array(self) -> np.ndarray:
        """Return the result as an array of float32."""
        if self._part[0] != "float32":
            converted: np.ndarray = self.tensor().float().numpy()
            return converted
        array = _array(self._part, self._buffers)
        return array if array.flags.aligned else array.copy()  # The data may be at an unaligned address.

    def tensor(self) -> torch.Tensor:
        """Return the result as the tensor that vLLM expects."""
        self._decoder.aux_buffers = self._buffers
        try:
            return self._decoder._decode_tensor(self._part)
        finally:
            self._decoder.aux_buffers = ()


def _array(part: Sequence[Any], buffers: Sequence[Any]) -> np.ndarray:
    """Decode an array of a message. Small data are inline, and large data are in a separate frame of the message."""
    dtype, shape, data = part
    return np.ndarray(shape, dtype, buffers[data] if isinstance(data, int) else data)


class SentOutput(EngineCoreOutput, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """The output for one sequence, as the engine sent it."""

    new_logprobs: SentLogprobs | None = None
    pooling_output: SentNumbers | None = None


class SentOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    """The outputs of one step, as the engine sent them."""

    outputs: list[SentOutput] = msgspec.field(default_factory=list)


class LeanDecoder(MsgpackDecoder):
    """vLLM's decoder of engine messages. It leaves log probabilities and pooled results undecoded."""

    def dec_hook(self, t: type, obj: Any) -> Any:
        if t is SentLogprobs:
            return SentLogprobs(obj, self.aux_buffers)
        if t is SentNumbers:
            return SentNumbers(obj, self)
        return super().dec_hook(t, obj)


class TokenTaker(RequestState):
    """A sequence that can handle common tokens itself.

    A token is common if it is the only token of its output, comes without other data, and neither begins nor ends the
    answer.
    """

    takes_tokens: bool  # If False, vLLM's output processor handles all tokens of the sequence.
    statistics: EngineStatistics  # Counts the tokens that are not common.

    def take(self, token_id: int, logprob: float | None) -> None:
        """Handle a common token.

        Args:
            token_id: The token.
            logprob: Its log probability. None if the request wants none.
        """
        raise NotImplementedError


class LeanOutputProcessor(OutputProcessor):
    """vLLM's output processor, with a fast path for common tokens (`TokenTaker`).

    Each sequence keeps the engine's request as `core_request`. If the engine dies, the request is sent again.
    """

    client: Any  # The client of all copies (`copies.client`).
    statistics: EngineStatistics

    def process_outputs(
        self,
        engine_core_outputs: list[SentOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> Any:
        """Pass common tokens to their sequences, and all other outputs of the step to vLLM's method."""
        states, placed = self.request_states, self.client.placed
        gaps: list[float] = []  # Seconds between each common token and the token before it.
        others: list[SentOutput] = []
        for output in engine_core_outputs:
            state, logprobs = states.get(output.request_id), output.new_logprobs
            if (
                isinstance(state, TokenTaker)
                and state.takes_tokens
                and output.finish_reason is None
                and len(output.new_token_ids) == 1
                and not state.is_prefilling
                and output.events is None
                and not output.num_nans_in_logits
            ):
                stats: Any = state.stats
                gaps.append(engine_core_timestamp - stats.last_token_ts)
                stats.last_token_ts = engine_core_timestamp
                stats.num_generation_tokens += 1
                state.take(output.new_token_ids[0], None if logprobs is None else logprobs.chosen())
                continue
            if output.finish_reason is not None and (place := placed.pop(output.request_id, None)) is not None:
                place.copy.work -= place.work
            if logprobs is not None:
                output.new_logprobs = logprobs.arrays()
            if output.pooling_output is not None and state is not None and not isinstance(state, TokenTaker):
                output.pooling_output = output.pooling_output.tensor()  # for vLLM's front end
            others.append(output)
        if gaps:  # Counted here for vLLM's metrics and for Slipway's.
            iteration_stats.num_generation_tokens += len(gaps)
            iteration_stats.inter_token_latencies_iter += gaps
            self.statistics.tokens += len(gaps)
            self.statistics.inter_token.observe_all(gaps)
        return super().process_outputs(others, engine_core_timestamp, iteration_stats, weight_version)

    def add_request(self, request: EngineCoreRequest, *arguments: Any, **options: Any) -> None:
        super().add_request(request, *arguments, **options)
        if (state := self.request_states.get(request.request_id)) is not None:
            state.core_request = None if request.mm_features else request  # Media take too much memory.

    def propagate_error(self, error: Exception) -> None:
        if not self.client.holds():
            super().propagate_error(error)

    def _update_stats_from_output(self, state: Any, output: Any, timestamp: float, iteration: Any) -> None:
        """Count an output that has no common token. Slipway's metrics use the same numbers as vLLM's."""
        gap = timestamp - state.stats.last_token_ts
        super()._update_stats_from_output(state, output, timestamp, iteration)
        if state.detokenizer is None:
            return  # This is a pooled prompt.
        statistics = getattr(state, "statistics", self.statistics)  # Steps of a beam search have separate statistics.
        queued_at = None
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                queued_at = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and queued_at is not None:
                statistics.queue_time.observe(event.timestamp - queued_at)
                queued_at = None
        if count := len(output.new_token_ids):
            statistics.tokens += count
            if state.stats.num_generation_tokens == count:
                seconds = iteration.iteration_timestamp - state.stats.arrival_time
                statistics.time_to_first_token.observe(seconds)
            else:
                statistics.inter_token.observe(gap / count)
