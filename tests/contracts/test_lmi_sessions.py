"""LMI's stateful sessions, byte for byte."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python.session_manager import Session, SessionManager
from handlers.contract import ContractError, Reply
from handlers.lmi.sessions import SESSION_ID, Sessions, action_of, session_of
from tests.contracts.exchange import call
from tests.stand_ins.request_headers import request_headers

UUID = "3f1c8f0e-0b0e-4f6f-9d43-0d6d3e1f2a5b"


async def test_a_new_session_has_lmis_body_and_both_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SessionManager({"sessions_path": str(tmp_path)})
    monkeypatch.setattr(manager, "create_session", lambda: Session(UUID, str(tmp_path), 1_800_000_000.9))
    assert await Sessions(manager, 503).answer(call({"requestType": "NEW_SESSION"})) == Reply(
        200,
        "application/json",
        f'{{"result": "Session {UUID} created"}}\n'.encode(),
        (
            ("X-Amzn-SageMaker-New-Session-Id", f"{UUID}; Expires=2027-01-15T08:00:00Z"),
            ("X-Amzn-SageMaker-Session-Id", f"{UUID}; Expires=2027-01-15T08:00:00Z"),
        ),
    )


async def test_a_closed_session_has_lmis_body_and_header(tmp_path: Path) -> None:
    (tmp_path / UUID).mkdir()
    closing = replace(call({"requestType": "CLOSE"}), headers=request_headers((SESSION_ID, UUID)))
    assert await Sessions(SessionManager({"sessions_path": str(tmp_path)}), 503).answer(closing) == Reply(
        200,
        "application/json",
        f'{{"result": "Session {UUID} closed"}}\n'.encode(),
        (("X-Amzn-SageMaker-Closed-Session-Id", UUID),),
    )


def refusal(work: Any, *arguments: Any) -> Reply:
    with pytest.raises(ContractError) as caught:
        work(*arguments)
    return caught.value.reply


@pytest.mark.parametrize("asked", ["NEW_SESSION", "CLOSE"])
def test_the_two_request_types_are_known(asked: str) -> None:
    assert action_of(json.dumps({"requestType": asked}).encode()) == asked


def with_session(value: str) -> Any:
    return replace(call({"inputs": "x"}), headers=request_headers(("Accept", "*/*"), (SESSION_ID, value)))


@pytest.mark.parametrize("value", ["", " ", "NEW_SESSION"])
def test_a_header_that_names_no_session_is_none(value: str) -> None:
    assert session_of(with_session(value)) == ""
    assert session_of(call({"inputs": "x"})) == ""


@given(st.text(st.characters(codec="latin-1"), max_size=300))
def test_any_header_is_an_id_or_refused_with_424(value: str) -> None:
    named = with_session(value)
    if value.strip() in ("", "NEW_SESSION") or re.fullmatch("[A-Za-z0-9-]{1,256}", value.strip()):
        assert session_of(named) in (value.strip(), "")
    else:
        reply = refusal(session_of, named)
        assert (reply.status, json.loads(reply.body)["code"]) == (424, 424)


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_any_request_type_is_an_action_or_refused_with_424(value: Any) -> None:
    body = json.dumps({"requestType": value}).encode()
    if value in ("NEW_SESSION", "CLOSE"):
        assert action_of(body) == value
    else:
        assert refusal(action_of, body).status == 424
