"""Requests written for TensorRT-LLM's models on Triton, in vLLM's names.

Source: contracts/triton_generate.md section 4. Clients of the ensemble send `stop_words`, `end_id`, `beam_width` and
the like; those of the newer LLM-API model put `sampling_param_` before each sampling field. Their defaults differ from
vLLM's in one thing: without `temperature`, `top_k` and `top_p` decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from handlers.contracts.triton.body import SAMPLING_PREFIX
from handlers.errors import InvalidParameter
from handlers.request import Constraint

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
"""Older names of the ensemble's, and those of the LLM-API model."""
_NOT_THERE = {
    "return_context_logits": "cannot be true: this server has no logits to give",
    "return_generation_logits": "cannot be true: this server has no logits to give",
}
_GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
_WITHOUT_EFFECT = ("pad_id", "return_perf_metrics", "add_special_tokens")
_NO_END = -1


def plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each name as it is called today, without its prefix.

    Raises:
        InvalidParameter: one thing is given under two names.
    """
    plain: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for given, value in values.items():
        bare = given.removeprefix(SAMPLING_PREFIX)
        name = _RENAMED.get(bare, bare)
        if name in plain:
            raise InvalidParameter(name[:80], f"is given twice: as `{origin[name][:120]}` and as `{given[:120]}`")
        plain[name], origin[name] = value, given
    return plain


def to_vllm(values: dict[str, Any], eos_token_ids: frozenset[int]) -> tuple[dict[str, Any], Constraint | None]:
    """Names and values for `read_vllm_parameters`, and the constraint, of what `plain_names` gives.

    Raises:
        InvalidParameter: it cannot be done here, or has a wrong value.
    """
    values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
    for name, why in _NOT_THERE.items():
        if values.pop(name, False):
            raise InvalidParameter(name, why)
    if "lora_task_id" in values:
        raise InvalidParameter("lora_task_id", "cannot be used: this server has no adapters")
    constraint = _constraint(values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None))
    for name in ("stop", "bad_words"):
        if name in values:
            values[name] = _words(values[name])
    return _end(_beams(_choice(values)), eos_token_ids), constraint


def _words(value: Any) -> Any:
    """An empty string stands for no words."""
    words = [value] if isinstance(value, str) else value
    return [word for word in words if word] if isinstance(words, list) else value


def _choice(values: dict[str, Any]) -> dict[str, Any]:
    """`top_k` and `top_p` of 0 are off, and both together greedy decoding."""
    off = {name for name in ("top_k", "top_p") if name in values and _is_zero(values[name])}
    kept = {name: value for name, value in values.items() if name not in off}
    if len(off) == 2 or not kept.keys() & {"temperature", "top_k", "top_p"}:
        kept["temperature"] = 0.0
    return kept


def _is_zero(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in ("0", "0.0")
    return not isinstance(value, bool) and value == 0


def _beams(values: dict[str, Any]) -> dict[str, Any]:
    """All beams are returned, or the best `num_return_sequences` of them."""
    width = values.pop("beam_width", 1)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise InvalidParameter("beam_width", "must be a whole number, at least 1")
    if width == 1:
        return {name: value for name, value in values.items() if name not in ("length_penalty", "early_stopping")}
    shown = values.get("n", width)
    return values | {"use_beam_search": True, "n": shown, "best_of": width}


def _end(values: dict[str, Any], eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """`end_id` takes the place of the model's own end tokens; -1 is none."""
    end_id = values.pop("end_id", None)
    if end_id is None:
        return values
    if not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < _NO_END:
        raise InvalidParameter("end_id", "must be a token id, or -1 for none")
    if end_id in eos_token_ids:
        return values
    return values | {"ignore_eos": True, "stop_token_ids": [] if end_id == _NO_END else [end_id]}


def _constraint(kind: Any, guide: Any) -> Constraint | None:
    if kind is None:
        if guide is not None:
            raise InvalidParameter("guided_decoding_guide", "needs `guided_decoding_guide_type`")
        return None
    if kind not in _GUIDES:
        raise InvalidParameter(
            "guided_decoding_guide_type", f"must be one of {', '.join(_GUIDES)}, got {str(kind)[:80]!r}"
        )
    name = "guided_decoding_guide"
    if kind == "json":
        return Constraint(parameter=name, json_object=True)
    if not isinstance(guide, str) or not guide.strip():
        raise InvalidParameter(name, f"must be a text, and not empty, where `guided_decoding_guide_type` is {kind}")
    if kind == "json_schema":
        return Constraint(parameter=name, json_schema=_schema(name, guide))
    return Constraint(
        parameter=name,
        regex=guide if kind == "regex" else None,
        grammar=guide if kind == "ebnf_grammar" else None,
    )


def _schema(name: str, text: str) -> str:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidParameter(name, "must be a JSON schema: the text of an object")
    return text
