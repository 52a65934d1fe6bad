"""A small Qwen2-VL with random weights, for tests of models whose processors need torchvision."""

from __future__ import annotations

from pathlib import Path

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir
from tests.live.small_model import chat_template

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_FORMAT = 1  # the version of the files: after a change, older caches are not used
_SEED = 3
_MOST_PIXELS = 112 * 112  # The maximum number of pixels of an image that the model sees.


def prepare_small_qwen_model() -> Path:
    """Return the model's directory, which is made first if needed."""
    return make_once(cache_dir() / f"small-qwen2-vl-v{_FORMAT}", _write)


def _write(directory: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(prepare())
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    start, end, image, video = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    Qwen2VLForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    size = {"shortest_edge": 28 * 28, "longest_edge": _MOST_PIXELS}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=chat_template(MARK)
    )
    processor.save_pretrained(directory)
