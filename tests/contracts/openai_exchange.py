"""The front end of OpenAI's contract without an engine, for tests."""

from __future__ import annotations

from handlers.openai.contract import FrontEnd

FRONT_END = FrontEnd(
    model="m",
    accepts=frozenset({"m", "tgi"}).__contains__,
    adapters=("a",),
    fingerprint="fp",
    role="assistant",
    default_sampling={},
    most_new_tokens=None,
    max_model_len=100,
    most_prompts=3,
    most_sequences=8,
    most_stop_strings=2,
    render=lambda messages: "".join(f"<{turn['role']}>{turn['content']}" for turn in messages),
)
