"""Finds the code that serves a model: a handler, or a script of SageMaker's script mode.

If a model has no such code, an engine serves the model.
"""

from __future__ import annotations

import importlib.util
import os
import re
import symtable
from pathlib import Path

from container.settings.handler import SERVICE_FOR_VLLM
from container.settings.lookup import Sources
from container.settings.values import Value
from container.sources import location
from engines.settings.engine_config import MODEL_ID, ROLLING_BATCH
from handlers.custom.settings import ASYNC_MODE, ENTRY_POINT

# LMI's own handlers. Slipway serves their models with an engine instead. Newer releases of LMI lack the last four.
_BUILT_IN = frozenset(
    f"djl_python.{name}"
    for name in ("huggingface", "tensorrt_llm", "deepspeed", "tensorrt_llm_python", "transformers_neuronx", "tnx")
)
# LMI's own handlers that use the newer schema. They imply `option.async_mode=true`.
_ASYNCHRONOUS = frozenset({SERVICE_FOR_VLLM, "djl_python.lmi_trtllm.trtllm_async_service"})
OF_ENGINES = _BUILT_IN | _ASYNCHRONOUS
# LMI's handlers for models other than language models.
_NOT_SERVED = frozenset(
    f"djl_python.{name}" for name in ("sklearn_handler", "xgboost_handler", "stable_diffusion_inf2", "stable-diffusion")
)
SCRIPT = "djl_python.sagemaker"  # The handler for SageMaker's script mode: it serves a file with `model_fn`.
MODEL_FN = "model_fn"
# Code with `import *`, `exec` or `globals` may define any name.
_CANNOT_BE_TOLD = re.compile(r"^\s*from\s+\S+\s+import\s+\*|(?<![.\w])(exec|globals)\(", re.MULTILINE)


def model_code(sources: Sources) -> Path | None:
    """Return the model directory's `model.py`, or the Python file with the directory's name. None without either."""
    files = (sources.model_dir / "model.py", sources.model_dir / f"{sources.model_dir.name}.py")
    return next((path for path in files if os.path.isfile(path)), None)


def handler_code(sources: Sources, code: Path | None, function: str) -> str | None:
    """Return the file or the module of the handler. None if an engine serves the model.

    Errors are added to `sources.lookup.problems`.

    Args:
        code: The result of `model_code`.
        function: The name of the handler's function.
    """
    script = _script(sources, code)
    given = sources.model.get(ENTRY_POINT.key) or sources.variables.get("DJL_ENTRY_POINT")
    name = sources.value(ENTRY_POINT)
    if name is None or given is None:
        named = any(key in sources.model for key in MODEL_ID.keys) or "HF_MODEL_ID" in sources.variables
        has_model = named or location.has_model(sources.model_dir)
        if code is not None and (defines(code, function) or defines(code, MODEL_FN) or not has_model):
            return str(code)
        if script is not None and has_model:
            path = script.relative_to(sources.model_dir)
            sources.lookup.warnings.append(f"{path} is not used: {ENTRY_POINT.key}={SCRIPT} would serve it")
        return str(script) if script is not None and not has_model else None
    if name in OF_ENGINES:
        if name in _ASYNCHRONOUS:
            sources.model.setdefault(ASYNC_MODE.key, Value("true", given.source))
        if "trtllm" in name or name == "djl_python.tensorrt_llm":
            sources.model.setdefault(ROLLING_BATCH.key, Value("trtllm", given.source))
        return None
    fault = ""
    if name == SCRIPT:
        if script is not None:
            return str(script)
        fault = f"there is no model.py, inference.py or code/inference.py with {MODEL_FN} in the model directory"
    elif name in _NOT_SERVED:
        fault = (
            "not served by this version of Slipway; a model.py with "
            f"{MODEL_FN} that loads the model is served with {ENTRY_POINT.key}={SCRIPT}"
        )
    elif "://" in name:
        fault = "entry points are not downloaded: put the file into the model directory, and give its name"
    elif name.endswith(".py"):
        # The name may begin with the model directory, for example `code` if the model directory is /opt/ml/model/code.
        within = sources.model_dir.parent if Path(name).parts[0] == sources.model_dir.name else sources.model_dir
        for directory in (sources.model_dir, within):
            if os.path.isfile(directory / name):
                return str(directory / name)
        fault = f"there is no such file in the model directory ({sources.model_dir})"
    elif not all(part.isidentifier() for part in name.split(".")):
        fault = "allowed: a file that ends in .py, or the name of a module"
    if fault:
        sources.lookup.problems.append(f"{given.describe(ENTRY_POINT.key)}: {fault}")
    return name  # A wrong name is returned, too. Otherwise a missing model would be reported as well.


def _script(sources: Sources, code: Path | None) -> Path | None:
    """Return the first file with `model_fn`: the file `code`, or a script where SageMaker's toolkits look for it.

    In the model directory, these scripts are `code/<SAGEMAKER_PROGRAM>`, by default `code/inference.py`, and
    `inference.py`.
    """
    program = sources.variables.get("SAGEMAKER_PROGRAM")
    inference = program.text.strip().removesuffix(".py") + ".py" if program is not None else "inference.py"
    places = (code, sources.model_dir / "code" / inference, sources.model_dir / "inference.py")
    return next((path for path in places if path and path.is_file() and defines(path, MODEL_FN)), None)


def defines(path: Path, function: str) -> bool:
    """Return True if a file may define the function, or if the file is broken.

    The fault is reported when the file runs.
    """
    try:
        source = importlib.util.decode_source(path.read_bytes())
        scopes = [symtable.symtable(source, str(path), "exec")]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    if _CANNOT_BE_TOLD.search(source):
        return True
    for scope in scopes:  # The loop appends the inner scopes to the list.
        scopes += scope.get_children()
        if function not in scope.get_identifiers():
            continue
        symbol = scope.lookup(function)
        is_of_module = scope is scopes[0] or symbol.is_declared_global()
        if is_of_module and (symbol.is_assigned() or symbol.is_imported()):
            return True
    return False
