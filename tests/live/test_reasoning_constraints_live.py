"""If a model has a parser of reasoning, a constraint holds for every answer: from its start, or after reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.live.constrained import (
    FORMS,
    POOL,
    TGI,
    Check,
    Fields,
    Route,
    answer,
    disobeyed,
    is_of_pool,
    tgi_forms,
)
from tests.live.constraint_cases import COMPLETIONS, ENFORCED, HAPPY, ROUTES
from tests.live.partly_held import FORM, NOT_HELD, PLACE, assert_judged, verdicts
from tests.live.server import Server, serving

Cases = dict[str, dict[str, tuple[Fields, Check]]]
CHATS = ("chat", "chat, streamed", "LMI's chat")
PROMPTS: Cases = {
    **dict.fromkeys((*COMPLETIONS, "LMI", "LMI, streamed", "LMI, several", "Triton", "Triton, streamed"), FORMS),
    **{name: {**FORMS, "response_pool": ({"response_pool": POOL}, is_of_pool)} for name in HAPPY},
    **{name: tgi_forms("grammar") for name in TGI},
}
CASES: Cases = {**PROMPTS, **dict.fromkeys(CHATS, FORMS)}
SOME_FORMS = (
    *("structured_outputs: choice", "guided_regex", "response_format: json_schema", "response_format: json_object"),
    *("grammar: json", "grammar: regex", "response_format: json", "response_format: regex"),
    *("response_pool", "text.format: json_schema", "output_config.format"),
)
"""Forms of one or two kinds. The end of reasoning does not depend on the form."""
END_OF_REASONING = 5
"""The id of the token that `_thinker` makes `</think>`."""
CONVERSATIONS = (*CHATS, "LMI's chat, streamed", "responses", "responses, streamed", "messages")
BIASED = tuple(name for name in CONVERSATIONS if name != "messages")
"""Routes that have `logit_bias`."""


def _some(name: str) -> dict[str, tuple[Fields, Check]]:
    return {form: case for form, case in (PROMPTS.get(name) or ENFORCED[name]).items() if form in SOME_FORMS}


def _thinker(directory: Path, model: Path) -> Path:
    """Make a copy of the model with `<think>` and `</think>` for two tokens that it never generates.

    As with Qwen3, its template ends the reasoning of a chat that sets `enable_thinking` to false.
    """
    directory.mkdir()
    for file in model.iterdir():
        text = file.read_text() if file.suffix in (".json", ".jinja") else ""
        text = text.replace("<repo_name>", "<think>").replace("<file_sep>", "</think>")
        start = "'<|im_start|>assistant\n' }}"
        ended = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
        if text:
            (directory / file.name).write_text(text.replace(start, start + ended))
        else:
            (directory / file.name).symlink_to(file)
    return directory


def _silent(route: Route) -> Route:
    """The route, asked for an answer without reasoning."""
    return replace(
        route, body=lambda fields: {**route.body(fields), "chat_template_kwargs": {"enable_thinking": False}}
    )


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with a parser that cannot find the end of reasoning. The small model never reasons."""
    with serving(tmp_path_factory.mktemp("thinking"), **small_options, reasoning_parser="granite") as server:
        yield server


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with a parser that finds the end by a token. All text before it is reasoning."""
    directory = tmp_path_factory.mktemp("ending")
    thinker = _thinker(directory / "thinker", Path(str(small_options["model_id"])))
    with serving(directory, **{**small_options, "model_id": thinker, "reasoning_parser": "qwen3"}) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_answered_in_the_form_that_is_asked_for(thinking: Server, name: str) -> None:
    response, text = answer(thinking, ROUTES[name], {})
    assert response.status_code == 200, response.text
    assert not any(check(text) for _, check in CASES[name].values()), "the model follows every form unasked"
    wrong = list(disobeyed(thinking, ROUTES[name], CASES[name]))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_to_a_prompt_has_no_reasoning(ending: Server, name: str) -> None:
    wrong = list(disobeyed(ending, ROUTES[name], _some(name)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_chat_without_reasoning_is_held_from_its_start(ending: Server, name: str) -> None:
    silent = _silent(ROUTES[name])
    _, text = answer(ending, silent, {})
    assert text
    assert not any(check(text) for _, check in _some(name).values()), text
    wrong = list(disobeyed(ending, silent, _some(name)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_a_chat_is_held_from_the_end_of_its_reasoning(ending: Server, name: str) -> None:
    bias = {"logit_bias": {str(END_OF_REASONING): 100}}
    cases = {form: ({**fields, **bias}, check) for form, (fields, check) in _some(name).items()}
    wrong = list(disobeyed(ending, ROUTES[name], cases))
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CHATS, "LMI's chat, streamed"])
def test_a_chat_whose_reasoning_never_ends_has_no_content(ending: Server, name: str) -> None:
    for fields, _ in _some(name).values():
        response, text = answer(ending, ROUTES[name], fields)
        assert (response.status_code, text) == (200, "")
        assert "reasoning" in response.text


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"logit_bias": {str(END_OF_REASONING): 100}}, "invalid"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "invalid"),
        ({}, "incomplete"),
    ],
)
def test_the_text_after_the_reasoning_is_checked(ending: Server, fields: Fields, verdict: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40, "response_format": FORM}
    before = verdicts(ending)
    reply = ending.client.post("/v1/chat/completions", json={**body, **fields, "stream": stream})
    assert reply.headers[NOT_HELD] == PLACE
    assert_judged(ending, before, **{verdict: 1})
