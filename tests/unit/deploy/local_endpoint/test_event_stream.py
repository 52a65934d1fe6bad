"""The event stream of the local endpoint: exact bytes, and botocore's own decoder."""

from __future__ import annotations

import json

from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from deploy.local_endpoint.event_stream import EventStream, event_message

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def test_the_bytes_of_a_piece() -> None:
    assert EventStream([]).piece(b"hello") == (
        b"\x00\x00\x00\x6e\x00\x00\x00\x59\x51\x97\xff\x15"
        b"\x0b:event-type\x07\x00\x0bPayloadPart"
        b"\x0d:content-type\x07\x00\x18application/octet-stream"
        b"\x0d:message-type\x07\x00\x05event"
        b"hello\x29\x73\x8a\xb4"
    )


@given(st.dictionaries(TEXTS.filter(lambda name: 0 < len(name.encode()) <= 255), TEXTS, max_size=6), st.binary())
def test_any_headers_and_payload_come_back(headers: dict[str, str], payload: bytes) -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(event_message(headers, payload))
    (event,) = buffer
    assert (event.headers, event.payload) == (headers, payload)


def test_failures_are_exceptions_to_botocore() -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(EventStream([]).failure("StreamBroken", "broken"))
    (event,) = buffer
    response = event.to_response_dict()
    assert (response["status_code"], response["headers"][":exception-type"]) == (400, "ModelStreamError")
    assert json.loads(response["body"]) == {"ErrorCode": "StreamBroken", "Message": "broken"}
