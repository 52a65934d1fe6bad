from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.settings import options, server, values
from container.settings.environment import ALIASES, SAGEMAKER_MODEL_KEYS, SERVER_DEFAULTS_OF_MODEL_KEYS
from container.settings.options import Option
from container.settings.settings import ServerSettings
from container.settings.values import names
from engines.model_settings import ModelSettings
from tests.doc_tables import assert_written

DOCUMENT = Path(__file__).parents[4] / "docs" / "configuration.md"
ALL_OPTIONS = (*options.MODEL_OPTIONS, *server.SERVER_OPTIONS)


@given(option=st.sampled_from(ALL_OPTIONS), text=st.text())
def test_any_text_is_a_value_or_a_value_error(option: Option, text: str) -> None:
    try:
        value = option.parser(text)
    except ValueError:
        return
    assert isinstance(value, str | int | float)


STRIPPED = [option for option in ALL_OPTIONS if not option.parser.keeps_blanks]


@given(option=st.sampled_from(STRIPPED), text=st.text(), blanks=st.text(" \t", max_size=3))
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


_LISTS_AND_ID = ("model_id", "stop_sequence", "served_model_name", "allowed_media_networks", "adapters")


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
    """Return the text before a table of the documentation, the table's rows, and the text after it."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin := f"<!-- table {name} -->\n")
    rows, after = rest.split(end := f"<!-- end of table {name} -->\n")
    return before + begin, rows, end + after


def meaning(name: str, first: str, column: int) -> str:
    """Return the documentation's text about an option. Only the documentation has this text."""
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table_of(name)[1].splitlines()]
    return next((row[column] for row in rows if row[0] == first), "?")


def code(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


SHORT = {
    "true or false (also 1/0, yes/no, on/off)": "boolean",
    "text that is not empty": "text",
    options.BY_KEY["option.lora_modules"].allowed: "`name=path`, or JSON",
    "the value of an HTTP header, in ASCII": "ASCII",
    values.SECONDS.allowed: "seconds",
    values.SECONDS_OR_NEVER.allowed: "seconds ≥ 0",
    values.MILLISECONDS.allowed: "milliseconds, ≥ 0",
    "a number, or a number and an ISO-8601 duration, such as 10/PT5M": "N, or N/duration: `10/PT5M`",
}


def allowed(option: Option) -> str:
    """Return the allowed values, shorter than in error messages."""
    short = SHORT.get(option.allowed, option.allowed)
    return re.sub(r"\ban integer (?:(of at least) |from )", lambda found: "≥ " if found[1] else "", short)


def server_name(key: str) -> str:
    return f"SERVING_{key.upper()}"


OF_ENGINES = (*options.SERVED, options.ENGINE, options.RERANKING)


def model_row(option: Option) -> str:
    overwriting = [name for name, key in SAGEMAKER_MODEL_KEYS if key == option.key]
    sources = code([*option.aliases, *option.variables, *overwriting])
    default = code((option.default,)) if option.default else "-"
    table = "model" if option in OF_ENGINES else "handler"
    said = meaning(table, f"`{option.key}`", 4)
    return f"| `{option.key}` | {sources or '-'} | {default} | {allowed(option)} | {said} |"


def server_row(option: Option) -> str:
    sources = code([server_name(option.key), *option.variables])
    default = code((option.default,)) if option.default else "-"
    return f"| {sources} | {default} | {allowed(option)} | {meaning('server', sources, 3)} |"


def grouped(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a row for each second text, with all first texts that belong to it."""
    groups: dict[str, list[str]] = {}
    for name, rest in rows:
        groups.setdefault(rest, []).append(name)
    return [f"| {', '.join(names_)} | {rest} |" for rest, names_ in groups.items()]


def refused_rows() -> list[str]:
    named = [
        *((code((option.key, *option.variables)), option) for option in options.NOT_SERVED),
        *((code((server_name(option.key), *option.variables)), option) for option in server.NOT_SERVED),
    ]
    return grouped((first, f"{option.allowed} | {option.advice}") for first, option in named)


def alias_rows() -> list[str]:
    how = {
        "_inverted": ", the other way round",
        "_chat_format": "`=openai`, if true",
        "_log_format": "`=json`, if true",
        "_all_gpus_or_one": "`=max`, if true; `=1`, if false",
    }
    return grouped(
        (f"`{alias.variable}`", f"`{alias.target}`{how.get(alias.convert.__name__, '')}") for alias in ALIASES
    )


TABLES = {
    "aliases": ["| variable | stands for |", "| --- | --- |", *alias_rows()],
    "model": [
        "| option | also | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
        *(model_row(option) for option in OF_ENGINES),
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
    "refused": ["| setting | served | instead |", "| --- | --- | --- |", *refused_rows()],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_table_of_options(name: str) -> None:
    """`UPDATE_TABLES=1 pytest tests/unit/container/settings/test_options.py` writes them anew, meanings aside."""
    before, _, after = table_of(name)
    expected = "\n".join(TABLES[name]) + "\n"
    assert_written(DOCUMENT, before + expected + after)
    assert "| ? |" not in expected, "an option without a meaning"


def test_server_defaults_name_keys_that_the_model_has() -> None:
    assert set(SERVER_DEFAULTS_OF_MODEL_KEYS) <= options.BY_KEY.keys()
