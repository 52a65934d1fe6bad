"""If a model has a parser of reasoning, a constraint holds for every answer: from its start, or after reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.constrained import ENFORCED, ROUTES, TGI, Fields, Route
from tests.live.constrained import Checked, answer, checked, disobeyed
from tests.live.partly_held import FORM, NOT_HELD, PLACE, assert_judged, verdicts
from tests.live.server import Server, serving

pytestmark = pytest.mark.slow
CHATS = ("chat", "chat, streamed", "LMI's chat", "LMI's chat, streamed")
END_OF_REASONING = 5
"""The id of the token that `_thinker` renames to `</think>`."""
CONVERSATIONS = (*CHATS, "responses", "responses, streamed", "messages")
BIASED = tuple(name for name in CONVERSATIONS if name != "messages")
"""Routes that have `logit_bias`."""
PROMPTS = ("completions", "LMI", "happy_vllm", "Triton", "generate")


def _form(name: str) -> Checked:
    """Return one form of a route. The end of reasoning does not depend on the form."""
    form = {"messages": "output_config.format", **dict.fromkeys(TGI, "grammar: regex")}.get(name, "guided_regex")
    return checked({form: ENFORCED[name][form]})


def _thinker(directory: Path, model: Path) -> Path:
    """Copy the model, and rename two tokens that it never generates to `<think>` and `</think>`.

    If a chat sets `enable_thinking` to false, the template ends the reasoning, like Qwen3's template.
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
    """Return the route with a field that turns off reasoning."""
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


@pytest.mark.parametrize("name", ["chat", "LMI's chat, streamed", "completions", "LMI", "generate"])
def test_an_answer_is_held_from_its_start_if_nobody_can_tell_where_reasoning_ends(thinking: Server, name: str) -> None:
    wrong = list(disobeyed(thinking, ROUTES[name], _form(name)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_to_a_prompt_has_no_reasoning(ending: Server, name: str) -> None:
    wrong = list(disobeyed(ending, ROUTES[name], _form(name)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_chat_without_reasoning_is_held_from_its_start(ending: Server, name: str) -> None:
    silent = _silent(ROUTES[name])
    _, text = answer(ending, silent, {})
    assert text
    assert not any(check(text) for _, check in _form(name).values()), text
    wrong = list(disobeyed(ending, silent, _form(name)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", BIASED)
def test_a_chat_is_held_from_the_end_of_its_reasoning(ending: Server, name: str) -> None:
    bias = {"logit_bias": {str(END_OF_REASONING): 100}}
    cases = {form: ({**fields, **bias}, check) for form, (fields, check) in _form(name).items()}
    wrong = list(disobeyed(ending, ROUTES[name], cases))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_whose_reasoning_never_ends_has_no_content(ending: Server, name: str) -> None:
    for fields, _ in _form(name).values():
        response, text = answer(ending, ROUTES[name], fields)
        assert (response.status_code, text) == (200, "")
        assert "reasoning" in response.text


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
