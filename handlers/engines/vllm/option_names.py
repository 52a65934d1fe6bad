"""The names of vLLM's arguments, read from its source: importing it takes seconds, and a report needs names alone."""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path

from handlers.engines.vllm.arguments import FRONT_END

_CLASSES = frozenset({"EngineArgs", "AsyncEngineArgs"})


@lru_cache
def vllm_option_names() -> frozenset[str]:
    """Arguments of the engine and of its front end; empty where vLLM is not installed, or is built otherwise."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(package.origin).parent / "engine" / "arg_utils.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names = {
        statement.target.id
        for definition in tree.body
        if isinstance(definition, ast.ClassDef) and definition.name in _CLASSES
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return frozenset(names) | FRONT_END if names else frozenset()
