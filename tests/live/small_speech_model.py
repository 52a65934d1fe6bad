"""A small Whisper with random weights, for tests of transcriptions in which the text does not matter."""

from __future__ import annotations

import json
from pathlib import Path

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir

SECONDS = 2  # Of a clip. Longer sounds are split.
_FORMAT = 1  # the version of the files: after a change, older caches are not used
_SEED = 3
_FRAMES = SECONDS * 100  # The extractor makes 100 frames per second. The encoder halves their number.


def prepare_small_speech_model() -> Path:
    """Return the model's directory, which is made first if needed."""
    return make_once(cache_dir() / f"small-whisper-v{_FORMAT}", _write)


def _write(directory: Path) -> None:
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    model = json.loads((prepare() / "tokenizer.json").read_text())["model"]
    vocabulary = {**model["vocab"], "<|endoftext|>": model["vocab"]["<|endoftext|>"]}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[tuple(pair) for pair in model["merges"]])
    marks = ["<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    marks += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(SECONDS * 50 + 1)])
    start, end = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|startoftranscript|>", "<|endoftext|>"))
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        num_mel_bins=80,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=_FRAMES // 2,
        max_target_positions=448,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        init_std=1.0,  # with the usual weights, no sound would change the text
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    whisper = WhisperForConditionalGeneration(config).to(torch.float32)
    whisper.generation_config = GenerationConfig(
        decoder_start_token_id=start, bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    whisper.save_pretrained(directory)
    sounds = WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
    WhisperProcessor(sounds, tokenizer).save_pretrained(directory)
