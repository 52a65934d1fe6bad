"""Replaces itself with the package `djl_python`. Processes that a handler starts import this file as `djl_python`."""

import os
import runpy

_WORKER_PROCESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_WORKER_PROCESS)))

runpy.run_path(os.path.join(_WORKER_PROCESS, "launch.py"))["load_package"](
    "djl_python", os.path.join(_ROOT, "djl_python")
)
