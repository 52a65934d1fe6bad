"""What Python code of the customer's serves the model, told from its text: a handler, formatters, or nothing.

Nothing is imported here: the code may be slow, and may crash. Source: contracts/lmi.md section 2.7.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = frozenset({"djl_python.huggingface", "djl_python.tensorrt_llm"})
"""Names of LMI's own handlers whose work the engines do."""
ASYNCHRONOUS = frozenset({"djl_python.lmi_vllm.vllm_async_service", "djl_python.lmi_trtllm.trtllm_async_service"})
"""Those whose answers have the newer schema, as under `option.async_mode=true`."""
FORMER = frozenset(
    {"djl_python.deepspeed", "djl_python.tensorrt_llm_python", "djl_python.transformers_neuronx", "djl_python.tnx"}
)
"""Names of LMI's own handlers for text generation that LMI itself has given up."""
NOT_SERVED = {
    "djl_python.sklearn_handler": "only language models are served",
    "djl_python.xgboost_handler": "only language models are served",
    "djl_python.sagemaker": "only language models are served",
    "djl_python.stable_diffusion_inf2": "only language models are served",
    "djl_python.stable-diffusion": "only language models are served",
}


class CodeNotFound(Exception):
    """The entry point names nothing that can be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Code:
    """A file with Python code in the model directory."""

    path: Path
    has_handler: bool
    """It defines the handler function, as far as can be told from its text; a broken file counts as one that does,
    so that running it says what is wrong."""


def find_code(model_dir: Path, function: str) -> Code | None:
    """`model.py`, or `<directory>.py`, if it is there."""
    for name in ("model.py", f"{model_dir.name}.py"):
        path = model_dir / name
        if os.path.isfile(path):
            return Code(path, _defines(path, function))
    return None


def entry_point(text: str, model_dir: Path) -> str:
    """The absolute path of a file, or a module's name, for what `option.entryPoint` says.

    Raises:
        CodeNotFound: it is none of both.
    """
    if text in NOT_SERVED:
        raise CodeNotFound(f"not served by this version of Slipway; {NOT_SERVED[text]}")
    if "://" in text:
        raise CodeNotFound("not served by this version of Slipway; put the file into the model directory")
    if text.endswith(".py"):
        path = model_dir / text
        if not os.path.isfile(path):
            raise CodeNotFound("there is no such file in the model directory")
        return str(path)
    if not all(part.isidentifier() for part in text.split(".")):
        raise CodeNotFound("allowed: a file that ends in .py, or the name of a module")
    return text


def _defines(path: Path, function: str) -> bool:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    names = set(_names(tree.body))
    return function in names or "*" in names


def _names(body: Iterable[ast.AST]) -> Iterator[str]:
    """What a module's statements bind, those within other statements included.

    `*` stands for what cannot be told: a star import, `exec` and the like.
    """
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                yield from (one for inner in ast.walk(node) if isinstance(inner, ast.Global) for one in inner.names)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)):
                yield name
            case ast.Call(func=ast.Name(id="exec" | "globals")):
                yield "*"
            case _:
                yield from _names(ast.iter_child_nodes(node))
