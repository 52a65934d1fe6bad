"""A tiny Llama, so small that the front end is the limit, and a tiny encoder (BERT), with random weights.

The vocabulary is small, too. With a usual vocabulary, the final layer and the log probabilities would take most of a
step on a CPU. The tokenizer is a byte-level BPE trained on Python's documentation, so tokens and detokenization are
real.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import typer

from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir

_FORMAT = 3  # The version of the files. Caches of other versions are not used.
_SEED = 20
_VOCABULARY = 1024
_END = "<|end|>"


def prepare_tiny_llama(directory: Path | None = None) -> Path:
    """Return the tiny Llama's directory. Make it first if needed."""
    target = (directory or cache_dir()) / f"tiny-llama-v{_FORMAT}"
    return make_once(target, _write_llama)


def prepare_tiny_encoder() -> Path:
    """Return the tiny encoder's directory. Make it first if needed."""
    return make_once(cache_dir() / f"tiny-bert-v{_FORMAT}", _write_encoder)


def _write_encoder(directory: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = _tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(_SEED)
    BertModel(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write_llama(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,  # The smallest size that vLLM's CPU attention supports.
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(_SEED)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, bos_token=_END)


if __name__ == "__main__":
    typer.echo(prepare_tiny_llama())
