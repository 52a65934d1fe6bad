"""The tables of settings in docs/configuration.md are made from the declarations of the settings.

This command writes them again: `UPDATE_TABLES=1 python -m pytest tests/unit/test_setting_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from container.settings import options, server
from container.settings.environment import ALIASES, SAGEMAKER_MODEL_KEYS
from engines.settings import parsers
from engines.settings.declaration import Setting
from engines.settings.engine_config import LORA_MODULES
from handlers.custom.settings import HANDLER_SETTINGS
from tests.doc_tables import assert_written
from tests.settings import load_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def table_of(name: str) -> tuple[str, str, str]:
    """Return the text before a table of the documentation, the table's rows, and the text after it."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin := f"<!-- table {name} -->\n")
    rows, after = rest.split(end := f"<!-- end of table {name} -->\n")
    return before + begin, rows, end + after


def code(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


SHORT = {
    "true or false (also 1/0, yes/no, on/off)": "boolean",
    "text that is not empty": "text",
    LORA_MODULES.parser.allowed: "`name=path`, or JSON",
    "the value of an HTTP header, in ASCII": "ASCII",
    parsers.SECONDS.allowed: "seconds",
    parsers.SECONDS_OR_NEVER.allowed: "seconds ≥ 0",
    parsers.MILLISECONDS.allowed: "milliseconds, ≥ 0",
    "a number, or a number and an ISO-8601 duration, such as 10/PT5M": "N, or N/duration: `10/PT5M`",
}


def allowed(setting: Setting[Any]) -> str:
    """Return the allowed values, shorter than in error messages."""
    short = SHORT.get(setting.allowed, setting.allowed)
    return re.sub(r"\ban integer (?:(of at least) |from )", lambda found: "≥ " if found[1] else "", short)


def server_name(key: str) -> str:
    return f"SERVING_{key.upper()}"


def model_row(setting: Setting[Any]) -> str:
    overwriting = [name for name, key in SAGEMAKER_MODEL_KEYS if key == setting.key]
    sources = code([*setting.aliases, *setting.variables, *overwriting])
    default = code((setting.default,)) if setting.default else "-"
    return f"| `{setting.key}` | {sources or '-'} | {default} | {allowed(setting)} | {setting.doc} |"


def server_row(setting: Setting[Any]) -> str:
    sources = code([server_name(setting.key), *setting.variables])
    default = code((setting.default,)) if setting.default else "-"
    return f"| {sources} | {default} | {allowed(setting)} | {setting.doc} |"


def grouped(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return rows. Pairs with the same second text share a row, which lists their first texts."""
    groups: dict[str, list[str]] = {}
    for name, rest in rows:
        groups.setdefault(rest, []).append(name)
    return [f"| {', '.join(names_)} | {rest} |" for rest, names_ in groups.items()]


def refused_rows() -> list[str]:
    named = [
        *((code((setting.key, *setting.variables)), setting) for setting in options.NOT_SERVED),
        *((code((server_name(setting.key), *setting.variables)), setting) for setting in server.NOT_SERVED),
    ]
    return grouped((first, f"{setting.allowed} | {setting.advice}") for first, setting in named)


def alias_rows() -> list[str]:
    how = {
        "_inverted": ", with the opposite value",
        "_chat_format": ": `openai` if true",
        "_log_format": ": `json` if true",
        "_all_gpus_or_one": ": `max` if true, `1` if false",
    }
    return grouped(
        (f"`{alias.variable}`", f"`{alias.target}`{how.get(alias.convert.__name__, '')}") for alias in ALIASES
    )


TABLES = {
    "aliases": ["| variable | stands for |", "| --- | --- |", *alias_rows()],
    "model": [
        "| option | also | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
        *(model_row(setting) for setting in options.SERVED),
    ],
    "handler": [
        "| setting | also | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
        *(model_row(setting) for setting in HANDLER_SETTINGS.values()),
    ],
    "server": [
        "| variable | default | allowed | meaning |",
        "| --- | --- | --- | --- |",
        *(server_row(setting) for setting in server.SERVED),
    ],
    "refused": ["| setting | served | instead |", "| --- | --- | --- |", *refused_rows()],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_table_of_settings(name: str) -> None:
    before, _, after = table_of(name)
    assert_written(DOCUMENT, before + "\n".join(TABLES[name]) + "\n" + after)


def test_every_setting_of_a_table_has_a_meaning() -> None:
    for setting in (*options.SERVED, *HANDLER_SETTINGS.values(), *server.SERVED):
        assert setting.doc, setting.key


@pytest.mark.parametrize("code", [None, "def handle(inputs): ...\n"])
def test_the_report_has_the_order_of_the_tables(tmp_path: Path, code: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    if code is not None:
        (tmp_path / "model.py").write_text(code)
    names = [entry.name for entry in load_settings(tmp_path, {"OPTION_MAX_MODEL_LEN": "8"}).entries]
    tables = [setting.key for setting in (*server.SERVED, *options.SERVED, *HANDLER_SETTINGS.values())]
    in_tables = [key for key in tables if key in names]
    assert len(in_tables) > len(server.SERVED)
    assert [name for name in names if name in tables] == in_tables
    assert (names[0], names[-1]) == ("model_dir", "option.max_model_len")
