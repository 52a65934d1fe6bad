"""The load report in the replies to completions and chats."""

from __future__ import annotations

import pytest

from engines.loaded_model import EngineStatus
from handlers.contract import Call, Reply
from handlers.openai.load_report import LoadReportWriter, report_format
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine

JSON = 'JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.25}}'
TEXT = "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25"


@pytest.mark.parametrize(
    ("value", "form"), [("JSON", "json"), ("json", "json"), ("Text", "text"), ("BIN", ""), ("", ""), (None, "")]
)
def test_the_report_has_vllms_two_forms(value: str | None, form: str) -> None:
    headers = {} if value is None else {b"endpoint-load-metrics-format": value.encode()}
    assert report_format(Call(body=b"", request_id="", headers=headers)) == form


@pytest.mark.parametrize(("form", "report"), [("json", JSON), ("text", TEXT)])
def test_a_reply_has_the_engines_load_if_it_succeeds(monkeypatch: pytest.MonkeyPatch, form: str, report: str) -> None:
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "status", lambda: EngineStatus(5, 3, 0.25))
    whole, refused, streamed = (CollectedReply() for _ in range(3))
    LoadReportWriter(whole, engine, form).reply(Reply(200, "", b"x", (("a", "b"),)))
    assert whole.whole == Reply(200, "", b"x", (("a", "b"), ("endpoint-load-metrics", report)))
    LoadReportWriter(refused, engine, form).reply(Reply(400, "", b"x"))
    assert refused.whole == Reply(400, "", b"x")
    writer = LoadReportWriter(streamed, engine, form)
    writer.start(200, "text/event-stream")
    writer.write(b"a")
    writer.end(b"b")
    assert (streamed.headers, streamed.parts) == ((("endpoint-load-metrics", report),), [b"a", b"b"])
