"""Loading the formatters of an adapter from its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from engines.adapters import Adapter
from engines.errors import AdapterFailed
from handlers.lmi.adapter_formatters import AdapterFormatters
from tests.waiting import until

pytestmark = pytest.mark.asyncio


def _never(_: Any) -> Any:
    raise AssertionError("there are no formatters to make a handler of")


def formatters(async_mode: bool = False, time_limit: float = 5.0) -> AdapterFormatters:
    otherwise: Any = None
    return AdapterFormatters(otherwise, _never, None, time_limit, async_mode)


async def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterFailed, match=r"src: '.*xxx' cannot be read: File name too long"):
        await formatters().load(Adapter(name="a", src="", path=tmp_path / ("x" * 5000), id=1))


async def test_an_adapter_without_a_model_py_has_no_formatters(tmp_path: Path) -> None:
    adapter = Adapter(name="a", src="", path=tmp_path, id=1)
    assert await formatters().load(adapter) is None


async def test_a_formatter_of_the_other_mode_refuses_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from djl_python.output_formatter import output_formatter\n"
        "@output_formatter\n"
        "def write(response: dict) -> dict:\n"
        "    return response\n"
    )
    adapter = Adapter(name="a", src="", path=tmp_path, id=1)
    with pytest.raises(
        AdapterFailed, match=r"model\.py of the adapter: write.* is written for option\.async_mode=true"
    ):
        await formatters().load(adapter)
    with pytest.raises(AssertionError):  # The formatter fits, so a handler is made.
        await formatters(async_mode=True).load(adapter)


async def test_a_model_py_that_takes_too_long_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path / 'go')!r})\n"
        "while not file.exists():\n"
        "    time.sleep(0.01)\n"
    )
    with pytest.raises(AdapterFailed, match=r"took longer than 0\.2 s"):
        await formatters(time_limit=0.2).load(Adapter(name="late", src="", path=tmp_path, id=7))
    assert modules_of(tmp_path)
    (tmp_path / "go").touch()
    await until(lambda: not modules_of(tmp_path))


def modules_of(directory: Path) -> list[str]:
    files = {name: str(getattr(module, "__file__", "")) for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if file.startswith(str(directory))]
