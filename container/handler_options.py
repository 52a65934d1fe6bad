"""Settings of a customer's handler and its worker processes (contracts/lmi.md 2.7, 2.10, 2.11 and 2.15)."""

from __future__ import annotations

import re

from container.option import Option
from container.option_parsers import BOOLEAN, SECONDS, TEXT, Parser, integer, matching

_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def assignments(text: str) -> dict[str, str]:
    """The variables of `K=V,K=V`; a comma without a name after it belongs to the value before.

    Raises:
        ValueError: it does not begin with a name and `=`.
    """
    variables: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        if found := _ASSIGNMENT.fullmatch(part):
            name, variables[found[1]] = found[1], found[2]
        elif name:
            variables[name] += f",{part}"
        else:
            raise ValueError(text)
    return variables


def _environment(text: str) -> str:
    assignments(text)
    return text


ENTRY_POINT = Option(
    key="option.entryPoint",
    parser=TEXT,
    variables=("DJL_ENTRY_POINT",),
    meaning="The handler: a `.py` file of the model directory, a module, or one of LMI's names; without it, `model.py`",
)
FUNCTION = Option(
    key="option.handler",
    parser=matching(re.compile(r"[^\W\d]\w*"), "the name of a function"),
    default="handle",
    field="function",
    meaning="The handler's function",
)

OPTIONS = (
    FUNCTION,
    Option(
        key="option.async_mode",
        parser=BOOLEAN,
        default="false",
        field="async_mode",
        meaning="The function is `async`, and calls of it run together; without a handler of the model's own: "
        "`/invocations` has the schema of LMI's asynchronous handler",
    ),
    Option(
        key="minWorkers",
        parser=integer(0, 1024),
        default="1",
        field="min_workers",
        aliases=("min_workers",),
        meaning="Worker processes that always run; `gpu.minWorkers` or `cpu.minWorkers` go before it on such a machine",
    ),
    Option(
        key="maxWorkers",
        parser=integer(0, 1024),
        default="1",
        field="max_workers",
        aliases=("max_workers",),
        meaning="Worker processes under load, at least `minWorkers`; `gpu.` and `cpu.` as above",
    ),
    Option(
        key="max_idle_time",
        parser=SECONDS,
        default="60",
        field="max_idle_time",
        meaning="Seconds after which an idle worker beyond `minWorkers` ends",
    ),
    Option(
        key="retry_threshold",
        parser=integer(0),
        default="0",
        field="retry_threshold",
        meaning="Crashes and hangs of workers after which the model still counts as healthy",
    ),
    Option(
        key="option.pythonExecutable",
        parser=TEXT,
        field="python_executable",
        aliases=("option.python_executable",),
        variables=("PYTHON_EXECUTABLE",),
        meaning="Interpreter of the workers",
    ),
    Option(
        key="option.env",
        parser=Parser(_environment, "NAME=value, further ones after a comma"),
        field="environment",
        meaning="Environment variables of the workers",
    ),
    Option(
        key="option.enable_venv",
        parser=BOOLEAN,
        default="false",
        field="enable_venv",
        meaning="An environment of the model's own for packages, even without a `requirements.txt`",
    ),
)
