"""The id of a request: the client's, or a new UUID."""

from __future__ import annotations

import uuid

import pytest

from container.http.request_head import request_id


def test_a_safe_id_of_the_client_is_kept() -> None:
    assert request_id(b"order-17/b") == "order-17/b"


@pytest.mark.parametrize("header", [None, b"", b"two words", b"line\nend", "caf\xe9".encode(), b"x" * 129])
def test_without_a_safe_id_each_request_gets_a_random_uuid(header: bytes | None) -> None:
    ids = [request_id(header) for _ in range(200)]
    assert len(set(ids)) == 200
    for each in ids:
        parsed = uuid.UUID(each)
        assert (str(parsed), parsed.version, parsed.variant) == (each, 4, uuid.RFC_4122)
    for place in (0, 9, 15, 20, 35):  # random digits of each part
        assert len({each[place] for each in ids}) > 8
    assert {each[19] for each in ids} == set("89ab")
