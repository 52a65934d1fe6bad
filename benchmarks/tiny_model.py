"""A tiny Llama with random weights, so small that the front end is what costs.

It has the sample model's tokenizer, so texts and their detokenization are real; only their meaning is not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import typer

from container.sample_model import default_cache_dir, prepare

_FORMAT = 1  # raise it when what is written changes, so that older caches are not taken for it
_SEED = 20


def prepare_tiny_model(cache_dir: Path | None = None) -> Path:
    """Return the tiny model's directory, making it first if needed."""
    target = (cache_dir or default_cache_dir()) / f"tiny-llama-v{_FORMAT}"
    if target.is_dir():
        return target
    sample = prepare(cache_dir)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(sample, partial)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write(sample: Path, directory: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(sample)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(_SEED)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    typer.echo(prepare_tiny_model())
