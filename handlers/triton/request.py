"""Reads requests of the generate extension, with the inputs that Triton's vLLM or TensorRT-LLM backend has.

Source: Triton 2.68, "Generate Extension", "Generate Request JSON Object"; the models of the vLLM backend and of the
TensorRT-LLM backend of Triton. A request is treated as a request to the TensorRT-LLM backend if it has an input that
only TensorRT-LLM's models have, or if the model's settings are for TensorRT-LLM. All other requests are treated as
requests to the vLLM backend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engines.errors import SHOWN, InvalidParameter, InvalidRequest
from engines.loaded_model import LoadedModel
from engines.request import Constraint, GenerationRequest
from handlers.contract import Call
from handlers.model_config import ModelConfig
from handlers.parsing.constraints import decoded, refuse_unread, same_form
from handlers.parsing.images import DATA_URL
from handlers.parsing.json_fields import MAX_INT64, MIN_INT64, JsonError, decode_json, json_fault, json_kind
from handlers.parsing.json_limits import JsonDecoder
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import TEXT_BOOLEANS, TextReader, VllmParameters, read_vllm_parameters, vllm_names
from handlers.route_declarations import NO_ADAPTERS
from handlers.triton.errors import TritonRefusal

Kind = Literal["text", "texts", "boolean", "integer"]

# Inputs of a model that Triton's vLLM backend serves.
VLLM_INPUTS: dict[str, Kind] = {
    "text_input": "text",
    "stream": "boolean",
    "exclude_input_in_output": "boolean",
    "sampling_parameters": "text",
    "image": "texts",
    "return_finish_reason": "boolean",
    "return_cumulative_logprob": "boolean",
    "return_logprobs": "boolean",
    "return_num_input_tokens": "boolean",
    "return_num_output_tokens": "boolean",
    "embedding_request": "text",
}

# Further inputs of a TensorRT-LLM ensemble. The vLLM backend has no inputs with these names.
TENSORRT_LLM_INPUTS: dict[str, Kind] = {
    "streaming": "boolean",
    "bad_words": "texts",
    "stop_words": "texts",
    "end_id": "integer",
    "pad_id": "integer",
    "beam_width": "integer",
    "num_return_sequences": "integer",
    "min_length": "integer",
    "random_seed": "integer",
    "return_log_probs": "boolean",
    "return_context_logits": "boolean",
    "return_generation_logits": "boolean",
    "lora_task_id": "integer",
    "guided_decoding_guide_type": "text",
    "guided_decoding_guide": "text",
}

SAMPLING_PREFIX = "sampling_param_"  # The prefix of sampling fields in TensorRT-LLM's LLM-API model.
# All inputs, including the sampling fields of the LLM-API model that may be arrays. Other members are parameters.
_INPUTS = VLLM_INPUTS | TENSORRT_LLM_INPUTS | {f"{SAMPLING_PREFIX}stop": "texts", f"{SAMPLING_PREFIX}bad": "texts"}
_NO_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
# The type of an input's elements, and Triton's message for another type.
_TYPES: dict[Kind, tuple[type, str]] = {
    "text": (str, _NO_STRING),
    "texts": (str, _NO_STRING),
    "boolean": (bool, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    "integer": (int, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
}
# The outputs in addition to `text_output`, keyed by the inputs that ask for them.
_OUTPUTS = {
    **{name: (name.removeprefix("return_"),) for name in VLLM_INPUTS if name.startswith("return_")},
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
# The parameters that Triton reserves, and the parameter `id`. These names have no effect in Slipway.
_FOR_THE_SERVER = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
_WITHIN = "Converting keyword: 'parameters': "  # The beginning of Triton's messages about members of `parameters`.
# Maps older names of TensorRT-LLM's ensemble, and names of the LLM-API model, to vLLM's names.
_RENAMED = {
    "stop_words": "stop",
    "bad": "bad_words",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "len_penalty": "length_penalty",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "exclude_input_from_output": "exclude_input_in_output",
}
_REFUSED_IF_TRUE = ("return_context_logits", "return_generation_logits")
_GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
_NO_END = -1

_decode = JsonDecoder[Any]().decode


class TritonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, validated and translated."""

    id: str = ""  # Empty if the request has no id. The responses then have no id either.
    prompt: str = ""
    images: tuple[str, ...] = ()  # The URLs of images. The prompt has the model's placeholder for each image.
    vllm: VllmParameters
    stream: bool  # Whether each step of the engine gets a response, instead of a single response at the end.
    # Whether the tokenizer adds the special tokens of its template, such as the token that begins a sequence.
    add_special_tokens: bool
    repeat_prompt: bool  # Whether `text_output` begins with the prompt.
    outputs: frozenset[str]  # The outputs that the request asks for in addition to `text_output`.
    adapter: str | None  # The value of `lora_name`.
    ignored: tuple[str, ...]  # The given names that have no effect.
    names: Mapping[str, str]  # See `Exchange`.

    @property
    def shows_logprobs(self) -> bool:
        """True if the output `logprobs` has values. Without the parameter `logprobs` the output is "null"."""
        return "logprobs" in self.outputs and self.vllm.logprobs is not None

    def for_engine(self, call: Call, adapter: str | None) -> GenerationRequest:
        want_logprobs = self.shows_logprobs or not self.outputs.isdisjoint(("cumulative_logprob", "cum_log_probs"))
        return msgspec.structs.replace(
            self.vllm.request,
            request_id=call.request_id,
            prompt=self.prompt,
            add_special_tokens=self.add_special_tokens,
            stream=self.stream,
            want_tokens=want_logprobs,
            want_logprobs=want_logprobs,
            want_ranks=self.shows_logprobs,
            tokens_apart=True,  # Each step is an event, even if the step has no text yet.
            top_tokens=(self.vllm.logprobs or 0) if self.shows_logprobs else 0,
            adapter=adapter,
            **call.steering,
        )


def read_request(
    body: bytes, config: ModelConfig, loaded: LoadedModel, memo: ParameterMemo[TritonRequest]
) -> TritonRequest:
    """Read a request's body.

    Args:
        config: The settings of the model.
        loaded: The model.
        memo: A cache of parsed requests, keyed by their parameters. Id, prompt and images are filled in for each call.

    Raises:
        TritonRefusal: The body is not JSON, or a member has a wrong type or shape.
        InvalidParameter: A parameter is wrong. The error names the parameter and the allowed values.
        InvalidRequest: The request asks for a vector.
    """
    names: dict[str, str] = {}  # The client's names of parameters that have other names in vLLM or in the engine.
    try:
        request_id, inputs, parameters = read_inputs(body, config.name)
        if inputs.pop("embedding_request", None) is not None:
            raise InvalidRequest(f"Model {config.name} does not support 'embed' request")
        prompt = inputs.pop("text_input")
        images = inputs.pop("image", [])
        if images and loaded.texts.image_mark is None:
            raise InvalidParameter("image", "cannot be used: this model takes text only")
        key = msgspec.json.encode((inputs, parameters))
        known = memo.get(key) or memo.keep(key, _read_parameters(inputs, parameters, config, loaded, names))
    except InvalidParameter as error:
        raise error.renamed(names) from None
    urls = tuple([DATA_URL + image for image in images])
    return msgspec.structs.replace(known, id=request_id, prompt=prompt, images=urls)


def _read_parameters(
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    config: ModelConfig,
    loaded: LoadedModel,
    names: dict[str, str],
) -> TritonRequest:
    """Return the request for these inputs and parameters, without its id, prompt and images."""
    sampling_parameters = inputs.pop("sampling_parameters", None)
    if sampling_parameters is not None:
        _refuse_beside({name.removeprefix(SAMPLING_PREFIX): value for name, value in parameters.items()})
        parameters = _document(sampling_parameters)
    ignored = tuple(sorted(parameters.keys() & _FOR_THE_SERVER))
    values = {name: value for name, value in {**parameters, **inputs}.items() if name not in _FOR_THE_SERVER}
    given = set(values)
    if sampling_parameters is not None and "bad_words" not in inputs:
        # Within `sampling_parameters`, this is vLLM's parameter. TensorRT-LLM's `bad_words` is an input.
        given.discard("bad_words")
    tensorrt_llm = config.rolling_batch == "trtllm" or any(
        name in TENSORRT_LLM_INPUTS or name.startswith(SAMPLING_PREFIX) for name in given
    )
    if tensorrt_llm:
        values = plain_names(values, names)
    names.update(vllm_names(values))
    if "streaming" in values:
        names["stream"] = "streaming"
    stream = any([switch(values, "stream"), switch(values, "streaming")])  # A list, so that both names are removed.
    leaves_out_prompt = switch(values, "exclude_input_in_output")
    if stream and leaves_out_prompt is False:
        raise InvalidRequest("When streaming, `exclude_input_in_output` = False is not allowed.")
    outputs = frozenset(output for name, named in _OUTPUTS.items() if switch(values, name) for output in named)
    constraint: Constraint | None = None
    add_special_tokens = True
    if tensorrt_llm:
        add_special_tokens = switch(values, "add_special_tokens") is not False
        if switch(values, "return_perf_metrics"):
            ignored = (*ignored, "return_perf_metrics")
        values, constraint = to_vllm(values, loaded.eos_token_ids, names)
    adapter = _adapter(values.pop("lora_name", None), config)
    if leaves_out_prompt is None:
        leaves_out_prompt = stream or tensorrt_llm
    return TritonRequest(
        vllm=_vllm(values, constraint, stream),
        stream=stream,
        add_special_tokens=add_special_tokens,
        repeat_prompt=not leaves_out_prompt,
        outputs=outputs,
        adapter=adapter,
        ignored=ignored,
        names=names,
    )


def read_inputs(body: bytes, model: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the id, the model's inputs, and the parameters (all other members) of a body.

    Raises:
        TritonRefusal: The body is not JSON, or a member has a wrong type or shape.
    """
    members = _members(body)
    request_id = next((value for name, value in reversed(members) if name == "id"), "")
    if not isinstance(request_id, str):
        raise TritonRefusal("Unable to parse 'id': attempt to access JSON non-string as string")
    whose = f"[request id: {request_id or '<id_unknown>'}]"
    inputs: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value, within in _flattened(members):
        kind = _INPUTS.get(name)
        if kind is None:
            parameters[name] = _parameter(name, value, within)
        elif name in inputs:
            raise TritonRefusal(f"{within}{whose} input '{name}' already exists in request")
        else:
            inputs[name] = _input(name, value, kind, within)
    if "text_input" not in inputs:
        given = ", ".join(f"'{name}'" for name in inputs)
        raise TritonRefusal(
            f"{whose} expected number of inputs between 1 and {len(VLLM_INPUTS)} but got {len(inputs)} inputs for "
            f"model '{model}'. Got input(s) [{given}], but missing required input(s) ['text_input']. "
            "Please provide all required input(s)."
        )
    return request_id, inputs, parameters


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object in which a name may occur twice."""

    members: list[tuple[str, Any]]

    def items(self) -> list[tuple[str, Any]]:
        return self.members


def _members(body: bytes) -> list[tuple[str, Any]]:
    if not body:
        raise TritonRefusal("failed to parse the request JSON buffer: The document is empty. at 0")
    try:
        document = _decode(body)
        if _repeats(body, document):
            document = json.loads(body, object_pairs_hook=_Object)
    except ValueError as error:
        raise TritonRefusal(f"failed to parse the request JSON buffer: {json_fault(body, error)}") from None
    if not isinstance(document, dict | _Object):
        raise TritonRefusal("attempt to get members for non-object: the body must be a JSON object with `text_input`")
    return list(document.items())


def _repeats(body: bytes, document: Any) -> bool:
    """Return True if an input may occur twice in one object. The decoder keeps only the last value."""
    if not isinstance(document, dict):
        return False
    within = document.get("parameters")
    names = [*document, *within] if isinstance(within, dict) else document
    return any(name in _INPUTS and body.count(b'"%b"' % name.encode()) > 1 for name in names)


def _flattened(members: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Yield the members of the body and of its `parameters`: name, value, and the prefix for error messages."""
    for name, value in members:
        if name == "parameters":
            if not isinstance(value, dict | _Object):
                raise TritonRefusal("Expected JSON object for keyword: 'parameters': attempt to access JSON non-object")
            yield from ((inner, inner_value, _WITHIN) for inner, inner_value in value.items())
        elif name != "id":
            yield name, value, ""


def _parameter(name: str, value: Any, within: str) -> str | int | float | bool:
    shown = name[:SHOWN]
    if name.startswith("triton_"):
        raise TritonRefusal(
            f"{within}parameter '{shown}': keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    if not isinstance(value, str | int | float):
        raise TritonRefusal(
            f"{within}parameter '{shown}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if isinstance(value, int) and not MIN_INT64 <= value <= MAX_INT64:
        try:
            return float(value)
        except OverflowError:
            raise TritonRefusal(f"{within}parameter '{shown}' is a number beyond what a double holds") from None
    return value


def _input(name: str, value: Any, kind: Kind, within: str) -> Any:
    elements = value if isinstance(value, list) else [value]
    if kind != "texts" and len(elements) != 1:
        raise TritonRefusal(f"{within}The schema can not convert input '{name}' to tensor with proper shape")
    expected, message = _TYPES[kind]
    if any(type(element) is not expected for element in elements):
        raise TritonRefusal(f"{within}{message} (input '{name}')")
    return elements if kind == "texts" else elements[0]


def _refuse_beside(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters outside `sampling_parameters` that would choose an adapter or constrain the text.

    If a request has `sampling_parameters`, Triton's vLLM backend reads no parameters elsewhere.

    Raises:
        InvalidParameter: The request has such a parameter. The error names the first one.
    """
    message = "has no effect beside `sampling_parameters`: put it there"
    if parameters.get("lora_name"):
        raise InvalidParameter("lora_name", message)
    refuse_unread(parameters, parameters, message)


def _document(text: str) -> dict[str, Any]:
    """Return the parameters in `sampling_parameters`. The request's other parameters are then not read."""
    try:
        document = decode_json(text)
    except JsonError as error:
        raise InvalidParameter("sampling_parameters", f"must be a JSON object in a string: {error}") from None
    if not isinstance(document, dict):
        raise InvalidParameter("sampling_parameters", f"must hold a JSON object, got {json_kind(document)}")
    return document


def switch(values: dict[str, Any], name: str) -> bool | None:
    """Remove a boolean from the values and return it, or None if absent. In `sampling_parameters` it may be text."""
    value = values.pop(name, None)
    if value is None or isinstance(value, bool):
        return value
    meant = TEXT_BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        raise InvalidParameter(name, f"must be true or false, got {json_kind(value)}")
    return meant


def _adapter(name: Any, config: ModelConfig) -> str | None:
    if name is None:
        return None
    if not config.enable_lora:
        raise TritonRefusal("LoRA feature is not enabled.")
    if not isinstance(name, str):
        raise InvalidParameter("lora_name", f"must be a string, got {json_kind(name)}")
    return name or None


def _vllm(values: Mapping[str, Any], constraint: Constraint | None, stream: bool) -> VllmParameters:
    parameters = read_vllm_parameters(values, TextReader)
    if stream and parameters.request.beam_search is not None:
        raise InvalidParameter("stream", "cannot be true with beam search: no token is final before the last")
    if constraint is None:
        return parameters
    other = parameters.request.sampling.constraint
    if other is not None and not same_form(constraint, other):
        raise InvalidParameter(constraint.parameter, f"cannot be combined with `{other.parameter}`")
    return parameters.constrained(constraint)


def plain_names(values: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the values under vLLM's names, without `SAMPLING_PREFIX`. Record the client's names in `names`.

    Raises:
        InvalidParameter: Two values have the same name.
    """
    plain: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for given, value in values.items():
        bare = given.removeprefix(SAMPLING_PREFIX)
        name = _RENAMED.get(bare, bare)
        if name in plain:
            raise InvalidParameter(
                name[:SHOWN], f"is given twice: as `{origin[name][:SHOWN]}` and as `{given[:SHOWN]}`"
            )
        plain[name], origin[name] = value, given
    names.update({name: given for name, given in origin.items() if name != given})
    return plain


def to_vllm(
    plain: Mapping[str, Any], eos_token_ids: frozenset[int], names: dict[str, str]
) -> tuple[dict[str, Any], Constraint | None]:
    """Return vLLM's parameters for TensorRT-LLM's, and the constraint. Record the client's names in `names`.

    Raises:
        InvalidParameter: A parameter is wrong. The error names the parameter and the allowed values.
    """
    values = {name: value for name, value in plain.items() if name != "pad_id"}  # Padding has no effect.
    for name in _REFUSED_IF_TRUE:
        if values.pop(name, False):
            raise InvalidParameter(name, "cannot be true: this server has no logits to give")
    if "lora_task_id" in values:
        raise InvalidParameter("lora_task_id", NO_ADAPTERS)
    constraint = _constraint(values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None))
    for name in ("stop", "bad_words"):
        if name in values:
            values[name] = _words(values[name])
    _translate_sampling(values)
    _translate_beams(values, names)
    _translate_end(values, eos_token_ids, names)
    return values, constraint


def _words(value: Any) -> Any:
    """Return a list of words without the empty strings."""
    words = [value] if isinstance(value, str) else value
    return [word for word in words if word] if isinstance(words, list) else value


def _translate_sampling(values: dict[str, Any]) -> None:
    """Remove `top_k` and `top_p` if they are 0.

    Set greedy decoding if `top_k` and `top_p` are both 0. Do the same if `temperature`, `top_k` and `top_p` are all
    absent or removed.
    """
    off = [name for name in ("top_k", "top_p") if name in values and _is_zero(values[name])]
    for name in off:
        del values[name]
    if len(off) == 2 or not values.keys() & {"temperature", "top_k", "top_p"}:
        values["temperature"] = 0.0


def _is_zero(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in ("0", "0.0")
    return not isinstance(value, bool) and value == 0


def _translate_beams(values: dict[str, Any], names: dict[str, str]) -> None:
    """Set the number of beams. If `num_return_sequences` is absent, the answer has all beams."""
    width = values.pop("beam_width", 1)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise InvalidParameter("beam_width", "must be a whole number, at least 1")
    if width > 1:
        if (best_of := values.get("best_of")) is not None and str(best_of) != str(width):
            raise InvalidParameter("best_of", f"must be {width}, as `beam_width`, or absent")
        names.update(dict.fromkeys(("best_of", "num_beams", "use_beam_search"), "beam_width"))
        if "n" not in values:
            values["n"], names["n"] = width, "beam_width"
        values |= {"use_beam_search": True, "best_of": width}
    elif TEXT_BOOLEANS.get(str(values.get("use_beam_search")).strip().lower()) is not True:
        values.pop("length_penalty", None)
        values.pop("early_stopping", None)


def _translate_end(values: dict[str, Any], eos_token_ids: frozenset[int], names: dict[str, str]) -> None:
    """Replace the model's EOS tokens with `end_id`. -1 means that no token ends the text."""
    end_id = values.pop("end_id", None)
    if end_id is None:
        return
    if not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < _NO_END:
        raise InvalidParameter("end_id", "must be a token id, or -1 for none")
    if end_id in eos_token_ids:
        return
    values["ignore_eos"], names["ignore_eos"] = True, "end_id"
    given = decoded(values.get("stop_token_ids")) or []
    if isinstance(given, list) and end_id != _NO_END:  # If the type is wrong, the reader reports it.
        values["stop_token_ids"] = [*given, end_id]
        if not given:
            names["stop_token_ids"] = "end_id"


def _constraint(kind: Any, guide: Any) -> Constraint | None:
    name = "guided_decoding_guide"
    if kind is None:
        if guide is not None:
            raise InvalidParameter(name, "needs `guided_decoding_guide_type`")
        return None
    if kind not in _GUIDES:
        raise InvalidParameter(f"{name}_type", f"must be one of {', '.join(_GUIDES)}, got {str(kind)[:SHOWN]!r}")
    if kind == "json":
        return Constraint(parameter=name, json_object=True)
    if not isinstance(guide, str) or not guide.strip():
        raise InvalidParameter(name, f"must be a text, and not empty, where `guided_decoding_guide_type` is {kind}")
    if kind == "json_schema":
        if not isinstance(decoded(guide), dict):
            raise InvalidParameter(name, "must be a JSON schema: the text of an object")
        return Constraint(parameter=name, json_schema=guide)
    if kind == "regex":
        return Constraint(parameter=name, regex=guide)
    return Constraint(parameter=name, grammar=guide)
