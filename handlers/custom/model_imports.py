"""Imports of a customer's Python files and packages into the server's process: `sys.path` and `sys.modules`."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

from engines.interface import EngineStartError
from handlers.custom.requirements import needs_packages, prepare_interpreter
from handlers.custom.settings import HandlerConfig
from handlers.model_config import ModelConfig

_OF_THE_SERVER = frozenset({"container", "deploy", "engines", "handlers", "replay", "slipway"})
"""The server's packages. They are already imported, so an import of such a name always gets the server's package."""
_own_directories: list[str] = []  # The directories of all loaded models. Each model adds its directory once.


class ModelImports:
    """The entries of `sys.path` that one model adds, and the modules from the model's directory.

    Models may share a directory. The directory is on `sys.path` once for each model, so it stays until the last of
    these models is unloaded.
    """

    def __init__(self) -> None:
        self._places: list[str] = []
        self._own: str | None = None
        # If a load is abandoned, its entries are removed. `_removed` then keeps the load's thread, which may still run,
        # from adding the directory.
        self._changing, self._removed = threading.Lock(), False

    def add_own(self, directory: Path) -> None:
        """Put the model's directory first on `sys.path`.

        Modules next to `model.py` may have the same names in several models. So other models' modules with such names
        are removed from `sys.modules`. Code that has already imported such a module keeps the module.

        Raises:
            EngineStartError: The load of the model was abandoned, or the directory has a module that the model's code
                cannot import, because a package of the server has the same name.
        """
        if hidden := _OF_THE_SERVER & _imported(directory):
            name = min(hidden)
            raise EngineStartError(
                f"`import {name}` gets the server's package of this name instead of {directory / name}: rename it"
            )
        with self._changing:
            if self._removed:
                raise EngineStartError("the load of the model was given up")
            self._own = str(directory)
            for name, module in list(sys.modules.items()):
                if _own_directory_of(module) not in (None, self._own) and _is_there(name, directory):
                    sys.modules.pop(name, None)
            sys.path.insert(0, self._own)
            _own_directories.append(self._own)
            self._places.append(self._own)

    def add_packages(self, directory: Path) -> None:
        """Put a directory of packages last on `sys.path`, so that the server's packages take precedence."""
        sys.path.append(str(directory))
        self._places.append(str(directory))

    def remove(self) -> None:
        """Remove the entries from `sys.path` and the modules of the model's directory from `sys.modules`.

        Packages stay imported, because many of them cannot be imported a second time.
        """
        with self._changing:
            for place in self._places:
                with contextlib.suppress(ValueError):  # The model's code may have removed the entry.
                    sys.path.remove(place)
            if self._own is not None:
                if _own_directories.count(self._own) == 1:
                    sys.path_importer_cache.pop(self._own, None)
                    for name, module in list(sys.modules.items()):
                        if _own_directory_of(module) == self._own:
                            sys.modules.pop(name, None)
                _own_directories.remove(self._own)
            self._places, self._own = [], None
            self._removed = True


def _own_directory_of(module: ModuleType | None) -> str | None:
    """Return the directory of the loaded model that the module comes from, or None."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    places = (place for place in _own_directories if file.startswith(place + os.sep) and not __file__.startswith(place))
    return max(places, key=len, default=None)  # The innermost directory.


def _imported(directory: Path) -> set[str]:
    """Return the names that a directory's Python files import, limited to modules in the same directory."""
    names = set[str]()
    for file in directory.glob("*.py"):
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # The import reports the error.
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return {name for name in names if _is_there(name, directory)}


def _is_there(name: str, directory: Path) -> bool:
    top = name.partition(".")[0]
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()


async def add_packages(config: ModelConfig, imports: ModelImports) -> None:
    """Install the model's `requirements.txt` and add the packages to `sys.path`.

    Raises:
        EngineStartError: The environment cannot be created, or pip fails.
    """
    handler_config = HandlerConfig(entry_point=str(config.formatters or ""), packages=config.packages)
    if not needs_packages(config.model_dir, handler_config):
        return
    python = Path(await prepare_interpreter(config.model_dir, handler_config))
    for directory in (python.parents[1] / "lib").glob("python*/site-packages"):
        imports.add_packages(directory)
