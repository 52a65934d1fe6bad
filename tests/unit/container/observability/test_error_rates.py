"""LMI's limits on errors, after which /ping fails for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.observability.error_rates import ErrorRate, ErrorRates, Kind, error_rate

REFUSALS = frozenset({503})


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1", ErrorRate(1, 60)),
        ("0", ErrorRate(0, 60)),
        ("1/PT5M", ErrorRate(1, 300)),
        ("10/PT1H30M", ErrorRate(10, 5400)),
        ("10/P1DT0.5S", ErrorRate(10, 86400.5)),
        ("10/pt30s", ErrorRate(10, 30)),
    ],
)
def test_a_rate_is_for_a_minute_or_for_an_iso_duration(text: str, rate: ErrorRate) -> None:
    assert error_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1/", "1/5", "1/P", "1/PT", "1/P1DT", "1/PT0S", "1/P1M", "1/PT1S2M", "1.5", "1/PT1S ", "9999999"],
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        error_rate(text)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_a_duration_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    expected = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert error_rate(f"1/P{days}DT{hours}H{minutes}M{seconds}S") == ErrorRate(1, expected)


@given(st.text(max_size=20))
def test_any_text_is_a_rate_or_refused(text: str) -> None:
    try:
        rate = error_rate(text)
    except ValueError:
        return
    assert rate.limit >= 0
    assert rate.seconds > 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def exceeded(kind: Kind, *statuses: int) -> bool:
    rates = ErrorRates({kind: "0"}, REFUSALS, Clock())
    for status in statuses:
        rates.count(status)
    return bool(rates.exceeded)


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ("wlm", {503}),
        ("server", {424, 500, 503, 507}),
        ("model", {424, 500, 507}),
        ("any", {400, 404, 424, 500, 503, 507}),
    ],
)
def test_each_kind_counts_its_statuses(kind: Kind, counted: set[int]) -> None:
    for status in (200, 207, 400, 401, 403, 404, 424, 499, 500, 503, 507):
        assert exceeded(kind, status) == (status in counted), status


def test_it_takes_more_than_the_limit_within_the_time_and_stays_so() -> None:
    clock = Clock()
    rates = ErrorRates({"any": "2/PT10S", "wlm": None}, REFUSALS, clock)
    for at in (0.0, 9.0, 18.0, 20.0):
        clock.now = at
        rates.count(500)
        assert not rates.exceeded, at
    clock.now = 27.0
    rates.count(500)
    assert rates.exceeded == "more than 2 errors in 10 s (error_rate_any)"
    clock.now = 10_000.0
    rates.count(200)
    assert rates.exceeded


def test_without_limits_nothing_is_counted() -> None:
    assert not ErrorRates({"any": None}, REFUSALS).limited
