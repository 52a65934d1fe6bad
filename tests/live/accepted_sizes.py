"""Asks vLLM which tensor-parallel sizes it accepts for models with only a config.json.

    python -m tests.live.accepted_sizes FILE

FILE: a JSON object of configs by name. The program prints a JSON object with two values for each name: `sizes`, the
sizes from 1 to 8 that vLLM accepts, and `config`, vLLM's own form of the config.

For each size, vLLM checks its own configuration and builds some layers of the model's own class, on the meta device and
in a process group that claims to have this size. Nothing is computed. A GPU and torchvision are not needed: stand-ins
replace the choice of kernels and the parts of torchvision that vLLM's multimodal models import. The stand-ins stay in
the process, so this is a separate program.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

_SIZES = range(1, 9)
_LAYERS = 4
"""The number of layers that are built for each model.

The layers include attention with a window, attention without a window, layers with a state, dense layers, and experts.
"""
_TORCHVISION = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Group:
    """A process group that claims to have a size. This process is its first member."""

    rank = rank_in_group = local_rank = 0
    is_first_rank = is_last_rank = True
    unique_name = "group"

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        return self.world_size


def _replace_kernels() -> None:
    """Choose kernels for NVIDIA GPUs instead of kernels that run on this machine."""
    from vllm.model_executor.kernels.linear.mixed_precision import marlin
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as packed

    def choose_marlin(wanted: Any, **_: Any) -> type:
        can, reason = marlin.MarlinLinearKernel.can_implement(wanted)
        if not can:
            raise ValueError(reason)
        return marlin.MarlinLinearKernel

    replaced: list[tuple[Any, str, Any]] = [
        (marlin, "current_platform", SimpleNamespace(is_cuda=lambda: True)),
        *((module, "choose_mp_linear_kernel", choose_marlin) for module in (auto_awq, auto_gptq, packed)),
        (fp8, "init_fp8_linear_kernel", lambda *_, **__: None),
        (fp8, "select_fp8_moe_backend", lambda *_, **__: (Fp8MoeBackend.TRITON, None)),
        (mxfp4, "select_mxfp4_moe_backend", lambda *_, **__: (Mxfp4MoeBackend.MARLIN, None)),
        (unquantized, "select_unquantized_moe_backend", lambda *_, **__: (UnquantizedMoeBackend.TRITON, None)),
    ]
    for module, name, stand_in in replaced:
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} any more")
        setattr(module, name, stand_in)


def _shortened(config: Any) -> Any:
    for part in (config, config.get_text_config()):
        for name in ("num_hidden_layers", "n_layer"):
            if (getattr(part, name, None) or 0) > _LAYERS:
                setattr(part, name, _LAYERS)
        if kinds := vars(part).get("layer_types"):
            part.layer_types = kinds[:_LAYERS]
    return config


def _model_config(directory: Path, **fields: Any) -> Any:
    from vllm.config import ModelConfig

    path = str(directory)
    return ModelConfig(model=path, tokenizer=path, skip_tokenizer_init=True, dtype="bfloat16", **fields)


def _build(directory: Path, size: int) -> None:
    """Build some layers of a model in a process group of this size.

    Raises:
        AssertionError: vLLM does not accept the size.
        ValueError: vLLM does not accept the size.
    """
    import torch
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    config = VllmConfig(
        model_config=_model_config(directory, hf_overrides=_shortened),
        parallel_config=ParallelConfig(tensor_parallel_size=size),
    )
    for name in ("_TP", "_EP"):
        setattr(parallel_state, name, _Group(size))
    for name in ("_PP", "_DP", "_PCP", "_DCP"):
        setattr(parallel_state, name, _Group(1))
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(config)


def _accepted(directory: Path) -> list[int]:
    sizes = []
    for size in _SIZES:
        try:
            _build(directory, size)
        except (AssertionError, ValueError) as error:
            print(f"{directory.name}, {size}: {error}", file=sys.stderr)
        else:
            sizes.append(size)
    return sizes


def main(path: Path) -> None:
    for part in _TORCHVISION:
        name = f"torchvision{part}"
        sys.modules[name] = _StandIn(name)
    from vllm.model_executor.models import registry

    logging.disable(logging.WARNING)
    # vLLM would import each model's code in a new process, and each of these imports takes ten seconds.
    registry._run_in_subprocess = lambda function: function()
    _replace_kernels()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in json.loads(path.read_bytes()).items():
            directory = Path(folder, name)
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
            known = _model_config(directory).hf_config.to_dict()
            found[name] = {"sizes": _accepted(directory), "config": known}
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
