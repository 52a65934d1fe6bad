"""Makes torchvision's build on PyPI work with a CPU build of torch. Importing torch calls `define_operators`.

torchvision's build on PyPI needs CUDA's libraries for its own operators, such as `nms` for object detection. Without
these libraries, the operators are not registered, and importing torchvision fails. The processors of language models
do not use these operators.

The function is called in every process of the environment (pyproject.toml, `torch.backends`). A plugin of vLLM would be
too late: vLLM's own import loads transformers, whose `image_utils` imports torchvision. A customer's handler may also
import transformers without vLLM. The function is in a separate top-level module, because a package in a customer's
model directory may hide a package of Slipway. If this module were hidden, torch could not be imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_OPERATORS = ("nms", "qnms")  # The operators that torchvision's import looks for.
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define_operators() -> None:
    """Register the names of the missing operators if this torch is a CPU build and this torchvision is not."""
    import torch

    try:
        needs_cuda = "+" not in version("torchvision")  # PyTorch's own indexes have versions like 0.28.0+cpu.
    except PackageNotFoundError:
        return
    if torch.version.cuda is None and needs_cuda:
        for name in _OPERATORS:
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
