"""The options of the GPU tests agree with the options that vLLM's kernels take. These tests need no GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.conftest import adapter_options, text_options

MODEL = Path("/models/model")
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def lora_dtypes() -> set[str]:
    """Return the data types that vLLM's LoRA kernel for GPUs takes.

    They are read from the kernel's source, because it cannot be imported without a GPU.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).with_name("lora") / "ops" / "triton_ops" / "lora_shrink_op.py"
    found = re.search(r"assert inputs\.dtype in \[([^]]*)\]", source.read_text())
    assert found is not None, "vLLM says elsewhere which data types its adapters have"
    return {name.strip().removeprefix("torch.") for name in found.group(1).split(",")}


@pytest.mark.parametrize("given", [None, "fp32", "fp16", "bf16"])
def test_adapters_have_a_data_type_that_their_kernels_take_and_texts_the_one_that_was_asked_for(
    given: str | None,
) -> None:
    adapter, text = adapter_options(MODEL, given), text_options(MODEL, given)
    assert adapter["enable_lora"] == "true"
    assert TORCH_NAMES[str(adapter["dtype"])] in lora_dtypes()
    assert text["dtype"] == (given or "fp32")
    assert not [name for name in text if "lora" in name]
