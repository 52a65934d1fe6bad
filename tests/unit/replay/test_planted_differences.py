"""Each planted difference between two answers is found, and no other difference is reported.

Each kind of difference occurs.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from replay.comparison import Kind
from replay.request import Reply
from tests.unit.replay.stand_in import CASE, Run, replay, reply, serving, write_source


@dataclass(frozen=True)
class Planted:
    """A request, two answers, and the differences that have to be found. No others may be found."""

    name: str
    old: Reply
    new: Reply
    found: tuple[tuple[Kind, str], ...]
    path: str
    body: Any


TOKENS: list[dict[str, Any]] = [
    {"id": number, "text": f" w{number}", "logprob": -0.5, "special": False} for number in range(1, 6)
]
TEXT = "".join(token["text"] for token in TOKENS)
WHOLE: dict[str, Any] = {
    "generated_text": TEXT,
    "details": {"finish_reason": "length", "generated_tokens": 5, "seed": None, "prefill": [], "tokens": TOKENS},
}
GREEDY: dict[str, Any] = {"inputs": "Hi", "parameters": {"do_sample": False, "details": True}}
SAMPLED: dict[str, Any] = {"inputs": "Hi", "parameters": {"do_sample": True, "details": True}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CHAT_ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "system_fingerprint": "vllm-1",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
}
EVENTS = "text/event-stream"
ERROR: dict[str, Any] = {"error": "Input validation error: wrong", "error_type": "validation"}


def changed(value: Any, path: str, new: Any = None, *, remove: bool = False) -> Any:
    """Return a copy of a JSON value with another value at a path."""
    made = copy.deepcopy(value)
    target = made
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        target = target[part]
    if remove:
        del target[last]
    else:
        target[last] = new
    return made


def tgi_records(tokens: list[dict[str, Any]] = TOKENS) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [
        {"index": number, "token": token, "generated_text": None, "details": None}
        for number, token in enumerate(tokens, 1)
    ]
    details = {"finish_reason": "length", "generated_tokens": len(tokens), "seed": None, "input_length": 2}
    records[-1] |= {"generated_text": "".join(token["text"] for token in tokens), "details": details}
    return records


def events(records: list[Any], prefix: str = "data:", end: str = "\n\n", last: str = "") -> str:
    return "".join(f"{prefix}{json.dumps(record)}{end}" for record in records) + last


def stream(records: list[Any], **form: str) -> Reply:
    return reply(events(records, **form), content_type=EVENTS)


def planted(
    name: str, old: Reply, new: Reply, *found: tuple[Kind, str], path: str = "/generate", body: Any = GREEDY
) -> Planted:
    return Planted(name, old, new, found, path, body)


def of_chats(name: str, new: Any, *found: tuple[Kind, str]) -> Planted:
    return planted(name, reply(CHAT_ANSWER), reply(new), *found, path="/v1/chat/completions", body=CHAT)


def whole(name: str, kind: Kind, where: str, new: Any) -> Planted:
    return planted(name, reply(WHOLE), reply(new), (kind, where))


STREAM = stream(tgi_records())
_WITHOUT_SPECIAL = [
    changed(record, "token.special", remove=True) if 0 < number < 4 else record
    for number, record in enumerate(tgi_records())
]
_REORDERED: dict[str, Any] = {"details": WHOLE["details"], "generated_text": TEXT}
_VECTOR = [0.1] * 20
_OTHER_WORD = changed(changed(WHOLE, "generated_text", " w1 w2 other"), "details.generated_tokens", 4)
_DONE = "data: [DONE]\n\n"

PLANTED = (
    planted("status", reply(WHOLE), reply(ERROR, 422), (Kind.STATUS, "")),
    planted("status-of-errors", reply(ERROR, 422), reply(ERROR, 400), (Kind.STATUS, "")),
    planted("content-type", reply(WHOLE), reply(WHOLE, content_type="text/plain"), (Kind.CONTENT_TYPE, "")),
    planted(
        "charset",
        STREAM,
        replace(STREAM, headers=(("content-type", f"{EVENTS}; charset=utf-8"),)),
        (Kind.CONTENT_TYPE, "parameters"),
    ),
    planted("array", reply(WHOLE), reply([WHOLE]), (Kind.FRAMING, "")),
    planted(
        "lines-for-events",
        STREAM,
        reply("".join(json.dumps(record) + "\n" for record in tgi_records()), content_type="application/jsonlines"),
        (Kind.CONTENT_TYPE, ""),
        (Kind.FRAMING, ""),
    ),
    planted(
        "broken-record",
        STREAM,
        reply(events(tgi_records()) + "data:{broken\n\n", content_type=EVENTS),
        (Kind.FRAMING, "records"),
        body=SAMPLED,
    ),
    planted("done", stream(tgi_records(), last=_DONE), STREAM, (Kind.EVENTS, "[DONE]")),
    planted("space", STREAM, stream(tgi_records(), prefix="data: "), (Kind.EVENTS, "space after data:")),
    planted("event-name", stream(tgi_records(), prefix="event:token\ndata:"), STREAM, (Kind.EVENTS, "event")),
    planted("comment", STREAM, stream(tgi_records(), last=": the end\n\n"), (Kind.EVENTS, "comment")),
    planted("line-end", STREAM, stream(tgi_records(), end="\r\n\r\n"), (Kind.EVENTS, "line end")),
    whole("missing", Kind.MISSING, "details.generated_tokens", changed(WHOLE, "details.generated_tokens", remove=True)),
    whole("empty-or-absent", Kind.NULL, "details.prefill", changed(WHOLE, "details.prefill", remove=True)),
    whole("extra", Kind.EXTRA, "details.more", changed(WHOLE, "details.more", 1)),
    whole("type", Kind.TYPE, "details.generated_tokens", changed(WHOLE, "details.generated_tokens", "5")),
    whole("null-or-absent", Kind.NULL, "details.seed", changed(WHOLE, "details.seed", remove=True)),
    whole("order", Kind.ORDER, "", _REORDERED),
    whole(
        "finish-reason", Kind.FINISH_REASON, "details.finish_reason", changed(WHOLE, "details.finish_reason", "stop")
    ),
    planted(
        "vocabulary-of-reasons",
        reply(changed(WHOLE, "details.finish_reason", "eos_token")),
        reply(changed(_OTHER_WORD, "details.finish_reason", "stop")),
        (Kind.FINISH_REASON, "details.finish_reason"),
        body=SAMPLED,
    ),
    whole("tokens", Kind.TOKENS, "details.generated_tokens", changed(WHOLE, "details.generated_tokens", 6)),
    of_chats("prompt-tokens", changed(CHAT_ANSWER, "usage.prompt_tokens", 10), (Kind.TOKENS, "usage.prompt_tokens")),
    planted("error-body", reply(ERROR, 422), reply({"error": ERROR["error"]}, 422), (Kind.ERROR_BODY, "error_type")),
    planted(
        "error-message", reply(ERROR, 422), reply(changed(ERROR, "error", "no"), 422), (Kind.ERROR_MESSAGE, "error")
    ),
    planted("error-in-a-stream", STREAM, stream([*tgi_records()[:3], ERROR]), (Kind.ERROR_BODY, "")),
    whole("text", Kind.TEXT, "generated_text", _OTHER_WORD),
    planted(
        "empty-text", reply({"generated_text": TEXT}), reply({"generated_text": ""}), (Kind.TEXT, "from the start")
    ),
    planted(
        "another-text",
        reply({"generated_text": " Paris"}),
        reply({"generated_text": " London"}),
        (Kind.TEXT, "generated_text from the start"),
    ),
    planted(
        "records",
        STREAM,
        stream([*tgi_records()[:2], {"index": 0}, *tgi_records()[2:]]),
        (Kind.RECORDS, ""),
        (Kind.MISSING, "middle.token"),
        (Kind.NULL, "middle.generated_text"),
        (Kind.NULL, "middle.details"),
        body=SAMPLED,
    ),
    planted("middle-of-a-stream", STREAM, stream(_WITHOUT_SPECIAL), (Kind.MISSING, "middle.token.special")),
    planted(
        "last-record",
        STREAM,
        stream([*tgi_records()[:-1], changed(tgi_records()[-1], "details.input_length", 3)]),
        (Kind.TOKENS, "last.details.input_length"),
    ),
    whole(
        "log-probabilities",
        Kind.PROBABILITIES,
        "details.tokens[].logprob",
        changed(WHOLE, "details.tokens", [{**token, "logprob": None} for token in TOKENS]),
    ),
    planted(
        "header",
        reply(WHOLE, x_generated_tokens="5", x_compute_time="0.1"),
        reply(WHOLE, x_compute_time="0.2"),
        (Kind.HEADER, "x-generated-tokens"),
    ),
    of_chats("value", changed(CHAT_ANSWER, "object", "chat"), (Kind.VALUE, "object")),
    planted(
        "vector", reply([_VECTOR]), reply([[0.1, -0.1] * 10]), (Kind.NUMBER, "[]"), path="/embed", body={"inputs": "Hi"}
    ),
    planted(
        "score",
        reply([{"index": 0, "score": 0.9}]),
        reply([{"index": 0, "score": 0.5}]),
        (Kind.NUMBER, "[].score"),
        path="/rerank",
        body={"query": "a", "texts": ["b"]},
    ),
    planted("no-answer", reply(WHOLE), Reply(200, (), b"{", complete=False), (Kind.NO_ANSWER, "")),
)

_FASTER = [{**token, "logprob": -0.4} for token in TOKENS]
_SAMPLED_TOKENS = [{**token, "id": token["id"] + 7, "text": " other"} for token in TOKENS[:3]]

# Pairs without a difference that a client could notice.
EQUAL = (
    planted("the-same", reply(WHOLE), reply(WHOLE)),
    planted("the-same-stream", STREAM, STREAM),
    of_chats("ids-and-times", CHAT_ANSWER | {"id": "chatcmpl-2", "created": 2, "system_fingerprint": "vllm-2"}),
    planted("numbers-of-log-probabilities", reply(WHOLE), reply(changed(WHOLE, "details.tokens", _FASTER))),
    planted("a-sampled-stream", STREAM, stream(tgi_records(_SAMPLED_TOKENS)), body=SAMPLED),
    planted("an-empty-sampled-text", reply({"generated_text": "a"}), reply({"generated_text": ""}), body=SAMPLED),
    planted("a-sampled-text", reply(WHOLE), reply(_OTHER_WORD), body=SAMPLED),
    planted("empty-comments", STREAM, stream(tgi_records(), last=":\n\n")),
    planted("another-header", reply(WHOLE, x_envoy_time="5"), reply(WHOLE, x_more="1")),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compare two servers: one has the old answers, and the other has answers with planted differences."""
    pairs = (*PLANTED, *EQUAL)
    directory = tmp_path_factory.mktemp("planted")
    records: list[dict[str, Any]] = [
        {"id": pair.name, "path": pair.path, "headers": {CASE: pair.name}, "body": pair.body} for pair in pairs
    ]
    source = write_source(directory / "source.jsonl", records)
    with (
        serving({pair.name: pair.old for pair in pairs}) as old,
        serving({pair.name: pair.new for pair in pairs}) as new,
    ):
        return replay(source, directory / "out", "--to", new.url, "--against", old.url)


def test_each_kind_of_difference_is_planted() -> None:
    assert {kind for pair in PLANTED for kind, _ in pair.found} == set(Kind)


@pytest.mark.parametrize("pair", [*PLANTED, *EQUAL], ids=lambda pair: pair.name)
def test_the_planted_differences_are_found_and_no_others(run: Run, pair: Planted) -> None:
    found = {(one["kind"], one["where"]) for one in run.results[pair.name].get("differences", ())}
    assert found == set(pair.found)


def test_the_report_counts_each_difference_once(run: Run) -> None:
    groups = run.report["differences"]
    assert sum(group["count"] for group in groups) == sum(len(pair.found) for pair in PLANTED)
    assert run.code == 1
    assert not run.report["passed"]
    assert run.report["equal"] == len(EQUAL)
