"""vLLM's replies in LMI's form."""

from __future__ import annotations

import json

from handlers.lmi.chat_answers import LmiChatForm
from handlers.lmi.chat_conversion import LmiChatShape
from handlers.lmi.converted_reply import ShapedReply
from tests.stand_ins.collected_reply import CollectedReply


def event(document: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(text: str, role: str | None = None) -> bytes:
    delta = {"content": text} | ({"role": role} if role else {})
    return event({"id": "c", "created": 1, "choices": [{"index": 0, "delta": delta}]})


ERROR = event({"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}})
DONE = b"data: [DONE]\n\n"


def shaped() -> tuple[ShapedReply, CollectedReply]:
    writer = CollectedReply()
    return ShapedReply(writer, LmiChatShape(LmiChatForm())), writer


def test_a_stream_begins_with_its_first_record() -> None:
    reply, writer = shaped()
    reply.start(200, "text/event-stream", (("x-a", "b"),))
    reply.write(chunk("", "assistant"))
    assert not writer.status
    reply.write(chunk("Hi"))
    assert (writer.status, writer.content_type, writer.headers) == (200, "application/jsonlines", (("x-a", "b"),))
    reply.write(chunk(" there") + DONE)
    reply.end(b"")
    assert writer.ended
    assert b"".join(writer.parts).count(b"\n") == 2


def test_an_error_midway_ends_the_stream_in_its_own_frame() -> None:
    reply, writer = shaped()
    reply.start(200, "text/event-stream")
    reply.write(chunk("Hi"))
    reply.write(ERROR)
    reply.end(b"")
    assert writer.ended
    assert json.loads(writer.parts[1])["error"] == "too long"


def test_a_stream_without_any_record_is_empty() -> None:
    reply, writer = shaped()
    reply.start(200, "text/event-stream")
    reply.end(DONE)
    assert (writer.status, writer.ended, b"".join(writer.parts)) == (200, True, b"")
