"""Creates transformers models with a few thousand random weights, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# transformers tests the tokenizer with the word "abcdef" before it searches for stop strings.
WORDS = ["abcdef", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
WORDS += ["and", "who", "is", "it", "where"]
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<mask>"]


def save_tokenizer(directory: Path) -> int:
    """Save a tokenizer with whole words as tokens. Return its number of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A </s> $B:1", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        model_max_length=64,
    ).save_pretrained(directory)
    return len(vocabulary)


def save_model(directory: Path, architecture: str) -> str:
    """Save a model with its tokenizer. Return the directory."""
    import torch
    import transformers

    size = save_tokenizer(directory)
    torch.manual_seed(0)
    getattr(transformers, architecture)(_config(architecture, size)).save_pretrained(directory)
    return str(directory)


def _config(architecture: str, size: int) -> Any:
    import transformers

    tokens = {"vocab_size": size, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    if architecture.startswith("Llama"):
        return transformers.LlamaConfig(**tokens, **shape, max_position_embeddings=64)
    if architecture.startswith("GPT2"):
        return transformers.GPT2Config(**tokens, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    if architecture.startswith("T5"):
        layers = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return transformers.T5Config(**tokens, **layers, decoder_start_token_id=1)
    return transformers.BertConfig(**tokens, **shape, max_position_embeddings=64)
