"""vLLM's replies in LMI's form."""

from __future__ import annotations

import json

from handlers.lmi.chat_answers import LmiChatForm
from handlers.lmi.converted_reply import LmiChatShape, ShapedReply
from tests.stand_ins.collected_reply import CollectedReply


def chunk(text: str, role: str | None = None) -> bytes:
    delta = {"content": text} | ({"role": role} if role else {})
    return b"data: %b\n\n" % json.dumps({"id": "c", "created": 1, "choices": [{"index": 0, "delta": delta}]}).encode()


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
    reply.write(chunk(" there") + b"data: [DONE]\n\n")
    reply.end(b"")
    assert writer.ended
    assert b"".join(writer.parts).count(b"\n") == 2


def test_a_stream_without_any_record_is_empty() -> None:
    reply, writer = shaped()
    reply.start(200, "text/event-stream")
    reply.end(b"data: [DONE]\n\n")
    assert (writer.status, writer.ended, b"".join(writer.parts)) == (200, True, b"")
