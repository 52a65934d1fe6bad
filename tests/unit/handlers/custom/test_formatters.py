"""The formatters of a customer's `model.py`, and the imports of its modules and packages."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines.adapters import Adapter
from engines.errors import AdapterFailed
from engines.interface import EngineStartError
from handlers.custom import model_imports
from handlers.custom.formatters import Formatters, load_adapter_formatters, load_formatters, signature_fault
from handlers.custom.model_imports import ModelImports, add_packages
from handlers.custom.settings import PackageConfig
from handlers.formatter_thread import FormatterThread
from tests.contracts.exchange import MODEL
from tests.settings import configured
from tests.stand_ins.wheel import make_wheel
from tests.waiting import until, wait_until

OUTPUT = """
from djl_python.output_formatter import output_formatter
from djl_python.request_io import RequestOutput

@output_formatter
def write(output: RequestOutput) -> str:
    return "x"
"""
INPUT = """
from djl_python.input_parser import input_formatter

@input_formatter
def read(given, **keywords):
    return None
"""


@pytest.fixture(autouse=True)
def unchanged_imports() -> Iterator[None]:
    """Check that a test leaves `sys.path` unchanged, and remove the modules that it imported."""
    path, modules = list(sys.path), set(sys.modules)
    IMPORTS.clear()
    yield
    for each in IMPORTS:
        each.remove()
    assert sys.path == path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


IMPORTS: list[ModelImports] = []


NONE = Formatters(FormatterThread(60))


def found(directory: Path, code: str, **settings: Any) -> Formatters:
    (directory / "model.py").write_text(code)
    IMPORTS.append(ModelImports())
    return load_formatters(configured(MODEL, formatters=directory / "model.py", **settings), IMPORTS[-1])


def name(function: Any) -> str:
    return str(function.__name__)


def test_decorated_functions_are_found(tmp_path: Path) -> None:
    formatters = found(tmp_path, INPUT + OUTPUT)
    assert (name(formatters.input), name(formatters.output)) == ("read", "write")
    assert not formatters.output_takes_tokens


def test_of_several_the_first_by_name_counts(tmp_path: Path) -> None:
    assert name(found(tmp_path, OUTPUT + OUTPUT.replace("def write", "def answer")).output) == "answer"


def test_a_formatter_without_the_newer_annotation_takes_tokens(tmp_path: Path) -> None:
    older = OUTPUT.replace("output: RequestOutput", "token, first, last, details, text, id")
    assert found(tmp_path, older).output_takes_tokens


@pytest.mark.parametrize("annotation", ["'RequestOutput'", "'request_io.TextGenerationOutput'"])
def test_annotations_may_be_text(tmp_path: Path, annotation: str) -> None:
    code = OUTPUT.replace("output: RequestOutput", f"output: {annotation}")
    assert not found(tmp_path, code).output_takes_tokens


def test_a_file_without_formatters_changes_nothing(tmp_path: Path) -> None:
    formatters = found(tmp_path, "x = 1")
    assert formatters.input is formatters.output is None


def test_modules_beside_model_py_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_model_py.py").write_text(OUTPUT)
    assert name(found(tmp_path, "from beside_model_py import write").output) == "write"


@pytest.mark.parametrize(
    "code", ["from handlers.rules import PREFIX", "import handlers", "def f():\n    import handlers.rules"]
)
def test_a_folder_with_the_name_of_a_package_of_the_server_stops_the_start_if_it_is_imported(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "handlers").mkdir()
    (tmp_path / "handlers" / "rules.py").write_text("PREFIX = 'p'\n")
    with pytest.raises(EngineStartError, match=re.escape(str(tmp_path / "handlers"))):
        found(tmp_path, f"{code}\n{OUTPUT}")


def test_a_folder_with_such_a_name_is_allowed_beside_code_that_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    assert name(found(tmp_path, OUTPUT).output) == "write"


def test_an_output_formatter_may_be_named_instead_of_decorated(tmp_path: Path) -> None:
    code = OUTPUT + "\ndef mine(output: RequestOutput):\n    return 'y'\n"
    assert name(found(tmp_path, code, formatter_function="mine").output) == "mine"


def test_a_built_in_format_in_the_settings_goes_before_a_decorated_function(tmp_path: Path) -> None:
    assert found(tmp_path, OUTPUT, output_formatter="json").output is None


def test_a_function_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"option\.output_formatter .*mine"):
        found(tmp_path, OUTPUT, formatter_function="mine")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def broken(:\n", r"SyntaxError: .*\(model\.py, line 1\)"),
        ("\nimport no_such_module\n", r"ModuleNotFoundError: .*no_such_module.*\(model\.py, line 2\)"),
        ("\n\nraise SystemExit(3)\n", r"SystemExit: 3 \(model\.py, line 3\)"),
    ],
)
def test_code_that_cannot_be_imported_stops_the_start_with_file_and_line(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        found(tmp_path, code)


SIGNATURES = """
from __future__ import annotations
from djl_python import Input
from djl_python.request_io import RequestInput, RequestOutput, TextGenerationOutput, TextInput

class MyInput(TextInput):
    pass

def f{}:
    pass
"""
BOTH, ASYNCHRONOUS, ROLLING, NEITHER = {True, False}, {True}, {False}, set[bool]()


def modes_of(signature: str, kind: str) -> set[bool]:
    """Return the values of `async_mode` that accept a formatter with this signature."""
    modes = set()
    for code in (SIGNATURES, SIGNATURES.replace("from __future__ import annotations", "")):
        module: dict[str, Any] = {}
        exec(code.format(signature), module)
        formatters = replace(NONE, **{kind: module["f"]})
        modes.add(frozenset(mode for mode in BOTH if not signature_fault(formatters, async_mode=mode)))
    (found,) = modes  # Both forms of annotations give the same modes.
    return set(found)


@pytest.mark.parametrize(
    ("signature", "modes"),
    [
        ("(decoded_payload: dict, tokenizer=None, **kwargs) -> dict", ASYNCHRONOUS),
        ("(payload: 'Dict[str, Any]') -> 'Optional[dict]'", ASYNCHRONOUS),
        ("(decoded_payload, tokenizer=None)", BOTH),
        ("(payload)", BOTH),
        ("(*given)", BOTH),
        ("(given, *, tokenizer, **kwargs)", BOTH),
        ("(given, tokenizer, rolling_batch)", ROLLING),
        ("(input_item: Input, **kwargs) -> RequestInput", ROLLING),
        ("(given, **kwargs) -> MyInput", ROLLING),
        ("(**kwargs)", NEITHER),
        ("()", NEITHER),
    ],
)
def test_an_input_formatter_must_fit_the_mode_as_far_as_its_signature_tells(signature: str, modes: set[bool]) -> None:
    assert modes_of(signature, "input") == modes


@pytest.mark.parametrize(
    ("signature", "modes"),
    [
        ("(response_data: dict) -> dict", ASYNCHRONOUS),
        ("(response)", BOTH),
        ("(output, **kwargs)", BOTH),
        ("(response) -> str", BOTH),
        ("(request_output: RequestOutput) -> str", ROLLING),
        ("(output: 'request_io.TextGenerationOutput')", ROLLING),
        ("(token, first_token, last_token, details, generated_text, id)", ROLLING),
    ],
)
def test_an_output_formatter_must_fit_the_mode_as_far_as_its_signature_tells(signature: str, modes: set[bool]) -> None:
    assert modes_of(signature, "output") == modes


@pytest.mark.parametrize("async_mode", [True, False])
def test_a_coroutine_function_is_no_formatter(tmp_path: Path, async_mode: bool) -> None:
    with pytest.raises(EngineStartError, match="coroutine"):
        found(tmp_path, INPUT.replace("def read", "async def read"), async_mode=async_mode)


def test_a_formatter_of_the_other_mode_stops_the_start_and_shows_the_signature_that_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError) as of_output:
        found(tmp_path, OUTPUT, async_mode=True)
    assert str(of_output.value) == (
        "model.py: write(output: djl_python.request_io.RequestOutput) -> str is written for option.async_mode=false; "
        "with option.async_mode=true the output formatter has the signature f(response) -> dict | str | object"
    )
    with pytest.raises(EngineStartError) as of_input:
        found(tmp_path, INPUT.replace("given,", "given: dict,"))
    assert str(of_input.value) == (
        "model.py: read(given: dict, **keywords) is written for option.async_mode=true; "
        "with option.async_mode=false the input formatter has the signature "
        "f(input_item: Input, **kwargs) -> RequestInput"
    )


@pytest.mark.slow
async def test_packages_that_formatters_need_are_installed_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make_wheel(tmp_path / "model" / "requirements", "installed")
    (tmp_path / "model" / "requirements.txt").write_text("tiny-package\n")
    config = replace(
        MODEL,
        model_dir=tmp_path / "model",
        formatters=tmp_path / "model" / "model.py",
        packages=PackageConfig(offline=True),
    )
    IMPORTS.append(ModelImports())
    await add_packages(config, IMPORTS[-1])
    source = "from tiny_package import ANSWER\nassert ANSWER == 'installed'\n" + OUTPUT
    assert name(found(tmp_path / "model", source).output) == "write"
    assert sys.path[0] == str(tmp_path / "model")
    assert str(tmp_path / "home") in sys.path[-1], "packages of a model must not go before ours"


def answer(formatters: Formatters) -> str:
    assert formatters.output is not None
    return str(formatters.output(None))


def model_with_module(directory: Path, answer: str) -> Path:
    """Create a model directory with a module `beside`. All models have a module of this name."""
    directory.mkdir()
    (directory / "beside.py").write_text(f"ANSWER = '{answer}'\n")
    return directory


CODE = "from beside import ANSWER\n" + OUTPUT.replace('"x"', "ANSWER")


def test_a_model_that_is_unloaded_is_imported_from_no_more(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    found(model_with_module(tmp_path / "a", "a"), CODE)
    assert sys.path == [str(tmp_path / "a"), *path]
    IMPORTS[-1].remove()
    IMPORTS[-1].remove()
    assert sys.path == path
    assert not {name for name in set(sys.modules) - modules if name == "beside" or name.startswith("ns_")}


def test_a_model_that_is_changed_and_loaded_again_gets_its_new_modules(tmp_path: Path) -> None:
    directory = model_with_module(tmp_path / "a", "a")
    assert answer(found(directory, CODE)) == "a"
    IMPORTS[-1].remove()
    (directory / "beside.py").write_text("ANSWER = 'changed'\n")
    assert answer(found(directory, CODE)) == "changed"


def test_each_of_two_models_gets_its_own_module_of_one_name(tmp_path: Path) -> None:
    first = found(model_with_module(tmp_path / "a", "a"), CODE, name="a")
    second = found(model_with_module(tmp_path / "b", "b"), CODE, name="b")
    assert (answer(first), answer(second)) == ("a", "b")
    IMPORTS[0].remove()
    assert str(tmp_path / "a") not in sys.path
    assert (str(tmp_path / "b") in sys.path, answer(second)) == (True, "b")


def test_a_directory_of_two_models_stays_until_both_are_unloaded(tmp_path: Path) -> None:
    directory = model_with_module(tmp_path / "a", "a")
    found(directory, CODE, name="one")
    second = found(directory, CODE, name="two")
    IMPORTS[0].remove()
    assert str(directory) in sys.path
    assert "beside" in sys.modules
    assert answer(second) == "a"
    IMPORTS[1].remove()
    assert str(directory) not in sys.path
    assert "beside" not in sys.modules


def test_packages_and_the_servers_own_modules_are_never_forgotten(tmp_path: Path) -> None:
    imports, before = ModelImports(), dict(sys.modules)
    imports.add_own(Path(__file__).parents[4])  # The server's code may be in this directory.
    imports.remove()
    assert dict(sys.modules) == before


def test_a_load_that_was_given_up_adds_nothing(tmp_path: Path) -> None:
    imports = ModelImports()
    imports.remove()
    with pytest.raises(EngineStartError):
        imports.add_own(tmp_path)


def test_a_load_that_is_given_up_while_its_directory_is_added_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding, removing = threading.Event(), threading.Event()

    def slow(module: ModuleType | None) -> None:
        adding.set()
        removing.wait(60)

    imports = ModelImports()
    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr(model_imports, "_own_directory_of", slow)
        added = threads.submit(imports.add_own, tmp_path)
        assert adding.wait(60)
        removed = threads.submit(imports.remove)
        wait_until(lambda: removed.running() or removed.done())
        removing.set()
        added.result(60)
        removed.result(60)
    assert str(tmp_path) not in sys.path


def adapter(directory: Path, code: str = "") -> Adapter:
    if code:
        (directory / "model.py").write_text(code)
    return Adapter(name="a", src="", path=directory, id=1)


async def test_a_path_of_an_adapter_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterFailed, match="File name too long"):
        await load_adapter_formatters(adapter(tmp_path / ("x" * 5000)), NONE, async_mode=False)


@pytest.mark.parametrize("code", ["", "x = 1"])
async def test_an_adapter_without_formatters_leaves_no_module(tmp_path: Path, code: str) -> None:
    assert await load_adapter_formatters(adapter(tmp_path, code), NONE, async_mode=False) is None
    assert not modules_of(tmp_path)


async def test_an_adapter_with_one_kind_of_formatter_has_the_other_of_its_model(tmp_path: Path) -> None:
    base = replace(NONE, input=print, output=print)
    own = await load_adapter_formatters(adapter(tmp_path, OUTPUT), base, async_mode=False)
    assert own is not None
    assert (own.input, name(own.output), own.thread) == (print, "write", base.thread)
    own.forget()
    assert not modules_of(tmp_path)


async def test_a_formatter_of_the_other_mode_refuses_its_adapter(tmp_path: Path) -> None:
    code = OUTPUT.replace("output: RequestOutput", "response: dict")
    with pytest.raises(AdapterFailed, match=r"write.*option\.async_mode=true"):
        await load_adapter_formatters(adapter(tmp_path, code), NONE, async_mode=False)
    assert not modules_of(tmp_path)
    assert await load_adapter_formatters(adapter(tmp_path, code), NONE, async_mode=True) is not None


async def test_a_model_py_of_an_adapter_that_takes_too_long_leaves_no_module(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path / 'go')!r})\n"
        "while not file.exists():\n"
        "    time.sleep(0.01)\n"
    )
    with pytest.raises(AdapterFailed, match=r"0\.2 s"):
        await load_adapter_formatters(
            adapter(tmp_path, code + OUTPUT), Formatters(FormatterThread(0.2)), async_mode=False
        )
    assert modules_of(tmp_path)
    (tmp_path / "go").touch()
    await until(lambda: not modules_of(tmp_path))


def modules_of(directory: Path) -> list[str]:
    files = {name: str(getattr(module, "__file__", "")) for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if file.startswith(str(directory))]
