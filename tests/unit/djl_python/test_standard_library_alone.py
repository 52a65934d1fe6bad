from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import djl_python

ROOT = Path(djl_python.__file__).parent


def isolated(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has only the standard library and this package."""
    setup = f"import sys; sys.path.append({str(ROOT.parent)!r}); "
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", setup + code], capture_output=True, text=True, timeout=60, cwd="/"
    )


def test_every_module_can_be_imported_without_any_other_package() -> None:
    names = [module.name for module in pkgutil.walk_packages([str(ROOT)], "djl_python.")]
    for name in ("properties", "hf_properties"):  # Their classes are pydantic models.
        names.remove(f"djl_python.properties_manager.{name}")
    assert {"djl_python.inputs", "djl_python.huggingface", "djl_python.rolling_batch.rolling_batch"} <= set(names)
    done = isolated("import importlib; " + "; ".join(f"importlib.import_module({name!r})" for name in names))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_handler_needs_most_works_without_any_other_package() -> None:
    code = (
        "from djl_python import Input, Output; i = Input(); i.properties['content-type'] = 'application/json'; "
        "i.content.add('data', b'{\"a\": 1}'); print(Output().add_as_json(i.get_data()).content.value_at(0).decode())"
    )
    done = isolated(code)
    assert (done.stderr, done.stdout) == ("", '{\n  "a":1\n}\n')


def test_a_missing_package_is_named() -> None:
    for content_type, package in (
        ("tensor/ndlist", "numpy"),
        ("image/png", "Pillow"),
    ):
        done = isolated(
            f"from djl_python import Input; i = Input(); i.properties['content-type'] = {content_type!r}; "
            "i.content.add('data', bytes(3) + bytes([1])); i.get_data()"
        )
        assert f"needs the package {package}" in done.stderr
