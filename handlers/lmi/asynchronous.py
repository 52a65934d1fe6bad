"""LMI's contract for bodies with `inputs` in the asynchronous mode (option.async_mode=true).

The form of chats and completions in this mode is in `handlers.lmi.chat_answers`. Source: djl_python,
`lmi_vllm/request_response_utils.py` and `async_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engines.errors import DeadlineExceeded, InvalidParameter, InvalidRequest, RequestError
from engines.request import GenerationRequest
from handlers.answers.token_answer import TokenDocument, TokenForm, TokenStream
from handlers.contract import JSON, Call, Exchange, Reply
from handlers.djl_errors import FAILED_DEPENDENCY, payload_error
from handlers.lmi.adapter_choice import adapters_of
from handlers.lmi.body import notes_of, read_body, stream_of
from handlers.lmi.errors import failure, payload_refused
from handlers.lmi.parameters import DEFAULT_MAX_NEW_TOKENS, NOT_READ
from handlers.model_config import ModelConfig
from handlers.parsing.constraints import FORMS, refuse_unread
from handlers.parsing.json_fields import ParameterReader, json_kind
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import read_vllm_parameters, vllm_names
from handlers.route_declarations import error_body

_FIELDS = frozenset({"inputs", "parameters", "stream", "model"})
# Parameters of LMI and their names in vLLM.
VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "ignore_eos_token": "ignore_eos",
}
# Parameters that this contract interprets. vLLM does not have them.
_LMI_PARAMETERS = frozenset({"details", "decoder_input_details", "return_full_text", "do_sample", "stop_sequences"})
# Parameters that have the same name in vLLM.
VLLM_PARAMETERS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens"),
        *("skip_special_tokens", "spaces_between_special_tokens", "bad_words", "logit_bias", "allowed_token_ids"),
        *("truncate_prompt_tokens", *FORMS),
    }
)
# The parameters that a model's generation config may set.
_MODEL_DEFAULTS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
_FORM = TokenForm(token=('{"id": ', ', "text": ', ', "logprob": '), nulls=True)
# The members of `details`: `_DETAILS` in a document, `_LAST` at the end of a stream.
_DETAILS = ("finish_reason", "generated_tokens", "seed", "prefill", "tokens")
_LAST = ("finish_reason", "seed", "generated_tokens", "input_length")


class LmiAsyncContract:
    """Parses bodies with `inputs` for one model."""

    def __init__(self, config: ModelConfig, model_defaults: Mapping[str, Any] | None = None) -> None:
        """Create the contract.

        Args:
            config: The model's settings.
            model_defaults: The default sampling parameters that vLLM takes from the model's generation config.
        """
        self._config, self._model_defaults = config, model_defaults or {}
        self._memo = ParameterMemo[AsyncParameters]()
        self._fields = _FIELDS | {"adapters"} if config.enable_lora else _FIELDS

    def parse(self, call: Call) -> Exchange:
        try:
            document, prompt, stream, parameters = self._read(call)
            adapter = adapters_of(call, document.get("adapters"), 1)[0] if self._config.enable_lora else None
        except InvalidRequest as error:
            raise payload_refused(error.message) from None
        request = msgspec.structs.replace(
            parameters.request, request_id=call.request_id, prompt=prompt, adapter=adapter, **call.steering
        )
        form, seed = parameters.form, request.sampling.seed
        answer = StreamAnswer(form, prompt, seed) if stream else WholeAnswer(form, (prompt,), (seed,))
        notes = notes_of(document, self._fields, parameters.ignored)
        return Exchange((request,), answer, notes, names=parameters.names, model_defaults=_MODEL_DEFAULTS)

    def as_completion(self, call: Call) -> tuple[Call, tuple[str, ...]]:
        """Return the request as the completion call that LMI sends to vLLM, and notes for the log.

        Raises:
            ContractError: The call is refused, for the same reasons as in `parse`.
        """
        try:
            document, prompt, stream, parameters = self._read(call)
        except InvalidRequest as error:
            raise payload_refused(error.message) from None
        vllm = parameters.request
        sampling = {
            name: value for name, value in msgspec.structs.asdict(vllm.sampling).items() if value not in (None, ())
        }
        del sampling["typical_p"]  # vLLM's API lacks this parameter.
        if (constraint := sampling.pop("constraint", None)) is not None:
            compact = {"disable_any_whitespace": not constraint.any_whitespace}
            sampling["structured_outputs"] = constraint.for_vllm() | compact
        completion = {"prompt": prompt, "stream": stream, **sampling}
        if vllm.truncate_prompt_tokens is not None:
            completion["truncate_prompt_tokens"] = vllm.truncate_prompt_tokens
        if parameters.form.full_text and not stream:  # vLLM refuses `echo` in a stream, so LMI leaves it out.
            completion["echo"] = True
        if stream or parameters.form.details:
            completion |= {"logprobs": 1, "return_tokens_as_token_ids": True}
        if stream:
            completion["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if parameters.prompt_details:
            completion["prompt_logprobs"] = 1
        completion |= {name: document[name] for name in ("model", "adapters") if name in document}
        notes = notes_of(document, self._fields, parameters.ignored)
        return replace(call, body=msgspec.json.encode(completion), content_type=JSON, fields=None), notes

    def _read(self, call: Call) -> tuple[dict[str, Any], str, bool, AsyncParameters]:
        """Return the document, the prompt, the value of `stream`, and the parameters.

        Raises:
            InvalidRequest: The request is invalid.
        """
        body = read_body(call, _prompts, "`inputs`, `messages` or `prompt`")
        document, values = body.document, body.parameters
        stream = stream_of(document.get("stream", values.get("stream")))
        key = msgspec.json.encode((stream, values))
        parameters = self._memo.get(key) or self._memo.keep(key, self._parse_parameters(values, stream))
        return document, body.prompts[0], stream, parameters

    def _parse_parameters(self, values: Mapping[str, Any], stream: bool) -> AsyncParameters:
        """Validate and translate the parameters of a request. A parameter that is null counts as absent.

        Raises:
            InvalidParameter: A parameter is wrong. The message has the parameter, its value and the allowed values.
        """
        given = {name: value for name, value in values.items() if value is not None}
        own = ParameterReader({name: value for name, value in given.items() if name in _LMI_PARAMETERS})
        passed = {
            name: value for name, value in self._model_defaults.items() if name in _MODEL_DEFAULTS and value is not None
        }
        passed["max_tokens"] = DEFAULT_MAX_NEW_TOKENS
        passed |= {vllm_name: given[name] for name, vllm_name in VLLM_NAMES.items() if name in given}
        passed |= {name: value for name, value in given.items() if name in VLLM_PARAMETERS}
        if own.has("do_sample") and not own.boolean("do_sample", True):
            passed["temperature"] = 0.0
        if stop := own.strings("stop_sequences"):
            passed["stop"] = [*stop, *ParameterReader(passed).strings("stop")]
        ignored = sorted(given.keys() - _LMI_PARAMETERS - VLLM_PARAMETERS - VLLM_NAMES.keys() - {"stream"})
        refuse_unread(given, ignored, NOT_READ)
        if ignored and self._config.strict_parameters:
            raise InvalidParameter(ignored[0], "is not a parameter that has an effect (option.strict_parameters is on)")
        names = vllm_names(passed)
        names |= {other: name for name, other in VLLM_NAMES.items() if name in given and other not in given}
        try:
            parameters = read_vllm_parameters(passed)
        except InvalidParameter as error:
            raise error.renamed(names) from None
        details = own.boolean("details", False)
        prompt_details = details and own.boolean("decoder_input_details", False)
        members = (_LAST if stream else _DETAILS) if details else ()
        want_tokens = stream or details
        request = msgspec.structs.replace(
            parameters.request,
            stream=stream,
            want_tokens=want_tokens,
            want_logprobs=want_tokens and self._config.lmi.token_logprobs,
            want_prompt_tokens=prompt_details and not stream,
        )
        return AsyncParameters(
            request=request,
            form=msgspec.structs.replace(_FORM, details=members, full_text=own.boolean("return_full_text", False)),
            prompt_details=prompt_details,
            ignored=tuple(ignored),
            names=names,
        )


def _prompts(inputs: Any) -> tuple[str, ...]:
    """Return the prompt.

    LMI answers the first prompt of an array and drops the others. This contract refuses an array with several
    prompts.
    """
    if isinstance(inputs, list) and len(inputs) == 1:
        inputs = inputs[0]
    elif isinstance(inputs, list):
        raise InvalidRequest("`inputs` must be one prompt: a string, or an array of one")
    if inputs is None:
        raise InvalidRequest("the body has none of `inputs`, `messages` and `prompt`")
    if not isinstance(inputs, str):
        raise InvalidRequest(f"`inputs` must be a string, got {json_kind(inputs)}")
    if not inputs:
        raise InvalidRequest("`inputs` must not be empty")
    return (inputs,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncParameters:
    """The parameters of a request."""

    request: GenerationRequest  # The request without its id, its prompt and its adapter.
    form: TokenForm
    prompt_details: bool
    ignored: tuple[str, ...]
    names: Mapping[str, str]  # See `Exchange`.


class WholeAnswer(TokenDocument):
    """An answer in one JSON document."""

    around = ("{", "", "}\n")

    def fail(self, error: RequestError) -> Reply:
        return _failure(error)


class StreamAnswer(TokenStream):
    """A stream with a line for each token."""

    content_type = "application/jsonlines"
    head, after = '{"index": 0, "token": ', "\n"
    done = "\n\n"  # LMI sends an empty line for vLLM's usage chunk, and another empty line for `[DONE]`.

    def fail(self, error: RequestError) -> Reply:
        return _failure(error)

    def fail_midway(self, error: RequestError) -> bytes:
        message = error.message.encode("utf-8", "replace").decode()
        return error_body(message, "InternalServerError", 500) + b"\n\n"


def _failure(error: RequestError) -> Reply:
    # LMI answers an unreadable body with 424. For other errors, it passes on vLLM's status, 400 or 500. Slipway answers
    # every invalid request with 424.
    status = FAILED_DEPENDENCY if isinstance(error, InvalidRequest) else 500
    if isinstance(error, DeadlineExceeded):
        status = 504
    return failure(error, payload_error(error.message, status), status)
