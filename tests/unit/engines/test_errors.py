"""Errors of requests."""

from __future__ import annotations

from copy import copy

import pytest

from engines.errors import InvalidParameter, NotServed, RequestError, UnknownModel


@pytest.mark.parametrize(
    "error", [NotServed("no chats"), UnknownModel("m", "no model m"), InvalidParameter("n", "must be 1")]
)
def test_a_copy_of_an_error_is_the_error_without_its_traceback(error: RequestError) -> None:
    try:
        raise error
    except RequestError as caught:
        found = copy(caught)
    assert type(found) is type(error)
    assert (found.args, vars(found)) == (error.args, vars(error))
    assert (error.__traceback__ is None, found.__traceback__) == (False, None)
