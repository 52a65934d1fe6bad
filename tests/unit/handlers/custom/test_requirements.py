"""The installation of a model's `requirements.txt`, and handlers with an interpreter of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest

from engines.interface import EngineStartError
from handlers.custom.custom_handler import CustomHandler
from handlers.custom.requirements import environment_variables, prepare_interpreter, requirements_dir
from handlers.custom.settings import HandlerConfig
from tests.stand_ins.wheel import make_wheel
from tests.unit.handlers.custom.harness import MODELS, serving, settings_for
from tests.waiting import until


def make_model(folder: Path, requirements: str) -> Path:
    shutil.copytree(MODELS / "requirements", folder)
    (folder / "requirements.txt").write_text(requirements)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def environments(home: Path) -> list[Path]:
    return [path.parent for path in home.rglob("complete")]


@pytest.mark.slow
async def test_a_relative_wheel_is_installed_once_and_not_into_our_packages(home: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "./wheels/tiny_package-1.0-py3-none-any.whl\n")
    make_wheel(model / "wheels", "first")
    async with serving(model, offline=True) as client:
        assert (await client.ask(b"x")).body == b"first"
    [environment] = environments(home)
    created = (environment / "complete").stat().st_mtime_ns
    async with serving(model, offline=True) as client:
        assert (await client.ask(b"x")).body == b"first"
    assert (environment / "complete").stat().st_mtime_ns == created
    with pytest.raises(ImportError):
        __import__("tiny_package")

    make_wheel(tmp_path / "model" / "wheels", "second")
    async with serving(model, offline=True) as client:
        assert (await client.ask(b"x")).body == b"second"
    assert len(environments(home)) == 2


@pytest.mark.slow
async def test_the_requirements_folder_is_searched_and_our_packages_stay_visible(home: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "tiny-package\n")
    make_wheel(model / "requirements", "found")
    (model / "model.py").write_text("import msgspec\n" + (model / "model.py").read_text())
    async with serving(model, offline=True, min_workers=2, max_workers=2) as client:
        assert (await client.ask(b"x")).body == b"found"
    assert len(environments(home)) == 1


@pytest.mark.slow
async def test_two_servers_that_start_together_share_one_environment(home: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "./tiny_package-1.0-py3-none-any.whl\n")
    make_wheel(model, "both")

    async def ask() -> bytes:
        async with serving(model, offline=True) as client:
            return (await client.ask(b"x")).body

    assert set(await asyncio.gather(ask(), ask())) == {b"both"}
    assert len(environments(home)) == 1


async def test_what_cannot_be_installed_fails_the_load_with_pips_last_lines(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model", "tiny-package==99\n")
    handler = CustomHandler(settings_for(model, offline=True), queue_size=1, overload_status=503)
    with pytest.raises(EngineStartError, match="tiny-package==99"):
        await handler.start()
    assert any("tiny-package==99" in message for message in caplog.messages)
    assert not environments(home)


async def test_requirements_can_be_left_alone(home: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "tiny-package==99\n")
    handler = CustomHandler(settings_for(model, install_requirements=False), queue_size=1, overload_status=503)
    with pytest.raises(EngineStartError, match="No module named 'tiny_package'"):
        await handler.start()
    assert not environments(home)


@pytest.mark.slow
async def test_arguments_of_pip_can_be_given(home: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "tiny-package==99\n")
    make_wheel(tmp_path / "elsewhere", "by arguments")
    arguments = ("tiny-package", "--no-index", "--find-links", str(tmp_path / "elsewhere"))
    async with serving(model, pip_arguments=arguments) as client:
        assert (await client.ask(b"x")).body == b"by arguments"
    assert len(environments(home)) == 1


async def test_another_interpreter_sees_the_sdk_and_its_own_packages_but_none_of_ours(
    home: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "foreign", symlinks=True)
    python = str(tmp_path / "foreign" / "bin" / "python")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.py").write_text(
        "import importlib.util, json, sys\n"
        "from djl_python import Input, Output\n"
        "def handle(inputs):\n"
        "    if inputs.is_empty():\n"
        "        return None\n"
        "    names = ['djl_python', 'handlers', 'container', 'msgspec', 'pytest', 'launch', 'socket_protocol']\n"
        "    found = [name for name in names if name in sys.modules or importlib.util.find_spec(name)]\n"
        "    return Output().add(json.dumps([sys.prefix, found]))\n"
    )
    async with serving(model, python_executable=python) as client:
        assert json.loads((await client.ask()).body) == [str(tmp_path / "foreign"), ["djl_python"]]
    assert not environments(home)


async def test_requirements_work_with_another_interpreter(home: Path, tmp_path: Path) -> None:
    await asyncio.to_thread(venv.create, tmp_path / "foreign", symlinks=True)
    python = str(tmp_path / "foreign" / "bin" / "python")
    model = make_model(tmp_path / "model", "tiny-package\n")
    make_wheel(model / "requirements", "foreign")
    async with serving(model, offline=True, python_executable=python) as client:
        assert (await client.ask(b"x")).body == b"foreign"
    [environment] = environments(home)
    command = [str(environment / "bin" / "python"), "-c", "import msgspec"]
    listed = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False)  # noqa: ASYNC221
    assert b"No module named 'msgspec'" in listed.stderr


async def test_programs_of_the_models_packages_are_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    handler_config = HandlerConfig(entry_point="model.py")
    assert environment_variables(handler_config, "/e/bin/python")["PATH"] == "/e/bin:/usr/bin"
    given = HandlerConfig(entry_point="model.py", environment={"PATH": "/own"})
    assert environment_variables(given, "/e/bin/python")["PATH"] == "/own"


async def test_enable_venv_gives_the_model_an_environment_even_without_requirements(home: Path, tmp_path: Path) -> None:
    async with serving("echo", enable_venv=True) as client:
        executable = json.loads((await client.ask(query={"inspect": "1"})).body)["executable"]
    assert executable != sys.executable
    assert Path(executable).is_relative_to(home)


CHILD = "import os, sys, djl_python.inputs, json, beside; print(beside.NAME, djl_python.Input.__name__)"
STARTS_A_CHILD = f"""
import os, subprocess, sys
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    done = subprocess.run([sys.executable, "-c", {CHILD!r}], cwd="/", capture_output=True, text=True)
    paths = "|".join(sys.path)
    return Output().add(done.stdout + done.stderr + os.environ["PYTHONPATH"] + "|" + paths)
"""


def model_with_a_child(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(STARTS_A_CHILD)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    # If the model directory were on the path at the start, Python would import this module.
    (folder / "queue.py").write_text("raise ImportError('not the standard library')\n")
    return folder


@pytest.mark.parametrize("foreign", [False, True])
async def test_processes_of_the_handler_import_the_models_modules_and_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    model = model_with_a_child(tmp_path / "model")
    venv.create(tmp_path / "venv")
    monkeypatch.setenv("PYTHONPATH", "/given")
    python = str(tmp_path / "venv" / "bin" / "python") if foreign else None
    async with serving(model, python_executable=python) as client:
        answer = (await client.ask(b"x")).body.decode()
    said, _, rest = answer.partition("\n")
    assert said == "beside Input", answer
    python_path, *import_path = rest.split("|")
    given, *own = python_path.split(os.pathsep) if not foreign else ("/given", *python_path.split(os.pathsep))
    assert (given, own[-1], len(own)) == ("/given", str(model), 2)
    assert os.listdir(own[0]) != []
    assert import_path[-1] == own[0]  # Child processes may inherit this list.
    assert import_path.count(str(model)) == 1


async def test_a_python_path_in_the_handlers_environment_stays(tmp_path: Path) -> None:
    model = model_with_a_child(tmp_path / "model")
    async with serving(model, environment={"PYTHONPATH": "/own"}) as client:
        answer = (await client.ask(b"x")).body.decode()
    assert "No module named 'beside'" in answer
    assert "\n/own|" in answer


async def test_an_interpreter_that_is_too_old_fails_the_load_with_the_reason(tmp_path: Path) -> None:
    old = next((path for path in map(shutil.which, ("python3.9", "python3.10", "python3.8")) if path), None)
    if old is None or subprocess.run([old, "--version"], capture_output=True, check=False).returncode:  # noqa: ASYNC221
        pytest.skip("no older interpreter here")
    handler = CustomHandler(settings_for("echo", python_executable=old), queue_size=1, overload_status=503)
    with pytest.raises(EngineStartError, match=r"3\.11"):
        await handler.start()


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_a_load_can_be_given_up_while_something_that_pip_left_behind_runs(tmp_path: Path) -> None:
    python, pids = tmp_path / "python", tmp_path / "pids"
    python.write_text(f"#!/bin/sh\nsetsid sleep 2 &\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\n")
    python.chmod(0o755)
    model = make_model(tmp_path / "model", "")
    handler_config = HandlerConfig(entry_point="model.py", python_executable=str(python))
    load = asyncio.create_task(prepare_interpreter(model, handler_config))
    await until(pids.exists)
    script, left_behind = map(int, pids.read_text().split())
    await until(lambda: has_ended(script))
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    await until(lambda: has_ended(left_behind))


async def test_requirements_may_lie_beside_the_handlers_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    handler_config = HandlerConfig(entry_point=str(tmp_path / "code" / "inference.py"))
    assert requirements_dir(tmp_path, handler_config) == tmp_path
    (tmp_path / "code" / "requirements.txt").touch()
    assert requirements_dir(tmp_path, handler_config) == tmp_path / "code"
    assert requirements_dir(tmp_path, HandlerConfig(entry_point="a.module")) == tmp_path
    (tmp_path / "requirements.txt").touch()
    assert requirements_dir(tmp_path, handler_config) == tmp_path
