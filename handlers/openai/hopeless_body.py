"""Bodies that no context can hold, refused before vLLM reads them.

It reads and checks a body on the event loop, and takes 15 seconds for a million messages and a minute for as many wrong
tools, while no other request gets a token.
"""

from __future__ import annotations

from handlers.contracts.openai.family import error_reply
from handlers.contracts.protocol import LONG_BODY, Reply

_CHAT = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"})
_MARKS = (b"{", b"[", b",")
"""What is between the parts of a document. Texts have them too, one to a token at most, but for a few odd ones."""
_MARKS_PER_TOKEN, _FURTHER_MARKS = 4, 10_000
_MARKS_OF_PROMPTS = 2_000_000
"""Token ids of many prompts; these cost a tenth of what messages do."""


def hopeless(body: bytes, path: str, max_model_len: int) -> Reply | None:
    """The reply to a body of more parts than could fit into the model's context; None for all others."""
    if len(body) < LONG_BODY:
        return None
    limit = _MARKS_PER_TOKEN * max_model_len + _FURTHER_MARKS
    if path not in _CHAT:
        limit = max(limit, _MARKS_OF_PROMPTS)
    if sum(map(body.count, _MARKS)) <= limit:
        return None
    return error_reply(
        f"the body has more parts than the model's context of {max_model_len} tokens can hold", "BadRequestError", 400
    )
