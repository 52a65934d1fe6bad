"""Installs a model's `requirements.txt` into a virtual environment.

LMI installs the packages into the server's interpreter. Slipway never changes the server's packages: each set of
requirements has a virtual environment, which falls back to the interpreter's packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from filelock import AsyncFileLock

from engines.cache_dir import cache_dir
from engines.interface import EngineStartError
from handlers.custom.settings import HandlerConfig

logger = logging.getLogger("handlers.custom")

REQUIREMENTS = "requirements.txt"

# With these variables, another interpreter would import the server's packages, or would not find its own packages.
_SERVER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_PIP_VARIABLES = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}
_DESCRIBE = (
    "import json, sys; "
    "print(json.dumps([sys.executable, sys.version, [p for p in sys.path if p.endswith('-packages')]]))"
)
_COMPLETE = "complete"  # A file that marks a finished environment.
# The key of the environment depends on files with these endings, because pip may read them.
_PIP_FILES = frozenset({".txt", ".whl", ".gz", ".zip", ".toml"})
_LAST_LINES = 5  # The number of lines of pip's output that the error message repeats.


def environment_variables(handler_config: HandlerConfig, python: str = "") -> Mapping[str, str]:
    """Return the server's environment variables and the variables of `option.env`.

    If the model has its own interpreter, variables that concern the server's packages are left out.

    Args:
        python: The interpreter. Its directory comes first on `PATH`, so that programs of its packages are found.
    """
    foreign = handler_config.python_executable is not None
    inherited = {name: value for name, value in os.environ.items() if not (foreign and name in _SERVER_VARIABLES)}
    if python:
        inherited["PATH"] = os.pathsep.join((str(Path(python).parent), inherited.get("PATH", os.defpath)))
    return inherited | dict(handler_config.environment)


def needs_packages(model_dir: Path, handler_config: HandlerConfig) -> bool:
    """Return True if packages have to be installed for the model."""
    packages = handler_config.packages
    return packages.install_requirements and (bool(packages.pip_arguments) or os.path.isfile(model_dir / REQUIREMENTS))


def requirements_dir(model_dir: Path, handler_config: HandlerConfig) -> Path:
    """Return the directory of `requirements.txt`.

    Usually this is the model's directory. If only the directory of the handler's file, such as SageMaker's `code/`, has
    a `requirements.txt`, that directory is returned.
    """
    own = Path(handler_config.entry_point).parent
    elsewhere = (
        os.path.isabs(own) and os.path.isfile(own / REQUIREMENTS) and not os.path.isfile(model_dir / REQUIREMENTS)
    )
    return own if elsewhere else model_dir


async def prepare_interpreter(model_dir: Path, handler_config: HandlerConfig) -> str:
    """Return the interpreter for the model's workers.

    Install the requirements if they are not installed yet.

    Raises:
        EngineStartError: The interpreter cannot be run or cannot create an environment, or pip fails.
    """
    python = handler_config.python_executable or sys.executable
    if not handler_config.enable_venv and not needs_packages(model_dir, handler_config):
        return python
    variables = {**environment_variables(handler_config), **_PIP_VARIABLES}
    answer = await _run([python, "-c", _DESCRIBE], model_dir, variables)
    if answer.returncode:
        raise EngineStartError(f"{python} cannot be used for the handler: {answer.stdout}")
    *interpreter, packages = json.loads(answer.stdout.splitlines()[-1])
    arguments = _pip_arguments(model_dir, handler_config)
    key = await asyncio.to_thread(_requirements_key, model_dir, (*interpreter, *packages, *arguments))
    folder = cache_dir() / "environments" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"cannot create a directory for the handler's packages: {error}") from None
    own_python = str(folder / "bin" / "python")
    async with AsyncFileLock(f"{folder}.lock"):
        if (folder / _COMPLETE).is_file():
            return own_python
        await asyncio.to_thread(shutil.rmtree, folder, True)
        made = await _run([python, "-m", "venv", "--without-pip", str(folder)], model_dir, variables)
        if made.returncode:
            raise EngineStartError(f"{python} cannot create an environment for the handler's packages: {made.stdout}")
        site = next((folder / "lib").glob("python*/site-packages"))
        lines = [f"import site; site.addsitedir({path!r})" for path in packages]
        (site / "slipway_parent.pth").write_text("\n".join(lines) + "\n")
        if arguments:
            await _install(own_python, model_dir, arguments, variables)
        (folder / _COMPLETE).touch()
    return own_python


def _pip_arguments(model_dir: Path, handler_config: HandlerConfig) -> list[str]:
    """Return the arguments of `pip install`, or an empty list if no packages have to be installed."""
    if not needs_packages(model_dir, handler_config):
        return []
    arguments = list(handler_config.packages.pip_arguments) or ["-r", REQUIREMENTS]
    if not handler_config.packages.pip_arguments and (model_dir / "requirements").is_dir():
        arguments += ["--find-links", str(model_dir / "requirements")]
    return arguments + (["--no-index", "--no-build-isolation"] if handler_config.packages.offline else [])


async def _install(python: str, model_dir: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run the server's pip for another interpreter, which may not have pip."""
    logger.info("installing the packages of %s", model_dir)
    command = [sys.executable, "-m", "pip", "--python", python, "install", *arguments]
    result = await _run(command, model_dir, variables)
    if result.returncode:
        logger.error("pip could not install the packages of %s:\n%s", model_dir, result.stdout)
        last = "; ".join(line.strip() for line in result.stdout.splitlines()[-_LAST_LINES:] if line.strip())
        raise EngineStartError(f"pip could not install {REQUIREMENTS}: {last}")
    logger.info("installed the packages of %s:\n%s", model_dir, result.stdout)


async def _run(command: list[str], directory: Path, variables: Mapping[str, str]) -> CompletedProcess[str]:
    """Run a command to its end. Kill it if this coroutine is cancelled."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        return CompletedProcess(command, 127, str(error))
    try:
        output, _ = await process.communicate()
    except BaseException:
        # The command may have ended, and its group may be gone, while a process outside the group has the output open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return CompletedProcess(command, process.returncode or 0, output.decode("utf-8", "replace").strip())


def _requirements_key(model_dir: Path, interpreter: Iterable[str]) -> str:
    """Return the environment's name. It depends on the interpreter and on every file that pip may read."""
    digest = hashlib.sha256("\0".join(interpreter).encode())
    for path in sorted(path for path in model_dir.rglob("*") if path.suffix in _PIP_FILES and path.is_file()):
        digest.update(f"\0{path.relative_to(model_dir)}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
