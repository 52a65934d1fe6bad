"""What Python code of the customer's serves the model, told from its text: a handler, formatters, or nothing.

Nothing is imported here: the code may be slow, and may crash. Source: contracts/lmi.md section 2.7.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = frozenset({"djl_python.huggingface", "djl_python.tensorrt_llm"})
"""Names of LMI's own handlers whose work the engines do."""
FORMER = frozenset(
    {"djl_python.deepspeed", "djl_python.tensorrt_llm_python", "djl_python.transformers_neuronx", "djl_python.tnx"}
)
"""Names of LMI's own handlers for text generation that LMI itself has given up."""
NOT_SERVED = {
    "djl_python.lmi_vllm.vllm_async_service": "its answers have another schema; leave it out",
    "djl_python.lmi_trtllm.trtllm_async_service": "its answers have another schema; leave it out",
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


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """What a module's statements bind, those in `if`, `try` and `with` included; `*` for a star import."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=inner, orelse=other):
                yield from _names(inner + other)
            case ast.With(body=inner):
                yield from _names(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=final):
                yield from _names(inner + [one for handler in handlers for one in handler.body] + other + final)
