"""The packages of a model's `requirements.txt`, in an environment of the model's own.

LMI installs them into the server's interpreter. Here the server's packages never change: each set of requirements has
a virtual environment, which sees the interpreter's packages behind its own. Source: contracts/lmi.md section 2.15.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import AsyncFileLock

from handlers.engines.protocol import EngineStartError
from handlers.model_settings import HandlerSettings
from handlers.workers.interpreter import interpreter_of, variables_of
from handlers.workers.requirements_key import requirements_key

logger = logging.getLogger("handlers.workers")

REQUIREMENTS = "requirements.txt"

_DESCRIBE = (
    "import json, sys; "
    "print(json.dumps([sys.executable, sys.version, [p for p in sys.path if p.endswith('-packages')]]))"
)
_PTH = "slipway_parent.pth"
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class _Result:
    code: int
    output: str


async def prepare_interpreter(model_dir: Path, settings: HandlerSettings) -> str:
    """The interpreter for the model's workers; installs the requirements first, unless that has been done before.

    As in LMI a failed installation is logged and no more: the handler may do without, and says so if not.

    Raises:
        EngineStartError: the interpreter cannot be run, or can make no environment.
    """
    python = interpreter_of(settings)
    if not settings.enable_venv and not (model_dir / REQUIREMENTS).is_file():
        return python
    variables = dict(variables_of(settings)) | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_NO_INPUT": "1",
    }
    answer = await _run([python, "-c", _DESCRIBE], model_dir, variables)
    if answer.code:
        raise EngineStartError(f"{python} cannot be used for the handler: {answer.output}")
    executable, version, packages = json.loads(answer.output.splitlines()[-1])
    key = await asyncio.to_thread(requirements_key, model_dir, (executable, version, *packages))
    environments = Path.home() / ".cache" / "slipway" / "environments"
    try:
        environments.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"there is no place for the handler's packages: {error}") from None
    folder = environments / key
    async with AsyncFileLock(f"{folder}.lock"):
        if (folder / _COMPLETE).is_file():
            return str(folder / "bin" / "python")
        return await _build(folder, python, packages, model_dir, settings, variables)


async def _build(
    folder: Path,
    python: str,
    packages: list[str],
    model_dir: Path,
    settings: HandlerSettings,
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
    if (model_dir / REQUIREMENTS).is_file() and not await _install(own_python, model_dir, settings, variables):
        await asyncio.to_thread(shutil.rmtree, folder)
        return python
    (folder / _COMPLETE).touch()
    return own_python


async def _install(python: str, model_dir: Path, settings: HandlerSettings, variables: Mapping[str, str]) -> bool:
    if (await _run([python, "-m", "pip", "--version"], model_dir, variables)).code:
        ensured = await _run([python, "-m", "ensurepip", "--default-pip"], model_dir, variables)
        if ensured.code:
            logger.error("%s has no pip, so %s is not installed: %s", python, REQUIREMENTS, ensured.output)
            return False
    command = [python, "-m", "pip", "install", "-r", REQUIREMENTS]
    wheels = model_dir / "requirements"
    if wheels.is_dir():
        command += ["--find-links", str(wheels)]
    if settings.offline:
        command += ["--no-index", "--no-build-isolation"]
    logger.info("installing the packages of %s", model_dir / REQUIREMENTS)
    result = await _run(command, model_dir, variables)
    if result.code:
        logger.error("pip could not install %s:\n%s", model_dir / REQUIREMENTS, result.output)
        return False
    logger.info("installed the packages of %s:\n%s", model_dir / REQUIREMENTS, result.output)
    return True


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
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return _Result(process.returncode or 0, output.decode("utf-8", "replace").strip())
