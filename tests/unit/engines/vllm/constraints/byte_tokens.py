"""A tokenizer of llguidance that has a token for each byte."""

from __future__ import annotations

import json
from typing import Any

import llguidance
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = 256


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer as Hugging Face's. The token `END` ends a text."""
    tokenizer = Tokenizer(BPE({**{name: byte for byte, name in bytes_to_unicode().items()}, "<end>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_tokens() -> Any:
    """Return the tokenizer as llguidance's."""
    return llguidance.LLTokenizer(byte_tokenizer().to_str(), n_vocab=END + 1, eos_token=END)


def allows(tokens: Any, schema: str, instance: Any) -> bool:
    """Return True if a model may write an instance under a rewritten schema. The instance is written as compact JSON.

    Args:
        tokens: The tokenizer, of `byte_tokens`.
        schema: The schema, as the back end gets it.
        instance: The instance.
    """
    return allows_text(tokens, schema, json.dumps(instance, separators=(",", ":"), ensure_ascii=False))


def allows_text(tokens: Any, schema: str, text: str) -> bool:
    """Return True if a rewritten schema lets a model write a text. The arguments are those of `allows`."""
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())
