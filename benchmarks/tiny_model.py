"""Two tiny models with random weights: a Llama, so small that the front end is the bottleneck, and a BERT encoder.

The vocabulary is also small. With a usual vocabulary, the final layer and the log probabilities would take most of a
step on a CPU. The tokenizer is a byte-level BPE trained on Python's documentation, so tokens and detokenization are
realistic.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import typer

from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir

_FORMAT = 3  # The version of the files. Cached models of other versions are not used.
_SEED = 20
_VOCABULARY = 1024
_END = "<|end|>"
_WIDTH = 32  # The hidden size, and the size of the only head. vLLM's CPU attention supports no smaller head.


def prepare_tiny_llama() -> Path:
    """Return the tiny Llama's directory. Create it if it does not exist."""
    return make_once(cache_dir() / f"tiny-llama-v{_FORMAT}", _write_llama)


def prepare_tiny_encoder() -> Path:
    """Return the tiny encoder's directory. Create it if it does not exist."""
    return make_once(cache_dir() / f"tiny-bert-v{_FORMAT}", _write_encoder)


def _write_llama(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _write(
        directory,
        LlamaConfig,
        LlamaForCausalLM,
        num_key_value_heads=1,
        head_dim=_WIDTH,
        tie_word_embeddings=True,
    )


def _write_encoder(directory: Path) -> None:
    from transformers import BertConfig, BertModel

    _write(directory, BertConfig, BertModel)


def _write(directory: Path, config: Any, model: Any, **options: Any) -> None:
    """Write a model with one layer.

    Args:
        directory: The directory for the model and its tokenizer.
        config: The class of the configuration.
        model: The class of the model.
        options: Additional options for the configuration.
    """
    import torch

    tokenizer = _tokenizer()
    end = tokenizer.eos_token_id
    configuration = config(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2048,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        dtype=torch.float32,
        **options,
    )
    torch.manual_seed(_SEED)
    model(configuration).to(torch.float32).save_pretrained(directory)
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
