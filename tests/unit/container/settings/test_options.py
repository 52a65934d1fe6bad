from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.settings import options, server
from container.settings.environment import ALIASES, SAGEMAKER_MODEL_KEYS, SERVER_DEFAULTS_OF_MODEL_KEYS
from container.settings.options import Option
from container.settings.settings import Alias, ServerSettings
from container.settings.values import names
from engines.model_settings import ModelSettings

DOCUMENT = Path(__file__).parents[4] / "docs" / "configuration.md"
ALL_OPTIONS = (*options.MODEL_OPTIONS, *server.SERVER_OPTIONS)


@given(option=st.sampled_from(ALL_OPTIONS), text=st.text())
def test_any_text_is_a_value_or_a_value_error(option: Option, text: str) -> None:
    try:
        value = option.parser(text)
    except ValueError:
        return
    assert isinstance(value, str | int | float)


@given(option=st.sampled_from(ALL_OPTIONS), text=st.text(), blanks=st.text(" \t", max_size=3))
def test_blanks_at_the_ends_do_not_count(option: Option, text: str, blanks: str) -> None:
    def parsed(given_text: str) -> Any:
        try:
            return option.parser(given_text)
        except ValueError:
            return ValueError

    assert parsed(f"{blanks}{text}{blanks}") == parsed(text)


def test_no_key_means_two_things() -> None:
    for table in (options.MODEL_OPTIONS, server.SERVER_OPTIONS):
        keys = [key for option in table for key in (option.key, *option.aliases)]
        assert len(keys) == len(set(keys))


def defaults(settings: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(settings)}


_LISTS_AND_ID = ("model_id", "stop_sequence", "served_model_name", "allowed_media_networks")


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        *(
            (option, ModelSettings)
            for option in options.SERVED
            if option.argument is None and option.field not in _LISTS_AND_ID
        ),
        *((option, ServerSettings) for option in server.SERVED),
    ],
    ids=lambda parameter: getattr(parameter, "key", None),
)
def test_the_table_and_the_typed_settings_have_the_same_default(option: Option, settings: type) -> None:
    expected = defaults(settings)[option.field]
    value = None if option.default is None else option.parser(option.default)
    assert (names(str(value)) if isinstance(expected, tuple) else value) == expected


def test_every_field_of_the_server_settings_can_be_set() -> None:
    assert {option.field for option in server.SERVED} == defaults(ServerSettings).keys()


def test_every_refusal_says_what_to_do_instead() -> None:
    for option in ALL_OPTIONS:
        assert (option.serves is None) == (not option.advice), option.key


def test_what_is_ignored_is_no_option() -> None:
    assert not options.IGNORED.keys() & options.BY_KEY.keys()
    assert not server.IGNORED.keys() & {option.key for option in server.SERVER_OPTIONS}


def table_of(name: str) -> tuple[str, str, str]:
    """What is before a table of the documentation, its rows, and what is after it."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin := f"<!-- table {name} -->\n")
    rows, after = rest.split(end := f"<!-- end of table {name} -->\n")
    return before + begin, rows, end + after


def meaning(name: str, first: str, column: int) -> str:
    """What the documentation says of an option; it is written there alone."""
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table_of(name)[1].splitlines()]
    return next((row[column] for row in rows if row[0] == first), "?")


def code(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def server_name(key: str) -> str:
    return f"SERVING_{key.upper()}"


def model_row(option: Option) -> str:
    overwriting = [name for name, key in SAGEMAKER_MODEL_KEYS if key == option.key]
    sources = code([*option.aliases, *option.variables, *overwriting])
    default = code((option.default,)) if option.default else "none"
    table = "model" if option in options.SERVED else "handler"
    said = meaning(table, f"`{option.key}`", 4)
    return f"| `{option.key}` | {sources or '-'} | {default} | {option.allowed} | {said} |"


def server_row(option: Option) -> str:
    sources = code([server_name(option.key), *option.variables])
    default = code((option.default,)) if option.default else "none"
    return f"| {sources} | {default} | {option.allowed} | {meaning('server', sources, 3)} |"


def refused_row(option: Option, name: str) -> str:
    first = code((name, *option.variables))
    return f"| {first} | {option.allowed} | {meaning('refused', first, 2)} | {option.advice} |"


def alias_row(alias: Alias) -> str:
    how = {"_inverted": ", the other way round", "_chat_format": "`=openai`, if true"}.get(alias.convert.__name__, "")
    return f"| `{alias.variable}` | {alias.of} | `{alias.target}`{how} |"


TABLES = {
    "aliases": ["| variable | of | stands for |", "| --- | --- | --- |", *(alias_row(alias) for alias in ALIASES)],
    "model": [
        "| option | also | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
        *(model_row(option) for option in options.SERVED),
    ],
    "handler": [
        "| setting | also | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
        *(model_row(option) for option in (options.ENTRY_POINT, options.FUNCTION, *options.HANDLER_OPTIONS)),
    ],
    "server": [
        "| variable | default | allowed | meaning |",
        "| --- | --- | --- | --- |",
        *(server_row(option) for option in (*server.SERVED, server.API_KEYS_FILE, *server.FOR_MODELS)),
    ],
    "refused": [
        "| setting | served | what it is | instead |",
        "| --- | --- | --- | --- |",
        *(refused_row(option, option.key) for option in options.NOT_SERVED),
        *(refused_row(option, server_name(option.key)) for option in server.NOT_SERVED),
    ],
    "ignored": [
        "| setting | why it has no effect |",
        "| --- | --- |",
        *(f"| `{key}` | {reason} |" for key, reason in options.IGNORED.items()),
        *(f"| `{server_name(key)}` | {reason} |" for key, reason in server.IGNORED.items()),
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_table_of_options(name: str) -> None:
    """`UPDATE_DOCS=1 pytest tests/unit/container/settings/test_options.py` writes them anew, meanings aside."""
    before, table, after = table_of(name)
    expected = "\n".join(TABLES[name]) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        DOCUMENT.write_text(before + expected + after, encoding="utf-8")
        return
    assert table == expected
    assert "| ? |" not in table, "an option without a meaning"


def test_server_defaults_name_keys_that_the_model_has() -> None:
    assert set(SERVER_DEFAULTS_OF_MODEL_KEYS) <= options.BY_KEY.keys()
