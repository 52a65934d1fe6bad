"""With a reasoning parser that cannot tell where reasoning ends, a constraint still holds every answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.constrained import FORMS, POOL, TGI, Check, Fields, answer, disobeyed, is_of_pool, tgi_forms
from tests.live.server import Server, serving
from tests.live.test_every_constraint_live import COMPLETIONS, HAPPY, ROUTES

CHATS = ("chat", "chat, streamed", "LMI's chat")
CASES: dict[str, dict[str, tuple[Fields, Check]]] = {
    **dict.fromkeys(
        (*COMPLETIONS, *CHATS, "LMI", "LMI, streamed", "LMI, several", "Triton", "Triton, streamed"), FORMS
    ),
    **{name: {**FORMS, "response_pool": ({"response_pool": POOL}, is_of_pool)} for name in HAPPY},
    **{name: tgi_forms("grammar") for name in TGI},
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]) -> Iterator[Server]:
    """A server whose model might reason; the sample model never does."""
    options = {**engine_options, "rolling_batch": "vllm", "reasoning_parser": "granite"}
    with serving(tmp_path_factory.mktemp("thinking"), **options) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_answered_in_the_form_that_is_asked_for(thinking: Server, name: str) -> None:
    response, text = answer(thinking, ROUTES[name], {})
    assert response.status_code == 200, response.text
    assert not any(check(text) for _, check in CASES[name].values()), "the model follows every form unasked"
    wrong = list(disobeyed(thinking, ROUTES[name], CASES[name]))
    assert not wrong, "\n".join(wrong)
