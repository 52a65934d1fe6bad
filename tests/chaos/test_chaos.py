"""A short run with each kind of chaos that needs no second server. A seed determines the order."""

from __future__ import annotations

import json
from random import Random

import pytest

from tests.chaos.__main__ import chaos
from tests.chaos.actions import Action
from tests.chaos.contracts import CONTRACTS, Answer, Contract, Malformed
from tests.chaos.watch import Truth, clock

_ACTIONS = ("fill:100", "leave:40", "read_slowly:8", "send_slowly:8", "bad_requests:20", "model:6", "freeze:1.5")


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
async def test_a_server_under_random_faults_loses_no_request_and_tells_the_truth() -> None:
    actions = [Action.read(text) for text in _ACTIONS]
    Random(1).shuffle(actions)
    # A stall time that a busy machine does not reach. At its end, a run waits for this time. The run ends once all
    # actions are done, which takes less than a minute on an idle machine.
    report = await chaos(actions, 400.0, 8, stall_timeout=20.0)
    print(report)
    assert report.violations == []
    assert report.answers > 0
    assert report.lost == 0
    assert report.answers + report.refusals <= report.requests == sum(report.by_outcome.values())


def test_the_truth_of_a_stretch_of_time_is_all_that_held_in_it() -> None:
    truth, begun = Truth(), clock()
    truth.is_now(200)
    truth.is_now(500, errors=True, after=100)
    assert truth.between(begun + 1, begun + 50).statuses == {200}
    late = truth.between(begun + 50, begun + 150)
    assert (late.statuses, late.errors) == ({200, 500}, True)
    truth.is_now(200)
    assert truth.between(begun + 50, begun + 150).statuses == {200}, "what was said of later times is forgotten"


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, "application/json", b""),
        Answer(200, "application/json", b'{"gene'),
        Answer(200, "text/event-stream", b'data: {"tok'),
        Answer(302, "application/json", b"{}"),
        Answer(500, "text/plain", b"Internal Server Error"),
        Answer(500, "application/json", b'{"error": "Traceback (most recent call last)", "code": 500}'),
        Answer(503, "application/json", b"{}"),
    ],
    ids=lambda answer: f"{answer.status} {answer.body[:9]!r}",
)
def test_what_is_neither_whole_nor_an_error_of_its_contract_is_malformed(contract: Contract, answer: Answer) -> None:
    with pytest.raises(Malformed):
        contract.judge(answer, 3)


def test_a_text_may_have_what_looks_like_the_end_of_a_line() -> None:
    contract = next(contract for contract in CONTRACTS if contract.name == "lmi jsonlines stream")
    records = [{"token": {"text": "a\u2028b\x85"}}, {"token": {"text": "c"}, "generated_text": "a\u2028b\x85c"}]
    body = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    assert contract.judge(Answer(200, "application/jsonlines", body), 2) == "complete"
