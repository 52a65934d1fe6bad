"""How far one has to read to understand a module of the container: the longest chain of its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "container").rglob("*.py")
    if path.name != "__main__.py"  # the command line by another name
}
MOST_FLOORS = 7


def imported(body: ast.Module) -> Iterator[str]:
    """The modules of the container that a module imports: at its top, in a function, or for type checkers."""
    for node in ast.walk(body):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                found = (f"{module}.{alias.name}" for alias in names)
                yield from (name if name in MODULES else module for name in found if module in MODULES)


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    body = ast.parse(MODULES[module].read_bytes())
    return (module, *max(map(longest_chain, imported(body)), key=len, default=()))


def test_no_chain_of_imports_is_long() -> None:
    longest = max(map(longest_chain, MODULES), key=len)
    assert longest[0] in ("container.cli", "container.server"), "imports are followed"
    assert len(longest) <= MOST_FLOORS, " -> ".join(longest)
