"""The packages of a model's `requirements.txt`, in an environment of the model's own.

LMI installs them into the server's interpreter. Here the server's packages never change: each set of requirements has
a virtual environment, which falls back to the interpreter's packages.
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
from engines.model_settings import HandlerSettings

logger = logging.getLogger("handlers.custom")

REQUIREMENTS = "requirements.txt"

# Variables that would lead another interpreter to our packages, or away from its own.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_PIP_VARIABLES = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}
_DESCRIBE = (
    "import json, sys; "
    "print(json.dumps([sys.executable, sys.version, [p for p in sys.path if p.endswith('-packages')]]))"
)
_COMPLETE = "complete"
_PIP_FILES = frozenset({".txt", ".whl", ".gz", ".zip", ".toml"})
_LAST_LINES = 5  # Of pip's output, in the error message.


def variables_of(settings: HandlerSettings) -> Mapping[str, str]:
    """Our variables and those of `option.env`; another interpreter gets none that concern our packages."""
    foreign = settings.python_executable is not None
    inherited = {name: value for name, value in os.environ.items() if not (foreign and name in _OURS)}
    return inherited | dict(settings.environment)


def needs_packages(model_dir: Path, settings: HandlerSettings) -> bool:
    """Whether anything is to be installed for the model."""
    return settings.install_requirements and (bool(settings.pip_arguments) or os.path.isfile(model_dir / REQUIREMENTS))


def requirements_dir(model_dir: Path, settings: HandlerSettings) -> Path:
    """Where `requirements.txt` is: in the model's directory, or where only that has one, in that of the handler's file,
    such as SageMaker's `code/`."""
    own = Path(settings.entry_point).parent
    elsewhere = (
        os.path.isabs(own) and os.path.isfile(own / REQUIREMENTS) and not os.path.isfile(model_dir / REQUIREMENTS)
    )
    return own if elsewhere else model_dir


async def prepare_interpreter(model_dir: Path, settings: HandlerSettings) -> str:
    """The interpreter for the model's workers. Installs the requirements, unless that has been done before. Raises
    EngineStartError: the interpreter cannot be run, or cannot make an environment, or pip fails."""
    python = settings.python_executable or sys.executable
    if not settings.enable_venv and not needs_packages(model_dir, settings):
        return python
    variables = {**variables_of(settings), **_PIP_VARIABLES}
    answer = await _run([python, "-c", _DESCRIBE], model_dir, variables)
    if answer.returncode:
        raise EngineStartError(f"{python} cannot be used for the handler: {answer.stdout}")
    *interpreter, packages = json.loads(answer.stdout.splitlines()[-1])
    arguments = _pip_arguments(model_dir, settings)
    key = await asyncio.to_thread(_requirements_key, model_dir, (*interpreter, *packages, *arguments))
    folder = cache_dir() / "environments" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"there is no place for the handler's packages: {error}") from None
    own_python = str(folder / "bin" / "python")
    async with AsyncFileLock(f"{folder}.lock"):
        if (folder / _COMPLETE).is_file():
            return own_python
        await asyncio.to_thread(shutil.rmtree, folder, True)
        made = await _run([python, "-m", "venv", "--without-pip", str(folder)], model_dir, variables)
        if made.returncode:
            raise EngineStartError(f"{python} cannot make an environment for the handler's packages: {made.stdout}")
        site = next((folder / "lib").glob("python*/site-packages"))
        lines = [f"import site; site.addsitedir({path!r})" for path in packages]
        (site / "slipway_parent.pth").write_text("\n".join(lines) + "\n")
        if arguments:
            await _install(own_python, model_dir, arguments, variables)
        (folder / _COMPLETE).touch()
    return own_python


def _pip_arguments(model_dir: Path, settings: HandlerSettings) -> list[str]:
    """The arguments of `pip install`; empty where nothing is to be installed."""
    if not needs_packages(model_dir, settings):
        return []
    arguments = list(settings.pip_arguments) or ["-r", REQUIREMENTS]
    if not settings.pip_arguments and (model_dir / "requirements").is_dir():
        arguments += ["--find-links", str(model_dir / "requirements")]
    return arguments + (["--no-index", "--no-build-isolation"] if settings.offline else [])


async def _install(python: str, model_dir: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run the server's own pip for another interpreter, which may have none."""
    logger.info("installing the packages of %s", model_dir)
    command = [sys.executable, "-m", "pip", "--python", python, "install", *arguments]
    result = await _run(command, model_dir, variables)
    if result.returncode:
        logger.error("pip could not install the packages of %s:\n%s", model_dir, result.stdout)
        last = "; ".join(line.strip() for line in result.stdout.splitlines()[-_LAST_LINES:] if line.strip())
        raise EngineStartError(f"pip could not install {REQUIREMENTS}: {last}")
    logger.info("installed the packages of %s:\n%s", model_dir, result.stdout)


async def _run(command: list[str], directory: Path, variables: Mapping[str, str]) -> CompletedProcess[str]:
    """Run a command to its end. When this is cancelled, the command is killed."""
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
        with contextlib.suppress(ProcessLookupError):  # it has ended, but a process outside of its group has its output
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return CompletedProcess(command, process.returncode or 0, output.decode("utf-8", "replace").strip())


def _requirements_key(model_dir: Path, interpreter: Iterable[str]) -> str:
    """A name for the environment: it changes with the interpreter and with every file that pip may be told to read."""
    digest = hashlib.sha256("\0".join(interpreter).encode())
    for path in sorted(path for path in model_dir.rglob("*") if path.suffix in _PIP_FILES and path.is_file()):
        digest.update(f"\0{path.relative_to(model_dir)}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
