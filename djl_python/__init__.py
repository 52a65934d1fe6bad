"""The handler SDK: the package that a customer's `model.py` for LMI imports.

Importing the package needs only the standard library. docs/handler_sdk.md lists the public names.
"""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList
from djl_python.session import Session
from djl_python.session_manager import SessionManager

__version__ = "0.36.0"  # The version of LMI's `djl_python` with the same interface.

__all__ = ["Input", "Output", "PairList", "Session", "SessionManager", "__version__"]
