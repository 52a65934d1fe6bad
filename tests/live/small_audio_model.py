"""A small model with random weights that answers chats with sounds, for tests in which the text does not matter.

It is a Qwen2-Audio.
"""

from __future__ import annotations

from pathlib import Path

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir
from tests.live.small_model import chat_template

MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_FORMAT = 1  # the version of the files: after a change, older caches are not used
_SEED = 3
_MELS = 16
_WEIGHTS = "model.safetensors"


def prepare_small_audio_model() -> Path:
    """Return the model's directory, which is made first if needed."""
    return make_once(cache_dir() / f"small-qwen2-audio-v{_FORMAT}", _write)


def _write(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = AutoTokenizer.from_pretrained(prepare())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    config = Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": _MELS,
            "d_model": 64,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "max_source_positions": 1500,  # 30 seconds
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": False,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    model = Qwen2AudioForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(directory)
    # transformers 5 writes new names for the language model's weights. The published models have the old names.
    weights = {
        name.replace(".model.model.", ".model."): weight for name, weight in load_file(directory / _WEIGHTS).items()
    }
    save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
    sounds = WhisperFeatureExtractor(feature_size=_MELS)
    Qwen2AudioProcessor(sounds, tokenizer, chat_template=chat_template(MARK)).save_pretrained(directory)
