"""LoRA adapters for the sample model, made with peft. Their random weights are large enough to change its answers."""

from __future__ import annotations

import shutil
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir


def make_adapter(directory: Path, model: Path, seed: int, rank: int = 4, scale: float = 0.4, **options: Any) -> Path:
    """Write an adapter into `directory`, and return the directory. The adapter is cached, because it does not vary."""
    made_by = (Path(__file__).read_text(), str(model), seed, rank, scale, options, version("peft"), version("torch"))
    digest = sha256(repr(made_by).encode()).hexdigest()[:16]
    kept = make_once(cache_dir() / f"adapter-{digest}", lambda path: _write(path, model, seed, rank, scale, **options))
    shutil.copytree(kept, directory, dirs_exist_ok=True)
    return directory


def _write(directory: Path, model: Path, seed: int, rank: int, scale: float, **options: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = options.pop("target_modules", ["q_proj", "v_proj", "down_proj"])
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * (scale / weight.shape[1] ** 0.5)
    adapted.save_pretrained(directory)
