"""What the code of a model is imported from, in this process, for as long as the model is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

_imported_from: list[str] = []
"""The directories of models that are loaded; one that several models share is there for each of them."""


class ModelImports:
    """The places on `sys.path` that one model adds, and the modules that come from its own directory.

    A directory is on `sys.path` once for each model that has it, so that it stays until the last of them is gone.
    """

    def __init__(self) -> None:
        self._own: list[str] = []
        self._packages: list[str] = []

    def add_own(self, directory: Path) -> None:
        """Import from the model's directory before anything else.

        Modules beside `model.py` have names that any model may use: those of other models are forgotten, so that this
        one gets its own. Whoever has imported them goes on with them.
        """
        place = str(directory)
        for name, module in list(sys.modules.items()):
            came_from = _directory_of(module)
            if came_from is not None and came_from != place and _is_there(name, directory):
                sys.modules.pop(name, None)
        sys.path.insert(0, place)
        _imported_from.append(place)
        self._own.append(place)

    def add_packages(self, directory: Path) -> None:
        """Import from there what is nowhere else, so that no package of ours is replaced under the engine."""
        place = str(directory)
        sys.path.append(place)
        self._packages.append(place)

    def remove(self) -> None:
        """Import from there no more, and let go of the modules of the model's own directory, with all that they keep.

        Packages stay imported: many cannot be imported a second time.
        """
        for place in self._packages:
            if place in sys.path:
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(place)]
        for place in self._own:
            if place in sys.path:
                sys.path.remove(place)
            if _imported_from.count(place) == 1:
                sys.path_importer_cache.pop(place, None)
                for name, module in list(sys.modules.items()):
                    if _directory_of(module) == place:
                        sys.modules.pop(name, None)
            _imported_from.remove(place)
        self._packages, self._own = [], []


def _directory_of(module: ModuleType | None) -> str | None:
    """The loaded model's directory that a module is from; None for all others."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    places = (place for place in _imported_from if file.startswith(place + os.sep) and not __file__.startswith(place))
    return max(places, key=len, default=None)  # one may lie in another


def _is_there(name: str, directory: Path) -> bool:
    top = name.partition(".")[0]
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()
