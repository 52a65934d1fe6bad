"""TensorRT-LLM's names and values of inputs and parameters, translated to vLLM's.

Source: the ensemble and the LLM-API model of Triton's TensorRT-LLM backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handlers.contracts.constraints import decoded
from handlers.errors import InvalidParameter
from handlers.request import Constraint

SAMPLING_PREFIX = "sampling_param_"
"""Prefix of sampling fields in the LLM-API model."""
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
"""Older names of the ensemble, and those of the LLM-API model."""
_WITHOUT_EFFECT = ("pad_id", "return_perf_metrics", "add_special_tokens")
_REFUSED_IF_TRUE = ("return_context_logits", "return_generation_logits")
_GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
_NO_END = -1


def plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under today's names, without the prefix.

    Raises:
        InvalidParameter: two of them have one name.
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


def to_vllm(plain: Mapping[str, Any], eos_token_ids: frozenset[int]) -> tuple[dict[str, Any], Constraint | None]:
    """vLLM's names and values, and the constraint.

    Raises:
        InvalidParameter: naming the one that is wrong, and what is allowed.
    """
    values = {name: value for name, value in plain.items() if name not in _WITHOUT_EFFECT}
    for name in _REFUSED_IF_TRUE:
        if values.pop(name, False):
            raise InvalidParameter(name, "cannot be true: this server has no logits to give")
    if "lora_task_id" in values:
        raise InvalidParameter("lora_task_id", "cannot be used: this server has no adapters")
    constraint = _constraint(values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None))
    for name in ("stop", "bad_words"):
        if name in values:
            values[name] = _words(values[name])
    _translate_sampling(values)
    _translate_beams(values)
    _translate_end(values, eos_token_ids)
    return values, constraint


def _words(value: Any) -> Any:
    """The words of a list; an empty string stands for none."""
    words = [value] if isinstance(value, str) else value
    return [word for word in words if word] if isinstance(words, list) else value


def _translate_sampling(values: dict[str, Any]) -> None:
    """`top_k` and `top_p` of 0 are off; both together, and none of the three, are greedy decoding."""
    off = [name for name in ("top_k", "top_p") if name in values and _is_zero(values[name])]
    for name in off:
        del values[name]
    if len(off) == 2 or not values.keys() & {"temperature", "top_k", "top_p"}:
        values["temperature"] = 0.0


def _is_zero(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in ("0", "0.0")
    return not isinstance(value, bool) and value == 0


def _translate_beams(values: dict[str, Any]) -> None:
    """All beams are returned, or the best `num_return_sequences` of them."""
    width = values.pop("beam_width", 1)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise InvalidParameter("beam_width", "must be a whole number, at least 1")
    if width > 1:
        values.setdefault("n", width)
        values |= {"use_beam_search": True, "best_of": width}
    else:
        values.pop("length_penalty", None)
        values.pop("early_stopping", None)


def _translate_end(values: dict[str, Any], eos_token_ids: frozenset[int]) -> None:
    """`end_id` takes the place of the model's own end tokens; -1 is none."""
    end_id = values.pop("end_id", None)
    if end_id is None:
        return
    if not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < _NO_END:
        raise InvalidParameter("end_id", "must be a token id, or -1 for none")
    if end_id not in eos_token_ids:
        values |= {"ignore_eos": True, "stop_token_ids": [] if end_id == _NO_END else [end_id]}


def _constraint(kind: Any, guide: Any) -> Constraint | None:
    name = "guided_decoding_guide"
    if kind is None:
        if guide is not None:
            raise InvalidParameter(name, "needs `guided_decoding_guide_type`")
        return None
    if kind not in _GUIDES:
        raise InvalidParameter(f"{name}_type", f"must be one of {', '.join(_GUIDES)}, got {str(kind)[:80]!r}")
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
