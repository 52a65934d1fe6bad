"""What a generate request asks for, in vLLM's names or in TensorRT-LLM's.

Source: contracts/triton_generate.md sections 3 and 4. A request that gives an input which only TensorRT-LLM's models
have, and every request to a model on TensorRT-LLM, is read and answered as they do; all others as the vLLM backend
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from handlers.contracts.json_fault import json_fault
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.triton.body import SAMPLING_PREFIX, TENSORRT_LLM_INPUTS, GenerateBody
from handlers.contracts.triton.tensorrt_llm import plain_names, to_vllm
from handlers.contracts.vllm_parameters import VllmParameters, read_vllm_parameters
from handlers.errors import InvalidParameter
from handlers.request import Constraint, SamplingParameters

_FOR_THE_SERVER = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Names that Triton keeps for itself, and `id` where it is a parameter; they have no effect here."""
_LEAVES_OUT_PROMPT = "exclude_input_in_output"
_OUTPUT_SWITCHES = frozenset(
    {"return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens"}
) | {"return_num_output_tokens", "return_log_probs"}
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of the model, beside `text_output`, that the request asks for."""

    cum_log_probs: bool = False
    """TensorRT-LLM's, together with `output_log_probs`."""
    cumulative_logprob: bool = False
    finish_reason: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonParameters:
    """One request, validated and translated."""

    vllm: VllmParameters
    stream: bool
    """One response for each step of the engine, instead of one at the end."""
    repeat_prompt: bool
    """`text_output` begins with the prompt."""
    outputs: Outputs
    ignored: tuple[str, ...]
    """Names that were given and have no effect."""
    adapter: str | None = None
    """`lora_name`."""

    @property
    def sampling(self) -> SamplingParameters:
        """What the engine is asked for."""
        return self.vllm.sampling


def read_parameters(
    body: GenerateBody,
    *,
    on_tensorrt_llm: bool,
    eos_token_ids: frozenset[int] = frozenset(),
    adapters: bool = False,
) -> TritonParameters:
    """Understand a body's inputs and parameters. `adapters`: whether there are any (`option.enable_lora`).

    Raises:
        InvalidParameter: naming the one that is wrong, and what is allowed.
    """
    inputs = dict(body.inputs)
    if inputs.pop("image", None):
        raise InvalidParameter("image", "cannot be used: this model takes text only")
    values = _sampling_values(inputs.pop("sampling_parameters", None), body.parameters)
    ignored = tuple(sorted(values.keys() & _FOR_THE_SERVER))
    values = {name: value for name, value in {**values, **inputs}.items() if name not in _FOR_THE_SERVER}
    tensorrt_llm = on_tensorrt_llm or any(map(_only_tensorrt_llm, values))
    if tensorrt_llm:
        values = plain_names(values)
    stream = _switch(values, "stream") or _switch(values, "streaming") or False
    leaves_out_prompt = _switch(values, _LEAVES_OUT_PROMPT)
    if stream and leaves_out_prompt is False:
        raise InvalidParameter(_LEAVES_OUT_PROMPT, "must not be false when streaming: send true, or leave it out")
    asked = {name for name in _OUTPUT_SWITCHES if _switch(values, name)}
    constraint: Constraint | None = None
    if tensorrt_llm:
        values, constraint = to_vllm(values, eos_token_ids)
    adapter = _adapter(values, adapters)
    if leaves_out_prompt is None:
        leaves_out_prompt = stream or tensorrt_llm
    return TritonParameters(
        vllm=_vllm(values, constraint, stream),
        stream=stream,
        repeat_prompt=not leaves_out_prompt,
        outputs=Outputs(
            cum_log_probs="return_log_probs" in asked,
            cumulative_logprob="return_cumulative_logprob" in asked,
            finish_reason="return_finish_reason" in asked,
            logprobs="return_logprobs" in asked,
            num_input_tokens="return_num_input_tokens" in asked,
            num_output_tokens="return_num_output_tokens" in asked,
        ),
        ignored=ignored,
        adapter=adapter,
    )


def _adapter(values: dict[str, Any], adapters: bool) -> str | None:
    """Take `lora_name` out of the values."""
    name = values.pop("lora_name", None)
    if name is None:
        return None
    if not adapters:
        raise InvalidParameter("lora_name", "cannot be used: this server has no adapters")
    if not isinstance(name, str):
        raise InvalidParameter("lora_name", f"must be a string, got {json_kind(name)}")
    return name or None


def _sampling_values(text: str | None, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling_parameters`, where it is given, takes the place of all parameters."""
    if text is None:
        return parameters
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(
            "sampling_parameters", f"must be a JSON object in a string: {json_fault(text, error)}"
        ) from None
    if not isinstance(document, dict):
        raise InvalidParameter("sampling_parameters", f"must hold a JSON object, got {json_kind(document)}")
    return document


def _only_tensorrt_llm(name: str) -> bool:
    return name in TENSORRT_LLM_INPUTS or name.startswith(SAMPLING_PREFIX)


def _switch(values: dict[str, Any], name: str) -> bool | None:
    """Take a boolean out of the values; None if it is absent. Within `sampling_parameters` it may be text."""
    value = values.pop(name, None)
    if value is None or isinstance(value, bool):
        return value
    meant = _TRUTH.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        raise InvalidParameter(name, f"must be true or false, got {json_kind(value)}")
    return meant


def _vllm(values: dict[str, Any], constraint: Constraint | None, stream: bool) -> VllmParameters:
    parameters = read_vllm_parameters(values, text_values=True)
    if stream and parameters.beam_search is not None:
        raise InvalidParameter("stream", "cannot be true with beam search: no token is final before the last")
    if constraint is None:
        return parameters
    if parameters.sampling.constraint is not None:
        raise InvalidParameter(constraint.parameter, "cannot be combined with `structured_outputs`")
    return replace(parameters, sampling=msgspec.structs.replace(parameters.sampling, constraint=constraint))
