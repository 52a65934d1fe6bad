"""The list of names that have moved in another release of vLLM, with wheels of a few modules."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from engines.vllm.internals import NAMES, member_name
from tests import next_vllm
from tests.next_vllm import ROOT, Sources, moved, moved_imports, moved_names

CORE = """
from dataclasses import dataclass
from vllm.base import Base

class Engine(Base):
    limit: int = 7
    async def add(self, request, *, priority=0, **rest): ...
    @staticmethod
    def _close(client, /, seconds=None): ...

@dataclass
class Output:
    token: int
    text: str = ""
"""
BASE = """
class Base:
    def __init__(self):
        self.queue, self._size = [], 0
"""
EXPORTS = "from .core import Engine as Engine\nif True:\n    from vllm.core import Output\n"
TABLE = {
    "user.py": {
        "vllm.core:Engine": (
            "add(self, request, *, priority=, **rest)",
            "_close(client, /, seconds=)",
            "queue",
            "_size",
            "limit: int = 7",
        ),
        "vllm:Output": ("{token, text}",),
        "vllm": ("Engine",),
    }
}


def wheel(path: Path, **modules: str) -> Sources:
    """Write a wheel of these modules."""
    with ZipFile(path, "w") as written:
        for name, text in modules.items():
            written.writestr(f"vllm/{name}.py", text)
    return Sources.of_wheel(path)


def test_nothing_has_moved_in_a_release_that_is_as_the_table_says(tmp_path: Path) -> None:
    release = wheel(tmp_path / "vllm.whl", __init__=EXPORTS, core=CORE, base=BASE)
    assert list(moved_names(release, TABLE)) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("add(self, request,", "add(self, request, budget,", "add(self, request, budget, *, priority=, **rest)"),
        ("priority=0", "priority", "add(self, request, *, priority, **rest)"),
        ("def _close", "def close", "vllm.core:Engine has no _close"),
        ("_size =", "size =", "vllm.core:Engine has no _size"),
        ("limit: int = 7", "limit: int = 8", "limit: int = 8"),
        ("token: int", "token: int\n    error: str", "vllm:Output has the new error"),
        ('    text: str = ""', "    pass", "vllm:Output has no text"),
        ("class Engine", "class Machine", "vllm.core:Engine has no add"),
    ],
)
def test_what_has_moved_is_named_with_the_file_that_uses_it(
    tmp_path: Path, before: str, after: str, found: str
) -> None:
    core, base = CORE.replace(before, after), BASE.replace(before, after)
    assert (core, base) != (CORE, BASE)
    lines = list(moved_names(wheel(tmp_path / "vllm.whl", __init__=EXPORTS, core=core, base=base), TABLE))
    assert [line for line in lines if line.startswith("user.py: ") and found in line]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"core": CORE.replace("request, *", "request, budget=None, *")},
        {"core": CORE.replace('    text: str = ""', '    text: str = ""\n    error: str = ""')},
        {"base": "", "parts": BASE, "core": CORE.replace("vllm.base", "vllm.parts")},
    ],
)
def test_both_forms_of_a_row_hold(tmp_path: Path, change: dict[str, str]) -> None:
    table = {
        "user.py": {
            "vllm.core:Engine": ("add(self, request, budget=?, *, priority=, **rest)",),
            "vllm.core:Output": ("{token, text, error?}",),
            "vllm.base | vllm.parts": ("Base",),
        }
    }
    sources = {"__init__": EXPORTS, "core": CORE, "base": BASE} | change
    assert list(moved_names(wheel(tmp_path / "vllm.whl", **sources), table)) == []
    further = sources["core"].replace("token: int", "token: int\n    cause: str")
    lines = list(moved_names(wheel(tmp_path / "further.whl", **sources | {"core": further}), table))
    assert [line for line in lines if "the new cause" in line] == lines[:1]


def test_an_import_of_a_name_that_is_elsewhere_is_found_with_its_new_place(tmp_path: Path) -> None:
    release = wheel(tmp_path / "vllm.whl", __init__=EXPORTS, core=CORE, base=BASE)
    user = tmp_path / "engines" / "user.py"
    user.parent.mkdir()
    user.write_text(
        "from vllm import Engine\nfrom vllm.core import Base, Missing\nfrom vllm.base import Output\n"
        "import vllm.gone\nNAME = 'vllm.core:Engine'\nOTHER = 'vllm.core.Former'\n"
    )
    assert list(moved_imports(release, tmp_path)) == [
        "engines/user.py:2: there is no vllm.core.Missing",
        "engines/user.py:3: there is no vllm.base.Output; Output is in vllm.core",
        "engines/user.py:4: there is no vllm.gone",
        "engines/user.py:6: there is no vllm.core.Former",
    ]


def test_the_command_ends_with_1_if_something_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vllm-0.0.0-py3-none-any.whl"
    wheel(path, __init__="")
    monkeypatch.setattr(sys, "argv", ["next_vllm", str(path)])
    monkeypatch.setattr(next_vllm, "ROOT", tmp_path)  # An empty repository, without files that import vLLM.
    with pytest.raises(SystemExit) as ended:
        next_vllm.main()
    assert ended.value.code == 1
    assert "engines/vllm/async_llm.py: vllm.v1.engine.async_llm:AsyncLLM has no abort" in capsys.readouterr().out


def test_nothing_has_moved_in_the_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    assert found.origin is not None
    assert moved(Sources.of_directory(Path(found.origin).parents[1])) == []


def test_each_name_of_the_table_is_in_the_file_that_uses_it() -> None:
    names = {
        (file, name)
        for file, owners in NAMES.items()
        for members in owners.values()
        for member in members
        if not member.startswith("{") and not (name := member_name(member)).startswith("__")
    }
    texts = {file: (ROOT / file).read_text() for file in NAMES}
    assert [(file, name) for file, name in names if not re.search(rf"\b{name}\b", texts[file])] == []
