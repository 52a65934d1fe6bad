"""`slipway replay`: its options, how it ends, and its files."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from replay.page import MOST_LINES
from replay.report import KEPT_ANSWER
from replay.request import Reply
from replay.run import MOST_FAILURES
from tests.live.server import unreachable_server
from tests.unit.replay.stand_in import CASE, NEVER, record, replay, replay_recorded, reply, serving, write_source

ANSWER = {"generated_text": "a secret answer"}


def recorded(answer: Any = ANSWER, status: int = 200) -> dict[str, Any]:
    return {"answer": {"status": status, "body": answer}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --against and --recorded"),
        (["--recorded", "--against", "http://x"], "give one of --against and --recorded"),
        (["--recorded", "--rate", "1", "--as-recorded"], "has no meaning with --as-recorded"),
        (["--recorded", "--sample", "0"], "is 0; expected a number above 0, up to 1"),
        (["--recorded", "--path", "invocations"], "expected a path that begins with /"),
        (["--recorded", "--map", "/a"], "expected /old=/new"),
        (["--recorded", "--header", "secret"], "a header is not of the form 'Name: value'"),
        (["--recorded", "--pass-header", "a: b"], "expected the name of a header"),
        (["--recorded", "--against-header", "a: b"], "has no meaning without --against"),
        (["--against", "localhost:8080"], "expected http://host:port or the name of a SageMaker endpoint"),
        (["--against", "http://[bad"], "expected http://host:port or the name of a SageMaker endpoint"),
        (["--against", "ftp://host"], "expected http://host:port or the name of a SageMaker endpoint"),
        (["--against", "endpoint", "--header", "a: b"], "SageMaker passes no headers on"),
    ],
)
def test_wrong_options_are_refused_with_the_expected_value(tmp_path: Path, arguments: list[str], message: str) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(1)])
    run = replay(source, tmp_path / "out", "--to", "http://localhost:1", *arguments)
    assert run.code == 2
    assert message in " ".join(run.output.replace("│", " ").split())
    assert not run.directory.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [("missing.jsonl", "there is no"), ("empty", "has no file that ends with .jsonl"), ("s3://", "names no bucket")],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    place = source if source.startswith("s3") else str(tmp_path / source)
    run = replay(place, tmp_path / "out", "--to", "http://localhost:1", "--recorded")
    assert run.code == 2
    assert message in run.output


def test_a_source_without_requests_or_recorded_answers_does_not_pass(tmp_path: Path) -> None:
    with serving(reply(ANSWER)) as server:
        for name, records in (("none", []), ("unanswered", [record(1)])):
            source = write_source(tmp_path / f"{name}.jsonl", records)
            assert replay(source, tmp_path / name, "--to", server.url, "--recorded").code == 1


def test_an_explained_difference_ends_with_0_and_shows_page_and_setting(tmp_path: Path) -> None:
    old = reply([{"generated_text": "a"}])
    source = write_source(tmp_path / "a.jsonl", [record(1, path="/invocations")])
    with serving(old) as one, serving(reply({"generated_text": "a"})) as other:
        run = replay(source, tmp_path / "out", "--to", other.url, "--against", one.url)
    assert run.code == 0
    (group,) = run.report["differences"]
    assert group["explanation"]["setting"] == "option.tgi_compat=true"
    assert group["explanation"]["page"] == "docs/lmi.md#tgi-compatibility"
    for shown in (run.output, run.page):
        assert "option.tgi_compat=true" in shown
        assert "lmi.md#tgi-compatibility" in shown
    links = set(re.findall(r'href="#([^"]+)"', run.page))
    assert links == {"docs/lmi.md#tgi-compatibility"}
    assert links == set(re.findall(r'<article id="([^"]+)"', run.page))
    assert "<code>details</code> is true by default" in run.page


def test_the_page_has_both_answers_line_by_line(tmp_path: Path) -> None:
    old, new = {"generated_text": "a", "details": {"seed": 1}}, {"generated_text": "a", "details": {"seed": 1, "x": 2}}
    source = write_source(tmp_path / "a.jsonl", [record(1, **recorded(old))])
    with serving(reply(new)) as server:
        shown = replay(source, tmp_path / "out", "--to", server.url, "--recorded")
        hidden = replay(source, tmp_path / "hidden", "--to", server.url, "--recorded", "--redact")
    rows = re.findall(r"<tr( class=\"changed\")?><td><code>([^<]*)</code></td><td><code>([^<]*)</code>", shown.page)
    assert ("", "  &#34;details&#34;: {", "  &#34;details&#34;: {") in rows
    assert [pair for changed, *pair in rows if changed] == [
        ["    &#34;seed&#34;: 1", "    &#34;seed&#34;: 1,"],
        ["", "    &#34;x&#34;: 2"],
    ]
    assert "generated_text&#34;: &#34;a" not in hidden.page


def test_long_answers_are_cut_on_the_page_with_a_note(tmp_path: Path) -> None:
    details = [0, 1] * 1000
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "lines": ({"generated_text": "a", "details": details}, {"generated_text": "a", "details": [1, *details[:-1]]}),
        "characters": ({"generated_text": "a" * KEPT_ANSWER}, {"generated_text": "b" * KEPT_ANSWER}),
    }
    places = {}
    for name, (old, new) in cases.items():
        source = write_source(tmp_path / f"{name}.jsonl", [record(1, **recorded(old))])
        with serving(reply({**new, "x": 1})) as server:
            run = replay(source, tmp_path / name, "--to", server.url, "--recorded")
        table = run.page.split("<details>")[1]
        places[name] = re.findall(
            r"<tr( class=\"changed\")?><td><code>([^<]*)</code></td><td><code>([^<]*)</code>", table
        )
    assert MOST_LINES < len(places["lines"]) <= 2 * MOST_LINES + 1
    changed, *notes = places["lines"][-1]
    assert bool(changed)
    more = [int(re.findall(r"\d+", note)[0]) for note in notes]
    assert more == [2005 - MOST_LINES, 2006 - MOST_LINES]
    (row,) = places["characters"]
    assert all(cell.endswith("... (results.jsonl has more)") for cell in row[1:])
    assert max(map(len, row[1:])) < KEPT_ANSWER + 200


def test_malformed_lines_are_named_and_the_rest_is_sent(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps(record(1, **recorded())), "{secret", json.dumps(record(3, **recorded())), '{"path": 1}']
    source.write_text("\n".join(lines) + "\n")
    with serving(reply(ANSWER)) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded")
    assert run.code == 1
    assert len(server.asked) == 2
    assert "a.jsonl:2: it is not JSON" in run.output
    assert "a.jsonl:4: `path` " in run.output
    assert "secret" not in run.output
    assert run.report["malformed_lines"]["count"] == 2


def test_ctrl_c_keeps_the_report_and_resume_sends_the_rest_once(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(number, **recorded()) for number in range(30)])

    def interrupt(count: int) -> None:
        if count == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with serving(reply(ANSWER), interrupt) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--concurrency", "1")
        assert run.code == 130
        assert "ended early: Ctrl-C" in run.output
        done = run.report["requests"]
        assert 9 <= done < 30
        again = replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--resume")
        asked = server.asked
    assert again.code == 0
    assert again.report["requests"] == 30
    assert set(asked) == {str(number) for number in range(30)}
    assert len(asked) <= 31  # The interrupted request was sent twice.
    assert len(again.results) == 30


def test_resume_wants_the_same_options_and_a_new_run_no_earlier_results(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(1, **recorded())])
    with serving(reply(ANSWER)) as server:
        common = (source, tmp_path / "out", "--to", server.url, "--recorded")
        assert replay(*common).code == 0
        again = replay(*common)
        assert (again.code, "give --resume to continue its run" in again.output) == (2, True)
        other = replay(*common, "--resume", "--redact")
        assert (other.code, "redact is true, and was false" in other.output) == (2, True)
        assert replay(*common, "--resume").code == 0
        missing = replay(source, tmp_path / "new", "--to", server.url, "--recorded", "--resume")
        assert (missing.code, "cannot be read" in missing.output) == (2, True)


def test_a_run_that_was_killed_while_it_wrote_is_resumed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(1, **recorded()), record(2, **recorded())])
    with serving(reply(ANSWER)) as server:
        common = (source, tmp_path / "out", "--to", server.url, "--recorded")
        replay(*common, "--concurrency", "1")
        results = tmp_path / "out" / "results.jsonl"
        results.write_bytes(results.read_bytes()[:-20])
        assert replay(*common, "--resume").report["requests"] == 2
    assert server.asked == ["1", "2", "2"]


def test_redact_leaves_texts_out_of_every_file(tmp_path: Path) -> None:
    body = {"inputs": "a secret prompt", "parameters": {"do_sample": False}}
    source = write_source(
        tmp_path / "a.jsonl",
        [
            record(1, body=body, path="/generate?q=secret", **recorded()),
            record(2, body=body, **recorded({"error": "secret 1"}, 422)),
            record(3, body=body, **recorded({"secret": "secret"})),
        ],
    )
    answers = {"1": reply({"generated_text": "another secret"}), "2": reply({"error": "secret 2"}, 422)}
    answers["3"] = reply({"more": "secret", "generated_text": "secret"})
    with serving(answers) as server:
        shown = replay(source, tmp_path / "shown", "--to", server.url, "--recorded")
        hidden = replay(source, tmp_path / "hidden", "--to", server.url, "--recorded", "--redact")
    assert shown.code == hidden.code == 1
    assert "a secret prompt" in (shown.directory / "results.jsonl").read_text()
    for file in hidden.directory.iterdir():
        text = file.read_text().replace('"where":"secret"', "").replace('"where": "secret"', "")
        assert "secret" not in text.replace("<code>secret</code>", ""), file  # A field's name is not a user's text.


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    run = replay_recorded(tmp_path, [record(1, **recorded())], reply(ANSWER))
    assert {stat.S_IMODE(file.stat().st_mode) for file in run.directory.iterdir()} == {0o600}


def test_a_target_that_nobody_reaches_ends_the_run_early(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(number, **recorded()) for number in range(200)])
    with unreachable_server() as url:
        run = replay(source, tmp_path / "out", "--to", url, "--recorded")
    assert run.code == 1
    assert (run.report["requests"], run.report["differences"]) == (0, [])
    assert f"cannot connect to {url}" in run.report["ended"]
    assert f"slipway: cannot connect to {url}" in run.output
    with serving(reply(ANSWER)) as server:
        again = replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--resume")
        assert again.code == 2  # It has another target.


def test_an_old_server_that_nobody_reaches_ends_the_run_before_the_second_request(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(number) for number in range(200)])
    with unreachable_server() as url, serving(reply(ANSWER)) as server:
        arguments = ("--to", server.url, "--against", url, "--concurrency", "1")
        run = replay(source, tmp_path / "out", *arguments)
    assert (run.code, run.report["requests"]) == (1, 0)
    assert len(server.asked) <= 1
    assert f"cannot connect to {url}" in run.report["ended"]


def test_a_server_without_answers_in_a_row_ends_the_run_early(tmp_path: Path) -> None:
    records = [record(number, **recorded()) for number in range(200)]
    run = replay_recorded(tmp_path, records, NEVER, "--timeout", "0.1", "--concurrency", "20")
    assert run.code == 1
    assert MOST_FAILURES <= run.report["requests"] < 200
    assert "too many requests in a row had no answer" in run.output


def test_an_answer_that_takes_too_long_is_no_answer(tmp_path: Path) -> None:
    run = replay_recorded(tmp_path, [record(1, **recorded())], NEVER, "--timeout", "0.2")
    assert run.code == 1
    assert run.report["differences"][0]["example"]["new"] == "no whole answer within 0.2 s (--timeout)"


def test_headers_paths_and_bodies_reach_the_target(tmp_path: Path) -> None:
    headers = {CASE: "1", "X-Priority": "1", "Host": "no", "Accept-Encoding": "gzip", "X-Request-Id": "1"}
    source = write_source(
        tmp_path / "a.jsonl",
        [
            record(1, path="/old?a=b", headers=headers),
            record(2, body="not { JSON", headers={"Content-Type": "text/plain"}),
            {"path": "/generate", "body_base64": "AP8=", "headers": {"content-type": "application/x-npy"}},
            {"custom_id": "4", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}},
        ],
    )
    with serving(reply(ANSWER)) as old, serving(reply(ANSWER)) as new:
        arguments = ("--map", "/old=/new", "--header", "X-Both: 1", "--to-header", "Authorization: Bearer k")
        run = replay(source, tmp_path / "out", "--to", new.url, "--against", old.url, "--concurrency", "1", *arguments)
    assert run.code == 0
    assert (new.paths[0], old.paths[0]) == ("/new", "/old")
    assert new.bodies == old.bodies == [b'{"inputs": "Hi"}', b"not { JSON", b"\x00\xff", b'{"prompt": "Hi"}']
    assert new.headers[0]["authorization"] == "Bearer k"
    assert "authorization" not in old.headers[0]
    assert old.headers[0] | {"x-priority": "1", "x-both": "1"} == old.headers[0]
    assert not old.headers[0].keys() & {"accept-encoding", "x-request-id"}
    assert old.headers[0]["host"] != "no"
    assert [found["content-type"] for found in old.headers[1:]] == [
        "text/plain",
        "application/x-npy",
        "application/json",
    ]
    assert "Bearer k" not in "".join(file.read_text() for file in run.directory.iterdir())


def test_headers_that_may_be_a_credential_are_sent_only_if_they_are_named(tmp_path: Path) -> None:
    headers = {CASE: "1", "X-Api-Key": "old server's", "Cookie": "session=1"}
    source = write_source(tmp_path / "a.jsonl", [record(1, headers=headers, **recorded()) for _ in range(3)])
    with serving(reply(ANSWER)) as server:
        common = (source, "--to", server.url, "--recorded")
        run = replay(common[0], tmp_path / "out", *common[1:])
        assert run.code == 0
        assert run.report["not_sent"]["headers"] == {"cookie": 3, "x-api-key": 3}
        assert "Headers that were not sent: cookie, x-api-key." in run.output
        assert not [found for found in server.headers if found.keys() & {"cookie", "x-api-key"}]
        named = replay(common[0], tmp_path / "named", *common[1:], "--pass-header", "X-API-Key")
        assert named.report["not_sent"]["headers"] == {"cookie": 3}
        assert server.headers[-1]["x-api-key"] == "old server's"


def test_cookies_of_an_answer_are_not_sent_with_the_next_request(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", [record(number, **recorded()) for number in range(3)])
    with serving(reply(ANSWER, set_cookie="session=1; Path=/")) as server:
        assert replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--concurrency", "1").code == 0
    assert [found.get("cookie") for found in server.headers] == [None] * 3


def test_no_path_and_no_redirect_leaves_the_target(tmp_path: Path) -> None:
    with serving(reply(ANSWER)) as other, serving({"": reply(ANSWER, 302, location=f"{other.url}/x")}) as server:
        host = other.url.removeprefix("http:")
        paths = (f"{host}/x", f"/{host}/x", f"/x@{host[2:]}/x", "/\\evil/x")
        records = [record("", path=path, headers={}, **recorded(status=302)) for path in paths]
        source = write_source(tmp_path / "a.jsonl", records)
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded")
    assert (run.code, len(server.asked), other.asked) == (0, len(paths), [])


def test_requests_that_change_the_server_are_sent_only_if_that_is_asked_for(tmp_path: Path) -> None:
    records = [record(number, path=path, **recorded()) for number, path in enumerate(("/adapters", "/generate"))]
    source = write_source(tmp_path / "a.jsonl", [*records, record(2, method="DELETE", path="/x", **recorded())])
    with serving(reply(ANSWER)) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded")
        assert (run.code, server.paths) == (0, ["/generate"])
        assert run.report["not_sent"]["management_requests"] == 2
        assert "2 management requests not sent" in run.output
        replay(source, tmp_path / "all", "--to", server.url, "--recorded", "--management", "--concurrency", "1")
        assert server.paths[1:] == ["/adapters", "/generate", "/x"]


def test_limit_and_sample_choose_the_same_requests_each_time(tmp_path: Path) -> None:
    records = [record(number, **recorded()) for number in range(100)]
    source = write_source(tmp_path / "a.jsonl", records)
    sent = []
    for name, arguments in (("a", ()), ("b", ()), ("c", ("--seed", "1")), ("d", ("--limit", "5"))):
        with serving(reply(ANSWER)) as server:
            replay(source, tmp_path / name, "--to", server.url, "--recorded", "--sample", "0.3", *arguments)
            sent.append(set(server.asked))
    first, again, other, limited = sent
    assert 10 < len(first) < 50
    assert first == again != other
    assert len(limited) == 5
    assert limited < first


@pytest.mark.parametrize("pace", [("--as-recorded",), ("--rate", "4")])
def test_concurrent_requests_keep_the_recorded_intervals_or_the_rate(tmp_path: Path, pace: tuple[str, ...]) -> None:
    times = [f"2026-01-01T00:00:00.{milliseconds:03}Z" for milliseconds in range(0, 1000, 250)]
    records = [record(number, time=at, **recorded()) for number, at in enumerate(times)]
    source, sent = write_source(tmp_path / "a.jsonl", records), list[float]()
    with serving(reply(ANSWER), lambda _: sent.append(time.monotonic())) as server:
        began = time.monotonic()
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded", *pace)
    assert (run.code, len(sent)) == (0, 4)
    assert sent[-1] - began >= 0.75


def test_as_recorded_needs_times(tmp_path: Path) -> None:
    source = write_source(tmp_path / "b.jsonl", [record(1, **recorded())])
    with serving(reply(ANSWER)) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--as-recorded")
    assert run.code == 2
    assert re.search("b.jsonl:1 .*--as-recorded", run.output)


@pytest.mark.parametrize(
    "time", ["9999-12-31T23:59:59Z", 253402300799, 1e308, -1e308, 1767225600000, 1767225600 + 8 * 86400]
)
def test_a_request_that_is_due_in_weeks_is_a_malformed_line(tmp_path: Path, time: Any) -> None:
    times = [1767225600, time, 1767225600.1]
    records = [record(number, time=time, **recorded()) for number, time in enumerate(times)]
    run = replay_recorded(tmp_path, records, reply(ANSWER), "--as-recorded")
    assert (run.code, run.results.keys()) == (1, {"0", "2"})
    (line,) = run.report["malformed_lines"]["first"]
    assert line["place"] == "a.jsonl:2"


def test_a_folder_is_read_with_its_compressed_files(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "2026"
    folder.mkdir(parents=True)
    write_source(folder / "a.jsonl", [record("a", **recorded())])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(record("b", **recorded())).encode()))
    noise = os.urandom(20_000).hex()
    whole = gzip.compress("".join(json.dumps(record(number, body=noise)) + "\n" for number in range(40)).encode(), 1)
    (folder / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "d.txt").write_text("no request")
    with serving(reply(ANSWER)) as server:
        run = replay(tmp_path / "source", tmp_path / "out", "--to", server.url, "--recorded")
    assert {"a", "b"} <= set(server.asked)
    assert run.code == 1
    (line,) = run.report["malformed_lines"]["first"]
    assert line["place"] == "2026/c.jsonl.gz"
    assert line["message"].startswith("it cannot be read further: ")


def test_latencies_of_both_sides_are_in_the_report(tmp_path: Path) -> None:
    answer = {"body": ANSWER, "seconds": 2.0, "first_byte_seconds": 0.5}
    run = replay_recorded(tmp_path, [record(1, answer=answer)], reply(ANSWER))
    old, new = run.report["latency"]["old"], run.report["latency"]["new"]
    assert old["seconds"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert old["first_byte_seconds"]["p99"] == 0.5
    assert 0 < new["first_byte_seconds"]["p50"] <= new["seconds"]["p50"]


def test_the_page_is_alone_and_shows_texts_as_texts(tmp_path: Path) -> None:
    body = {"inputs": "Hi", "parameters": {"temperature": 0}}
    old = recorded({"generated_text": "<script>alert(1)</script>"})
    source = write_source(tmp_path / "a.jsonl", [record("<b>id</b>", body=body, headers={}, **old)])
    with serving(reply({"generated_text": "<img src=x>"})) as server:
        page = replay(source, tmp_path / "out", "--to", server.url, "--recorded").page
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "&lt;img src=x&gt;" in page
    assert not [word for word in ('src="', "url(", "@import") if word in page]
    assert not re.findall(r'href="[^#]', page)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    old = recorded({"error": "\x1b[31m[bold]x[/nothing]"}, 422)
    run = replay_recorded(
        tmp_path,
        [record(1, **old)],
        Reply(422, (("content-type", "application/json"),), b'{"error":"\\u001b]0;title\\u0007"}'),
    )
    assert "\x1b" not in run.output
    assert "[bold]x[/nothing]" in run.output


@pytest.mark.parametrize("name", [b"\xff", b"\x1b[31m", "\x9b31m\u202e".encode(), b"[bold]\n\x07"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_any_name_of_a_file_is_named_in_the_report_without_control_characters(
    tmp_path: Path, name: bytes, is_folder: bool
) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path / "source") + b"/" + name + b".jsonl"))
    file.parent.mkdir()
    file.write_bytes(b"{\n" + json.dumps(record("", headers={}, **recorded({"a": 1}))).encode())
    source = file.parent if is_folder else file
    with serving(reply({"b": 1})) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded", "--as-recorded")
        assert (run.code, run.report["ended"] is None) == (2, False), "the message names the file"
        lasting = replay(source, tmp_path / "lasting", "--to", server.url, "--recorded")
    assert lasting.report["malformed_lines"]["count"] == 1
    assert lasting.report["requests"] == len(lasting.results) == 1
    assert not [shown for shown in (run.output + lasting.output).replace("\n", "") if not shown.isprintable()]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (nested(900), nested(901)),
        (nested(20_000), nested(20_000).replace("1", "2")),
        (f'{{"error":{nested(950)}}}', f'{{"error":{nested(949)}}}'),
        (f'{{"score":1{"0" * 400}}}', '{"score":0.5}'),
        (f'{{"embedding":[{",".join(["1" + "0" * 400] * 20)}]}}', f'{{"embedding":{[0.5] * 20}}}'),
        ('{"score":NaN}', '{"score":0.5}'),
        ('{"score":1e999}', '{"score":0.5}'),
    ],
)
@pytest.mark.parametrize("status", [200, 422])
def test_an_answer_that_cannot_be_compared_is_one_difference_and_the_rest_is_sent(
    tmp_path: Path, old: str, new: str, status: int
) -> None:
    hostile = record(1, **recorded(old, status))
    run = replay_recorded(tmp_path, [hostile, record(2, **recorded())], {"1": reply(new, status), "2": reply(ANSWER)})
    assert (run.code, run.report["equal"], run.report["with_unexplained_differences"]) == (1, 1, 1)


def test_a_body_of_any_depth_is_sent_or_malformed(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    depths = [*range(900, 1010), 100_000]  # Pythons have different limits.
    lines = [f'{{"path":"/generate","body":{"[" * depth + "]" * depth}}}' for depth in depths]
    source.write_text("\n".join(lines))
    with serving(reply(ANSWER)) as server:
        run = replay(source, tmp_path / "out", "--to", server.url, "--recorded")
    assert 0 < run.report["malformed_lines"]["count"] < len(depths)
    assert run.report["requests"] + run.report["malformed_lines"]["count"] == len(depths)
