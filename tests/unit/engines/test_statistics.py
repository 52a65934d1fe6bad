from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.http.request_head import request_id
from engines.statistics import Distribution


def test_observations_are_counted_up_to_and_including_the_bound() -> None:
    distribution = Distribution([0.1, 1.0])
    for seconds in (0.05, 0.1, 0.5, 2.0):
        distribution.observe(seconds)
    assert distribution.cumulative() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert distribution.total == pytest.approx(2.65)


@given(st.binary(max_size=200))
def test_a_request_id_never_carries_what_could_break_a_header_or_a_log_line(header: bytes) -> None:
    identity = request_id(header)
    assert identity.isascii()
    assert identity.isprintable()
    assert " " not in identity
    assert 0 < len(identity) <= 128


def test_a_clients_own_id_is_kept_and_a_missing_one_is_made() -> None:
    assert request_id(b"my-id:1") == "my-id:1"
    assert request_id(None) != request_id(None)
