"""Makes torchvision's build on PyPI work with a CPU build of torch. Importing torch calls `define_operators`.

That build needs CUDA's libraries for its own operators, such as those that find objects in images. Without them the
operators do not exist, and then torchvision cannot be imported. The processors of language models need none of them.

The function is called in every process of the environment (pyproject.toml, `torch.backends`). A plugin of vLLM would be
too late: vLLM's own import loads transformers, whose `image_utils` imports torchvision. Processes of vLLM and of a
customer's handler begin with that import. The function is in a module of its own, so that no package of a customer's
model hides the module. If the module were hidden, torch could not be imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_OPERATORS = ("nms", "qnms")  # The ones that torchvision's import looks for.
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define_operators() -> None:
    """Name the missing operators, if this torch is a CPU build and torchvision is not."""
    import torch

    try:
        needs_cuda = "+" not in version("torchvision")  # PyTorch's own indexes have such versions: 0.28.0+cpu
    except PackageNotFoundError:
        return
    if torch.version.cuda is None and needs_cuda:
        for name in _OPERATORS:
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
