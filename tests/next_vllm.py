"""Lists the parts of vLLM that Slipway uses and that a vLLM release has moved. The release is not installed or
imported.

    python -m tests.next_vllm build/next-vllm/vllm-0.33.0-*.whl

The program reads the wheel's sources, and compares them with

- `engines.vllm.internals.NAMES`;
- every import of vLLM in this repository;
- every string that is the path of a module or class in vLLM;
- the arguments and the parsers of vLLM that Slipway knows.

The exit code is 1 if something has moved.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from engines.vllm.arguments.table import ROWS, TABLE
from engines.vllm.internals import NAMES, forms, member_name
from engines.vllm.parsers.choice import FAMILIES, REASONING, TOOLS
from engines.vllm.parsers.choice import NAMES as PARSER_NAMES

ROOT = Path(__file__).parents[1]
PRODUCT = ("engines", "handlers", "container", "benchmarks")
TESTS = ("tests",)
"""The folders whose code imports vLLM. Strings in tests are not checked, because they may name anything."""
PARSERS = (
    ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
)
"""vLLM's tables of parsers."""
_PATH = re.compile(r"vllm(\.\w+)+(:\w+)?\.?")
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The modules of a release, by name."""

    def __init__(self, files: Collection[str], read: Callable[[str], str]) -> None:
        """Take the paths of all files in the release, and a function that returns the text of a file."""
        self._files = frozenset(name for name in files if name.startswith("vllm/") and name.endswith(".py"))
        self._text = cache(read)
        self.module = cache(self._module)

    @classmethod
    def of_wheel(cls, path: Path) -> Sources:
        """Return the sources in a wheel."""
        wheel = ZipFile(path)
        return cls(wheel.namelist(), lambda name: wheel.read(name).decode())

    @classmethod
    def of_directory(cls, path: Path) -> Sources:
        """Return the sources in a directory that contains the package, such as site-packages."""
        files = [str(file.relative_to(path)) for file in path.glob("vllm/**/*.py")]
        return cls(files, lambda name: (path / name).read_text())

    def places(self, name: str) -> list[str]:
        """Return the modules that define a class, a function or a variable with this name."""
        made = re.compile(rf"^(?:class|(?:async )?def) {name}\b|^{name}\s*[:=]", re.MULTILINE)
        found = sorted(file for file in self._files if made.search(self._text(file)))
        return [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in found]

    def _module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self._files:
                return ast.parse(self._text(file))
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the object that a module defines or imports under a name, and the module that defines it."""
        tree = self.module(module)
        if tree is None:
            return None
        if self.module(f"{module}.{name}") is not None and not any(name in _targets(node) for node in tree.body):
            return module, tree
        for node in _statements(tree.body):
            if isinstance(node, _Definition) and node.name == name:
                return module, node
            if name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._source(module, node)
                        return self.find(source, alias.name) if source.startswith("vllm") else (module, node)
            if isinstance(node, ast.Import) and any(
                (alias.asname or alias.name.partition(".")[0]) == name for alias in node.names
            ):
                return module, node
        lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        if lazy and any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree)):
            return module, tree
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module if f"{module.replace('.', '/')}/__init__.py" in self._files else _parent(module)
        for _ in range(node.level - 1):
            package = _parent(package)
        return f"{package}.{node.module}" if node.module else package

    def bases(self, module: str, kind: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and the vLLM classes from which it inherits, nearest first."""
        yield module, kind
        for base in kind.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (found := self.find(module, name.id)) is not None:
                place, node = found
                if isinstance(node, ast.ClassDef):
                    yield from self.bases(place, node)

    def member(self, owner: str, name: str) -> ast.AST | None:
        """Return the definition of a name in a module or a class, or None."""
        module, _, kind = owner.partition(":")
        if not kind:
            found = self.find(module, name)
            return None if found is None else found[1]
        found = self.find(module, kind)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        for _, each in self.bases(found[0], found[1]):
            for node in _statements(each.body):
                if (isinstance(node, _Definition) and node.name == name) or name in _targets(node):
                    return node
            for node in ast.walk(each):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                    return node
        return None

    def fields(self, owner: str) -> list[str] | None:
        """Return the fields that a struct or a dataclass adds to those of its bases, in order."""
        module, _, kind = owner.partition(":")
        found = self.find(module, kind)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        nodes = [node for node in found[1].body if isinstance(node, ast.AnnAssign)]
        return [ast.unparse(node.target) for node in nodes if not ast.unparse(node.annotation).startswith("ClassVar")]

    def now(self, owner: str, member: str) -> str | None:
        """Return a member in this release, in the form of the table. None if the member is gone."""
        if member.startswith("{"):
            fields = self.fields(owner)
            return None if fields is None else f"{{{', '.join(fields)}}}"
        name = member_name(member)
        node = self.member(owner, name)
        if node is None:
            return None
        if "(" in member and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return name + signature(node.args)
        if ":" in member and isinstance(node, ast.AnnAssign):
            return ast.unparse(node)
        return name


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, including those in the branches of `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _targets(node: ast.stmt) -> set[str]:
    """Return the names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def signature(arguments: ast.arguments) -> str:
    """Return parameters in the form of the table: names, followed by "=" if there is a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    parts = [each.arg + ("=" if place >= without else "") for place, each in enumerate(positional)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(each.arg + ("" if default is None else "="))
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(parts)})"


def moved_names(sources: Sources, names: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    """Yield a line for each row of the table that is no longer true."""
    for file, owners in names.items():
        for places, members in owners.items():
            for member in members:
                # A place is a module or a class in a module. In the next release, the name may be in another place.
                found = [(sources.now(owner, member), owner) for owner in places.split(" | ")]
                now, owner = next((each for each in found if each[0] is not None), found[0])
                if now in forms(member):
                    continue
                if now is None:
                    name = owner.partition(":")[2] or member_name(member)
                    yield f"{file}: {owner} has no {member_name(member)}{_elsewhere(sources, name)}"
                elif member.startswith("{"):
                    before, after = forms(member)[1][1:-1].split(", "), now[1:-1].split(", ")
                    gone, new = (
                        [name for name in before if name not in after],
                        [name for name in after if name not in before],
                    )
                    parts = [f"no {', '.join(gone)}"] * bool(gone) + [f"the new {', '.join(new)}"] * bool(new)
                    yield f"{file}: {owner} has {' and '.join(parts) or 'its fields in another order'}"
                else:
                    yield f"{file}: {owner} has {now}, expected {member}"


def _elsewhere(sources: Sources, name: str) -> str:
    found = sources.places(name) if name else []
    return f"; {name} is in {', '.join(found)}" if 0 < len(found) < 4 else ""


def moved_imports(sources: Sources, root: Path) -> Iterator[str]:
    """Yield a line for each import, and for each path in a string, that is not in the release."""
    for folder in (*PRODUCT, *TESTS):
        for file in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and folder in TESTS:
                    continue
                for module, name in _uses(node):
                    if (sources.find(module, name) if name else sources.module(module)) is None:
                        line, whole = getattr(node, "lineno", 0), f"{module}.{name}" if name else module
                        yield f"{file.relative_to(root)}:{line}: there is no {whole}{_elsewhere(sources, name)}"


def _uses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield pairs: a vLLM module that a piece of code refers to, and a name that the code uses from this module."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        for alias in node.names:
            yield node.module or "", alias.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "vllm":
                yield alias.name, ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PATH.fullmatch(node.value):
        module, _, name = node.value.rstrip(".").replace(":", ".").rpartition(".")
        yield module, name


def moved_arguments(sources: Sources) -> Iterator[str]:
    """Yield a line for each argument of the engine or of the front end that is new or gone."""
    fields: set[str] = set()
    for kind in ("AsyncEngineArgs", "FrontendArgs"):
        for module in sources.places(kind):
            found = sources.find(module, kind)
            if found is not None and isinstance(found[1], ast.ClassDef):
                for place, base in sources.bases(module, found[1]):
                    fields.update(sources.fields(f"{place}:{base.name}") or ())
    known = {name for name, row in TABLE.items() if "of" in row}
    for name in sorted(fields - ROWS.keys()):
        yield f"engines/vllm/arguments/table.json: the argument {name} is new"
    for name in sorted(known - fields):
        yield f"engines/vllm/arguments/table.json: the argument {name} is gone"


def moved_parsers(sources: Sources) -> Iterator[str]:
    """Yield a line for each parser that is new or gone, and for each architecture that is gone from a family."""
    for (module, name), known in zip(PARSERS, (PARSER_NAMES[TOOLS], PARSER_NAMES[REASONING]), strict=True):
        found = sources.find(module, name)
        table = getattr(found[1], "value", None) if found is not None else None
        if not isinstance(table, ast.Dict):
            yield f"tests/next_vllm.py: {module} has no {name}"
            continue
        names = {str(key.value) for key in table.keys if isinstance(key, ast.Constant)}
        yield from (f"engines/vllm/parsers/choice.py: the parser {name} is new" for name in sorted(names - {*known}))
        yield from (f"engines/vllm/parsers/choice.py: the parser {name} is gone" for name in sorted({*known} - names))
    registry = sources.module("vllm.model_executor.models.registry") or ast.Module([], [])
    models = {node.value for node in ast.walk(registry) if isinstance(node, ast.Constant)}
    for architecture in sorted({name for family in FAMILIES for name in family.architectures} - models):
        yield f"engines/vllm/parsers/choice.py: the architecture {architecture} is gone"


def moved(sources: Sources) -> list[str]:
    """Return a line for each thing that has moved."""
    return [
        *moved_names(sources, NAMES),
        *moved_imports(sources, ROOT),
        *moved_arguments(sources),
        *moved_parsers(sources),
    ]


def main() -> None:
    """List the moved parts of the wheel that is given as an argument."""
    (wheel,) = sys.argv[1:]
    lines = moved(Sources.of_wheel(Path(wheel)))
    print("\n".join(lines) or "nothing has moved")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
