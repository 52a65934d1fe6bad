from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class WrappedTokenizer:
    """The methods of Hugging Face's wrapper that contracts use, over a tokenizer of its library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
