"""A small model with random weights that takes images, for tests in which the text does not matter.

It is an Idefics3, one of the few vision models that vLLM and transformers run without torchvision.
"""

from __future__ import annotations

from pathlib import Path

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir
from tests.live.small_model import chat_template

_FORMAT = 2  # the version of the files: after a change, older caches are not used
_SEED = 3
_MARK = "<image>"
_IMAGE = 64  # The number of pixels on each side of the images that the model sees.


def prepare_small_vision_model() -> Path:
    """Return the model's directory, which is made first if needed."""
    return make_once(cache_dir() / f"small-idefics3-v{_FORMAT}", _write)


def _write(directory: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    tokenizer = AutoTokenizer.from_pretrained(prepare())
    marks = [_MARK, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    shared = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **shared,
        },
        vision_config={"image_size": _IMAGE, "patch_size": 16, **shared},
        image_token_id=tokenizer.convert_tokens_to_ids(_MARK),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    size = {"longest_edge": _IMAGE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=chat_template(_MARK)).save_pretrained(directory)
