"""Properties that all declared settings have."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from container.settings import options, server
from container.settings.environment import SERVER_DEFAULTS_OF_MODEL_KEYS
from engines.settings.declaration import Setting

ALL_OF_SERVER = (*server.SERVED, *server.NOT_SERVED)
ALL = (*options.ALL_OF_MODEL, *ALL_OF_SERVER)
STRIPPED = [setting for setting in ALL if not setting.parser.keeps_blanks]


@given(setting=st.sampled_from(ALL), text=st.text())
def test_any_text_is_a_value_or_a_value_error(setting: Setting[Any], text: str) -> None:
    try:
        shown = setting.parser.shown(text)
    except ValueError:
        return
    assert isinstance(shown, str | int | float)


@given(setting=st.sampled_from(STRIPPED), text=st.text(), blanks=st.text(" \t", max_size=3))
def test_blanks_at_the_ends_do_not_count(setting: Setting[Any], text: str, blanks: str) -> None:
    def parsed(given_text: str) -> Any:
        try:
            return setting.parser(given_text)
        except ValueError:
            return ValueError

    assert parsed(f"{blanks}{text}{blanks}") == parsed(text)


def test_no_key_means_two_things() -> None:
    for settings in (options.ALL_OF_MODEL, ALL_OF_SERVER):
        keys = [key for setting in settings for key in setting.keys]
        assert len(keys) == len(set(keys))


def test_every_refusal_says_what_to_do_instead() -> None:
    for setting in ALL:
        assert (setting.serves is None) == (not setting.advice), setting.key


def test_what_is_ignored_is_no_setting() -> None:
    assert not options.IGNORED.keys() & options.BY_KEY.keys()
    assert not server.IGNORED.keys() & {setting.key for setting in ALL_OF_SERVER}


def test_server_defaults_name_keys_that_the_model_has() -> None:
    assert set(SERVER_DEFAULTS_OF_MODEL_KEYS) <= options.BY_KEY.keys()
