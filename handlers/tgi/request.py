"""Reads TGI's requests: checks the fields, with TGI's error messages, and translates them for an engine.

The checks run in TGI's order. Source: TGI's router, `src/lib.rs` for the fields and `src/validation.rs` for the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import getrandbits
from typing import Annotated, Any

import msgspec

from engines.errors import InvalidParameter, InvalidRequest
from engines.loaded_model import LoadedModel
from engines.request import Constraint, EngineMemo, GenerationRequest, SamplingParameters
from handlers.model_config import ModelConfig
from handlers.parsing.constraints import constraint_of, refuse_unread
from handlers.parsing.json_fields import MAX_INT64, MAX_STRING_LENGTH, decode_json
from handlers.route_declarations import NO_ADAPTERS

Unsigned32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Signed32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# msgspec supports no bounds beyond 63 bits. The upper bound is checked when the number is used.
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]

MAX_TOP_N_TOKENS = 5  # TGI's default.
# At most this many tokens must be free in the context after the prompt. If `max_new_tokens` is larger, the answer gets
# more tokens if they fit.
_MOST_RESERVED = 1024

_NOT_READ = "is not read here; in `parameters`, `grammar` and `stop` constrain the text"
_LARGEST_FLOAT32 = 3.4028234e38
_SEED_BITS = 63
_UINT64 = 2**64


class RequestParameters(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `parameters`. A field that is null counts as absent."""

    best_of: Unsigned64 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Signed32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: Unsigned32 | None = None
    return_full_text: bool | None = None
    stop: tuple[str, ...] | None = None
    stop_sequences: tuple[str, ...] | None = None  # The earlier name of `stop`. Some clients send both.
    truncate: Unsigned64 | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Unsigned64 | None = None
    top_n_tokens: Unsigned32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class TgiRequest(msgspec.Struct, frozen=True):
    """The body of /, /generate, /generate_stream and /tokenize."""

    inputs: str
    parameters: RequestParameters | None = None  # None means sampling, as in TGI.
    stream: bool | None = None  # Only the route / reads this field.


def max_input_tokens(model: LoadedModel, config: ModelConfig) -> int:
    """Return the maximum number of tokens in a prompt."""
    context = model.max_model_len - 1
    return context if config.max_prompt_tokens is None else min(config.max_prompt_tokens, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiParameters:
    """The validated and translated parameters of a request."""

    request: GenerationRequest  # The request without its id and prompt. `adapter` is the client's `adapter_id`.
    best_of: int
    details: bool
    top_tokens: int

    @property
    def shown_seed(self) -> int | None:
        """The seed that `details` shows. None for greedy decoding."""
        sampling = self.request.sampling
        return None if sampling.greedy or sampling.seed is None else sampling.seed % _UINT64

    def seeded(self) -> TgiParameters:
        """Return these parameters, with a random seed if the request samples and has no seed."""
        sampling = self.request.sampling
        if sampling.greedy or sampling.seed is not None:
            return self
        seeded = msgspec.structs.replace(sampling, seed=getrandbits(_SEED_BITS))
        return replace(self, request=msgspec.structs.replace(self.request, sampling=seeded, memo=None))


def validate(
    inputs: str, given: RequestParameters | None, config: ModelConfig, loaded: LoadedModel, *, streams: bool
) -> TgiParameters:
    """Validate and translate the parameters of a request.

    Raises:
        InvalidRequest: A value is wrong. The message is TGI's, without its prefix "Input validation error".
    """
    parameters = RequestParameters(do_sample=True) if given is None else given
    best_of = _best_of(parameters, config.tgi.max_best_of, streams)
    sampling = _sampling(parameters, config, loaded, best_of)
    top_tokens = parameters.top_n_tokens or 0
    if top_tokens > MAX_TOP_N_TOKENS:
        raise InvalidRequest(f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {top_tokens}")
    if not inputs:
        raise InvalidRequest("`inputs` cannot be empty")
    sampling = msgspec.structs.replace(sampling, constraint=_constraint(parameters.grammar))
    truncate, most = parameters.truncate, max_input_tokens(loaded, config)
    if truncate is not None and not 0 < truncate <= most:
        raise InvalidRequest(f"`truncate` must be strictly positive and less than {most}. Given: {truncate}")
    prefill = bool(parameters.decoder_input_details)
    details = bool(parameters.details) or prefill
    want_tokens = streams or details or best_of > 1
    request = GenerationRequest(
        sampling=sampling,
        truncate_prompt_tokens=truncate,
        room=min(sampling.max_tokens or 1, _MOST_RESERVED),
        stream=streams,
        want_tokens=want_tokens,
        want_logprobs=want_tokens,
        want_prompt_tokens=prefill,
        top_tokens=top_tokens if streams or details else 0,
        adapter=parameters.adapter_id or None,
        memo=EngineMemo(),
    )
    return TgiParameters(request=request, best_of=best_of, details=details, top_tokens=top_tokens)


def _best_of(parameters: RequestParameters, most: int, streams: bool) -> int:
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if streams and best_of != 1:
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
    if streams and parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")
    if not 0 < best_of <= most:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {most}. Given: {best_of}")
    if best_of > 1 and not (parameters.do_sample or parameters.temperature is not None or _limits_choice(parameters)):
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    return best_of


def _limits_choice(parameters: RequestParameters) -> bool:
    return not (parameters.top_k is parameters.top_p is parameters.typical_p is None)


def _sampling(
    parameters: RequestParameters, config: ModelConfig, loaded: LoadedModel, best_of: int
) -> SamplingParameters:
    temperature = _strictly_positive("temperature", parameters.temperature, 1.0)
    repetition_penalty = _strictly_positive("repetition_penalty", parameters.repetition_penalty, 1.0)
    frequency_penalty = 0.0 if parameters.frequency_penalty is None else parameters.frequency_penalty
    if not -2.0 <= frequency_penalty <= 2.0:
        raise InvalidRequest("`frequency_penalty` must be >= -2.0 and <= 2.0")
    top_p = _fraction("top_p", parameters.top_p)
    typical_p = _fraction("typical_p", parameters.typical_p)
    top_k = _strictly_positive("top_k", parameters.top_k, 0)
    if parameters.max_new_tokens == 0:
        raise InvalidRequest("`max_new_tokens` must be strictly positive")
    texts = parameters.stop or ()
    if parameters.stop_sequences:
        texts = tuple(dict.fromkeys((*texts, *parameters.stop_sequences)))
    stop, stop_token_ids = _stop(texts, config.tgi.max_stop_sequences, loaded)
    seed = _seed(parameters.seed, best_of)
    if parameters.watermark:
        raise InvalidRequest("`watermark` is not supported by this server")
    if parameters.adapter_id is not None and not config.enable_lora:
        raise InvalidParameter("adapter_id", NO_ADAPTERS)
    samples = bool(parameters.do_sample) or best_of > 1
    if not samples and config.do_sample_inferred:
        samples = parameters.temperature not in (None, 1.0) or _limits_choice(parameters)
    return SamplingParameters(
        max_tokens=parameters.max_new_tokens,
        temperature=temperature if samples else 0.0,
        top_k=int(top_k) if samples else 0,
        top_p=top_p if samples else 1.0,
        typical_p=typical_p if samples else 1.0,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=True,
    )


def _strictly_positive(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if value <= 0:
        raise InvalidRequest(f"`{name}` must be strictly positive")
    if value > _LARGEST_FLOAT32:
        raise InvalidRequest(f"`{name}` must be a number of single precision")
    return value


def _fraction(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 < value < 1.0:
        raise InvalidRequest(f"`{name}` must be > 0.0 and < 1.0")
    return value


def _stop(stop: tuple[str, ...], most: int, loaded: LoadedModel) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the normal stop texts, and the ids of stop texts that are special tokens.

    Special tokens need ids, because the generated text does not show them.
    """
    if len(stop) > most:
        raise InvalidRequest(f"`stop` supports up to {most} stop sequences. Given: {len(stop)}")
    if not all(0 < len(text) <= MAX_STRING_LENGTH for text in stop):
        raise InvalidRequest(f"`stop` must hold texts of 1 to {MAX_STRING_LENGTH} characters")
    special_ids = loaded.texts.special_tokens
    texts = tuple(text for text in stop if text not in special_ids)
    ids = dict.fromkeys(special_ids[text] for text in stop if text in special_ids)
    return texts, tuple(token_id for token_id in ids if token_id not in loaded.eos_token_ids)


def _seed(seed: int | None, best_of: int) -> int | None:
    if seed is None:
        return None
    if best_of > 1:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1")
    if seed >= _UINT64:
        raise InvalidRequest(f"`seed` must be below {_UINT64}")
    return seed if seed <= MAX_INT64 else seed - _UINT64  # The signed number with the same 64 bits.


def _constraint(grammar: Mapping[str, Any] | None) -> Constraint | None:
    if grammar is None:
        return None
    try:
        constraint = constraint_of("grammar", grammar)
    except InvalidParameter as error:
        raise InvalidRequest(f"grammar is not valid: {error.message}") from None
    if constraint is None:
        return None
    if constraint.json_schema is not None and "properties" not in decode_json(constraint.json_schema):
        raise InvalidRequest("grammar is not valid: Grammar must have a 'properties' field")
    return msgspec.structs.replace(constraint, parameter="grammar")


def unread_names(document: Mapping[str, Any]) -> list[str]:
    """Return the names of fields without effect, both in a request and in its `parameters`.

    Raises:
        InvalidParameter: One of these fields would constrain the text in another contract.
    """
    given = document.get("parameters")
    values = given if isinstance(given, dict) else {}
    names = sorted(values.keys() - set(RequestParameters.__struct_fields__))
    names += sorted(document.keys() - set(TgiRequest.__struct_fields__))
    refuse_unread({**document, **values}, names, _NOT_READ)
    return names
