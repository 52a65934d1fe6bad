"""The packages of a model's `requirements.txt`, in an environment of the model's own.

LMI installs them into the server's interpreter. Here the server's packages never change: each set of requirements has
a virtual environment, which sees the interpreter's packages behind its own. Source: contracts/lmi.md section 2.15.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import AsyncFileLock

from handlers.cache_dir import cache_dir
from handlers.engines.protocol import EngineStartError
from handlers.model_settings import HandlerSettings

logger = logging.getLogger("handlers.workers")

# What would lead another interpreter to our packages, or away from its own.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def interpreter_of(settings: HandlerSettings) -> str:
    """The interpreter that the settings ask for, before any environment of the model's own."""
    return settings.python_executable or sys.executable


def variables_of(settings: HandlerSettings) -> Mapping[str, str]:
    """Our variables and those of `option.env`; another interpreter gets none that concern our packages."""
    inherited = dict(os.environ)
    if settings.python_executable is not None:
        for name in _OURS:
            inherited.pop(name, None)
    return inherited | dict(settings.environment)


_WORD = re.compile(r"[^\s=@]+")
_FORMAT = "1"


def requirements_key(model_dir: Path, interpreter: Iterable[str]) -> str:
    """A name for the environment: it changes with the interpreter, the requirements, and every local file they name."""
    digest = hashlib.sha256(_FORMAT.encode())
    for text in interpreter:
        digest.update(text.encode() + b"\0")
    for path in sorted(_files(model_dir)):
        digest.update(str(path.relative_to(model_dir)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _files(model_dir: Path) -> set[Path]:
    """The requirements, the folder of wheels, and whatever in the model's folder the requirements name."""
    seen: set[Path] = set()
    pending = [model_dir / "requirements.txt", model_dir / "requirements"]
    while pending:
        for path in _all_in(pending.pop()):
            if path in seen:
                continue
            seen.add(path)
            if path.suffix == ".txt":
                pending += _named_in(path, model_dir)
    return seen


def _named_in(requirements: Path, model_dir: Path) -> Iterator[Path]:
    for word in _WORD.findall(requirements.read_text("utf-8", "replace")):
        path = (requirements.parent / word.partition("[")[0].removeprefix("file:")).resolve()
        if path != model_dir.resolve() and path.is_relative_to(model_dir.resolve()) and _exists(path):
            yield model_dir / path.relative_to(model_dir.resolve())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a URL, say, that is too long for a file's name
        return False


def _all_in(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())


REQUIREMENTS = "requirements.txt"

_DESCRIBE = (
    "import json, sys; "
    "print(json.dumps([sys.executable, sys.version, [p for p in sys.path if p.endswith('-packages')]]))"
)
_PTH = "slipway_parent.pth"
_COMPLETE = "complete"
_LAST_LINES = 5
"""Of pip's output, in the reason why the model cannot be served."""


@dataclass(frozen=True, slots=True)
class _Result:
    code: int
    output: str


async def prepare_interpreter(model_dir: Path, settings: HandlerSettings) -> str:
    """The interpreter for the model's workers; installs the requirements first, unless that has been done before.

    Raises:
        EngineStartError: the interpreter cannot be run, can make no environment, or pip fails: with what it said last.
    """
    python = interpreter_of(settings)
    if not settings.enable_venv and not needs_packages(model_dir, settings):
        return python
    await asyncio.to_thread(_check_directory, model_dir)
    variables = dict(variables_of(settings)) | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_NO_INPUT": "1",
    }
    answer = await _run([python, "-c", _DESCRIBE], model_dir, variables)
    if answer.code:
        raise EngineStartError(f"{python} cannot be used for the handler: {answer.output}")
    executable, version, packages = json.loads(answer.output.splitlines()[-1])
    arguments = _pip_arguments(model_dir, settings)
    key = await asyncio.to_thread(requirements_key, model_dir, (executable, version, *packages, *arguments))
    environments = cache_dir() / "environments"
    try:
        environments.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"there is no place for the handler's packages: {error}") from None
    folder = environments / key
    async with AsyncFileLock(f"{folder}.lock"):
        if (folder / _COMPLETE).is_file():
            return str(folder / "bin" / "python")
        return await _build(folder, python, packages, model_dir, arguments, variables)


async def _build(
    folder: Path,
    python: str,
    packages: list[str],
    model_dir: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
) -> str:
    """Make the environment; it counts once the file `complete` is there."""
    await asyncio.to_thread(shutil.rmtree, folder, True)
    made = await _run([python, "-m", "venv", "--without-pip", str(folder)], model_dir, variables)
    if made.code:
        raise EngineStartError(f"{python} cannot make an environment for the handler's packages: {made.output}")
    own_python = str(folder / "bin" / "python")
    site = next((folder / "lib").glob("python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})" for path in packages]
    (site / _PTH).write_text("\n".join(lines) + "\n")
    if arguments:
        try:
            await _install(own_python, model_dir, arguments, variables)
        except EngineStartError:
            await asyncio.to_thread(shutil.rmtree, folder)
            raise
    (folder / _COMPLETE).touch()
    return own_python


def _check_directory(model_dir: Path) -> None:
    if not model_dir.is_dir():
        raise EngineStartError(
            f"packages are to be installed (STANDARD_PIP_ARGS), but there is no directory {model_dir}"
        )


def needs_packages(model_dir: Path, settings: HandlerSettings) -> bool:
    """Whether anything is to be installed for the model."""
    return settings.install_requirements and (bool(settings.pip_arguments) or os.path.isfile(model_dir / REQUIREMENTS))


def _pip_arguments(model_dir: Path, settings: HandlerSettings) -> list[str]:
    """What follows `pip install`; empty where nothing is to be installed. Source: sagemaker_hosting.md section 10."""
    if not needs_packages(model_dir, settings):
        return []
    if settings.pip_arguments:
        arguments = list(settings.pip_arguments)
    else:
        arguments = ["-r", REQUIREMENTS]
        if (model_dir / "requirements").is_dir():
            arguments += ["--find-links", str(model_dir / "requirements")]
    return arguments + (["--no-index", "--no-build-isolation"] if settings.offline else [])


async def _install(python: str, model_dir: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    if (await _run([python, "-m", "pip", "--version"], model_dir, variables)).code:
        ensured = await _run([python, "-m", "ensurepip", "--default-pip"], model_dir, variables)
        if ensured.code:
            raise EngineStartError(f"{python} has no pip, so {REQUIREMENTS} cannot be installed: {ensured.output}")
    logger.info("installing the packages of %s", model_dir)
    result = await _run([python, "-m", "pip", "install", *arguments], model_dir, variables)
    if result.code:
        logger.error("pip could not install the packages of %s:\n%s", model_dir, result.output)
        last = "; ".join(line.strip() for line in result.output.splitlines()[-_LAST_LINES:] if line.strip())
        raise EngineStartError(f"pip could not install {REQUIREMENTS}: {last}")
    logger.info("installed the packages of %s:\n%s", model_dir, result.output)


async def _run(command: list[str], directory: Path, variables: Mapping[str, str]) -> _Result:
    """Run a command to its end; if we are cancelled it ends, too."""
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
        return _Result(127, str(error))
    try:
        output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and something that left its group has its output
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return _Result(process.returncode or 0, output.decode("utf-8", "replace").strip())
