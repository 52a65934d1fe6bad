"""Small encoders for vectors, ranks and classes. Tests create the weights, which are random, and the tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir

_FORMAT = 4  # Of the files. A change makes older caches unused.
_SEED = 5
MAX_MODEL_LEN = 128
VECTOR_SIZE = 64
TOKEN_VECTOR_SIZE = 32
LABELS = ("negative", "neutral", "positive")
_WORDS = (
    "the a of in is and to capital france paris berlin germany large city river dog cat runs fast slow "
    "learning deep machine what where when who how good bad weather rain sun query document passage : ? . "
    ", !"
)

Kind = Literal["encoder", "reranker", "classifier", "colbert"]


def prepare_small_encoder(kind: Kind = "encoder") -> Path:
    """Return the directory of a BERT model, which is made first if needed.

    Args:
        kind: The kind of model: without a head, with one label, with LABELS, or with a vector for each token.
    """
    return make_once(cache_dir() / f"small-bert-{kind}-v{_FORMAT}", lambda directory: _write(directory, kind))


def _write(directory: Path, kind: Kind) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = [*dict.fromkeys([*pieces, *_WORDS.split()])]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = BertTokenizerFast(vocab=ids, model_max_length=MAX_MODEL_LEN)
    labels: dict[str, Any] = {}
    if kind == "reranker":
        labels = {"num_labels": 1}
    elif kind == "classifier":
        labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=VECTOR_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM has no attention on CPUs for heads smaller than 32.
        max_position_embeddings=MAX_MODEL_LEN,
        **labels,
    )
    torch.manual_seed(_SEED)
    with_head = kind in ("reranker", "classifier")
    model = BertForSequenceClassification(config) if with_head else BertModel(config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("encoder", "word_embeddings", "classifier.weight")):
            parameter.data.mul_(8)  # The initial weights are so small that all texts have nearly the same vector.
    model.to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if kind == "colbert":
        weights = {f"bert.{name}": weight for name, weight in model.state_dict().items()}
        weights["linear.weight"] = torch.randn(TOKEN_VECTOR_SIZE, VECTOR_SIZE)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        config.architectures = ["HF_ColBERT"]
        config.save_pretrained(directory)
