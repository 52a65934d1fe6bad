"""A tokenizer of llguidance that has a token for each byte."""

from __future__ import annotations

from typing import Any

import llguidance
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = 256


def byte_tokens() -> Any:
    """Return the tokenizer. The token `END` ends a text."""
    tokenizer = Tokenizer(BPE({**{name: byte for byte, name in bytes_to_unicode().items()}, "<end>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=END + 1, eos_token=END)
