"""A model without weights, with bytes as tokens, for tests of texts and sampling."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engines.transformers.model import TransformersModel


def byte_model(max_model_len: int = 100) -> TransformersModel:
    """Everything but the weights: one token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<sep>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    return TransformersModel(
        model=None,
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        vocabulary_size=len(tokenizer),
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
        special_ids=frozenset({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<sep>")}),
        pad_token_id=tokenizer.eos_token_id,
    )


MODEL = byte_model()
END, SEP = (MODEL.tokenizer.convert_tokens_to_ids(token) for token in ("<end>", "<sep>"))


def ids(text: str) -> list[int]:
    encoded: list[int] = MODEL.tokenizer.encode(text, add_special_tokens=False)
    return encoded
