"""The script that a worker's interpreter runs: `launch.py <socket fd> <folder of djl_python> <file of stacks>`.

It loads `djl_python`, `slipway_worker` and `engines/stacks.py` by their location, so that the modules next to them do
not become importable.
"""

import importlib
import importlib.util
import os
import sys

OLDEST_PYTHON = (3, 11)


def load_package(name: str, folder: str) -> None:
    """Import the package in `folder` as `name`."""
    load_module(name, os.path.join(folder, "__init__.py"), [folder])


def load_module(name: str, location: str, folders: "list | None" = None) -> None:  # type: ignore[type-arg]
    """Import the file at `location` as `name`. For a package, `folders` are the folders of its submodules."""
    spec = importlib.util.spec_from_file_location(name, location, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(location)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def launch(arguments: list) -> None:  # type: ignore[type-arg]  # Old interpreters also parse this file.
    """Serve calls until the server sends STOP or closes the socket."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit("a handler needs Python 3.11 or later; " + sys.executable + " is " + sys.version)
    folder = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == folder:
        del sys.path[0]
    load_package("djl_python", arguments[1])
    load_package("slipway_worker", folder)
    load_module("slipway_stacks", arguments[2])
    sys.modules["slipway_stacks"].register()
    importlib.import_module("slipway_worker.main").serve(int(arguments[0]))


if __name__ == "__main__":
    launch(sys.argv[1:])
