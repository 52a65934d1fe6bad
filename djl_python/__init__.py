"""The handler SDK: what a customer's `model.py`, written for LMI, imports.

Importing it needs the standard library alone. docs/handler_sdk.md lists its names.
"""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList
from djl_python.session import Session
from djl_python.session_manager import SessionManager

__version__ = "0.36.0"  # The version of LMI's Python package whose interface this one has.

__all__ = ["Input", "Output", "PairList", "Session", "SessionManager", "__version__"]
