"""API keys: where a request contains a key, how keys are read, and which routes need no key."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from container.api_keys import ApiKeys, keys_in, keys_in_file
from container.app import Applications
from container.http.router import Mount, Router
from container.models.placement import GpuPlan
from container.observability.logs import PlainFormatter, access_log
from container.observability.standard_output import Writer
from container.openapi import swagger_assets
from container.settings.load import load_startup
from container.settings.report import startup_json, startup_text
from container.settings.settings import SettingsError
from tests.unit.container.one_model import client_of, served

KEY, OTHER = "sk-first", "sk,second"
KEYS = ApiKeys.of((KEY, OTHER))
BEARER = {"authorization": f"Bearer {KEY}"}
BROWSER = {"accept": "text/html", "user-agent": "Mozilla/5.0"}
PRIVATE = "http://127.0.0.1:8081"

OPEN = {
    *((method, "/ping") for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")),
    *(
        (method, path)
        for method in ("GET", "HEAD")
        for path in (
            *("/", "/health", "/liveness", "/readiness", "/v2/health/live", "/v2/health/ready"),
            *("/console", "/console/", "/console/code.js", "/console/console.css", "/console/console.js"),
            *("/console/contracts.js", "/console/differences.js", "/console/dom.js", "/console/exchange.js"),
            "/console/explain.js",
            *("/console/form.js", "/console/history.js", "/console/icon.svg", "/console/numbers.js"),
            *("/console/result.js", "/console/server.js", "/console/theme.js", "/console/tokens.js"),
        )
    ),
}
"""The methods and paths that are served without a key."""

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


async def mounted(scope: Any, receive: Any, send: Any) -> None:
    """An application of someone else, which shows the headers that it gets."""
    shown = b"\n".join(name + b": " + value for name, value in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": shown})


def applications(keys: ApiKeys | None = KEYS, **server: Any) -> Applications:
    return served(mounts=[Mount("/endpoints/", mounted, ("e",))], api_keys=keys, **server)[1]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the paths of all routes of the test's applications, and three other paths."""
    added: set[str] = {"/endpoints/e/invocations", "/nowhere", "/v2/nowhere"}
    add = Router.add

    def recorded(self: Router, path: str, *rest: Any, **named: Any) -> None:
        added.add(path)
        add(self, path, *rest, **named)

    monkeypatch.setattr(Router, "add", recorded)
    return added


def filled(path: str) -> str:
    values = {"version": "1", "id": "model", "model": "model"}
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: values.get(found[1], "a"), path)


class Unread(httpx.AsyncByteStream):
    """A body that must not be read."""

    async def __aiter__(self) -> Any:
        raise AssertionError("the body was read")
        yield b""


@pytest.mark.parametrize("listener", ["one for all", "main", "management"])
async def test_every_route_but_a_few_needs_a_key(paths: set[str], listener: str) -> None:
    settings = {} if listener == "one for all" else {"management_address": PRIVATE}
    asking, other = applications(**settings), applications(None, **settings)
    client, without = (client_of(one.management if listener == "management" else one.main) for one in (asking, other))
    assert paths
    open_routes = set()
    for path in sorted(paths):
        url = filled(path)
        assert "{" not in url
        for method in METHODS:
            where = f"{method} {path}"
            refused = await client.request(method, url, content=b"{}")
            if refused.status_code != 401:
                open_routes.add((method, path))
            else:
                assert refused.headers["www-authenticate"] == "Bearer", where
            if listener == "main":  # This listener has the same routes as "one for all".
                continue
            let_in = await client.request(method, url, content=b"{}", headers=BEARER)
            usual = await without.request(method, url, content=b"{}")
            assert let_in.status_code == usual.status_code, where
            assert let_in.headers.get("content-type") == usual.headers.get("content-type"), where
    served = {(method, path) for method, path in OPEN if listener != "management"}
    assert open_routes == served


async def test_a_refusal_reads_no_body_and_a_preflight_none_either() -> None:
    client = client_of(applications(cors_allowed_origin="*").main)
    for method, status in (("POST", 401), ("OPTIONS", 200)):
        for path in ("/invocations", "/v1/completions", "/generate", "/tokenize", "/v2/models/model/generate"):
            reply = await client.send(client.build_request(method, path, content=Unread()))
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "*")
    for path in ("/models", "/adapters", "/v1/load_lora_adapter"):  # other sites learn nothing of these routes
        assert (await client.options(path)).status_code == 401
    assert (await client_of(applications().main).options("/invocations")).status_code == 401  # without CORS


async def test_the_page_comes_without_a_key_and_its_calls_do_not() -> None:
    client = client_of(applications().main)
    assert "<title>" in (await client.get("/", headers=BROWSER)).text
    for path in ("/console/state", "/metrics", "/openapi.json", "/docs", "/%63onsole/state", "/console%2fstate"):
        assert (await client.get(path)).status_code == 401
    for path in ("/p%69ng", "/ping/", "/ping//", "/p%69ng/"):  # other ways to write /ping
        assert (await client.get(path)).status_code == 200
    for path in ("/metrics/", "/server/metrics", "/models/", "/models/model/", "/nowhere/", "/ping/x/", "/ping%2f"):
        assert (await client.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/docs", "/metrics", "/openapi.json", "/console/state"])
async def test_a_browser_without_a_key_is_told_of_the_page_that_takes_one(path: str) -> None:
    if path == "/docs" and not swagger_assets():
        pytest.skip("vLLM is not installed, which has the files of this page")
    client = client_of(applications().main)
    in_browser, elsewhere = await client.get(path, headers=BROWSER), await client.get(path)
    assert (in_browser.status_code, in_browser.headers["www-authenticate"]) == (401, "Bearer")
    assert "/console" in in_browser.json()["message"]
    assert elsewhere.json()["message"] == MESSAGE


MESSAGE = "this server asks for a key: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
FRONT_END = f'{{\n  "code": 401,\n  "type": "UnauthorizedException",\n  "message": "{MESSAGE}"\n}}\n'
ANTHROPIC = f'{{"type":"error","error":{{"type":"authentication_error","message":"{MESSAGE}"}}}}'
REFUSALS = {
    FRONT_END: "POST /invocations, POST /predictions/other, POST /models/model/invoke, GET /models, POST /adapters, "
    "GET /metrics, GET /nowhere, POST /endpoints/e/invocations",
    '{"error":"Unauthorized"}': "POST /v1/chat/completions, POST /openai/v1/completions, GET /v1/models, "
    "POST /v1/load_lora_adapter",
    ANTHROPIC: "POST /v1/messages",
    "": "POST /generate, POST /generate_stream, POST /, POST /tokenize, GET /info",
    f'{{"error":"{MESSAGE}"}}': "POST /v2/models/model/generate, POST /v2/models/model/generate_stream",
    f'{{"detail":"{MESSAGE}"}}': "POST /v1/generate, POST /v1/generate_stream",
}


@pytest.mark.parametrize(("call", "body"), [(call, body) for body in REFUSALS for call in REFUSALS[body].split(", ")])
async def test_each_contract_refuses_in_its_own_form(call: str, body: str) -> None:
    method, path = call.split()
    reply = await client_of(applications().main).request(method, path, content=b'{"inputs": "a", "stream": true}')
    content_type = "application/json" if body else None
    assert (reply.status_code, reply.headers.get("content-type"), reply.text) == (401, content_type, body)


@pytest.fixture
def access_lines() -> Iterator[Callable[[], str]]:
    """Return the access lines that were logged so far."""
    writer = Mock(spec=Writer)
    access_log.write_to(writer, PlainFormatter())
    yield lambda: "\n".join(
        make(*arguments) for _, make, *arguments in (call.args for call in writer.add.call_args_list)
    )
    access_log.write_to(None, PlainFormatter())


async def test_a_refusal_is_counted_and_logged_without_the_key(
    caplog: pytest.LogCaptureFixture, access_lines: Callable[[], str]
) -> None:
    client = client_of(applications().main)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            await client.post("/v1/completions", headers={"authorization": "Bearer sk-wrong"})
        await client.post("/v1/completions", headers=BEARER)
    counted = (await client.get("/metrics", headers=BEARER)).text
    assert access_lines().count("POST /v1/completions 401 ") == 3
    assert "sk-" not in access_lines() + caplog.text
    assert 'slipway_requests_total{route="/v1/completions",status="401"} 3' in counted


async def test_no_application_gets_the_key() -> None:
    client = client_of(applications().main)
    headers = {"authorization": "Bearer theirs", "x-api-key": KEY, "x-mine": "1"}
    shown = (await client.get("/endpoints/e", headers=headers)).text
    assert KEY not in shown
    assert "authorization: Bearer theirs" in shown
    assert "x-mine: 1" in shown


async def test_what_is_put_before_the_routes_is_reached_with_a_key_alone() -> None:
    asking = applications()
    client = client_of(asking.guarded(mounted))
    for method, path in (("GET", "/metrics"), ("POST", "/adapters"), ("POST", "/models"), ("POST", "/generate")):
        assert (await client.request(method, path)).status_code == 401
        assert "host: server" in (await client.request(method, path, headers=BEARER)).text
    assert "host: server" in (await client.get("/ping")).text
    assert (await client_of(asking.router).get("/metrics")).status_code == 200  # the process itself calls this router
    other = applications(None)
    assert (other.main, other.guarded(mounted)) == (other.router, mounted)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        (b"authorization", b"Bearer sk-first", True),
        (b"authorization", b"bearer  sk-first ", True),
        (b"authorization", b"BEARER sk,second", True),
        (b"x-api-key", b"sk-first", True),
        (b"authorization", b"sk-first", False),
        (b"authorization", b"Basic sk-first", False),
        (b"authorization", b"Bearer", False),
        (b"authorization", b"Bearer SK-FIRST", False),
        (b"authorization", b"Bearer sk-firs", False),
        (b"authorization", b"Bearer sk-first,sk,second", False),
        (b"x-api-key", b"", False),
        (b"x-api-key", b"Bearer sk-first", False),
        (b"x-api-key", b"\xff", False),
        (b"x-amz-security-token", b"sk-first", False),
    ],
)
def test_a_header_holds_a_key_or_does_not(name: bytes, value: bytes, taken: bool) -> None:
    other = (b"host", b"h")
    found = KEYS.taken_from([other, (name, value)])
    assert (found[0] if found is not None else None) == ([other] if taken else None)
    assert KEYS.taken_from([(name, value), (b"x-api-key", KEY.encode())]) is not None, "one header is enough"


def test_each_key_has_a_salt_that_does_not_show_the_key() -> None:
    ways = [(b"x-api-key", b"sk-first"), (b"authorization", b"Bearer sk-first"), (b"x-api-key", OTHER.encode())]
    salts = [found[1] for way in ways if (found := KEYS.taken_from([way])) is not None]
    assert salts[0] == salts[1] != salts[2]
    assert "sk-first" not in salts[0]
    assert salts[0] not in {digest.hex() for digest in KEYS.digests}


@pytest.mark.parametrize(
    ("text", "keys"),
    [("a", ("a",)), (" a , b ,", ("a", "b")), ('["a,b", "c"]', ("a,b", "c")), ('"a"', ("a",))],
)
def test_keys_are_given_with_commas_between_or_as_an_array(text: str, keys: tuple[str, ...]) -> None:
    assert keys_in(text) == keys


@pytest.mark.parametrize("text", ["", ",", '""', "[]", "[1]", "[", "pässword", "a b", "a b,c", '["a b"]', '["a\\n"]'])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        keys_in(text)


def test_a_file_has_a_key_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of team a\nsk-a\n\n  sk,b  \r\n")
    assert keys_in_file(str(file)) == ("sk-a", "sk,b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "it cannot be read: No such file or directory"),
        (b"", "it has no key"),
        (b"# none yet\n\n", "it has no key"),
        (b"a\nb c\n", "line 2 is no key; expected visible ASCII characters without blanks"),
        (b"\xff\n", "it is not UTF-8 text"),
    ],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        keys_in_file(str(file))


def test_keys_of_the_command_line_count(tmp_path: Path) -> None:
    given = {"api_keys": '["sk-first", "sk,second"]'}
    environ = {"SAGEMAKER_MULTI_MODEL": "true"}
    startup = load_startup(None, environ, given)
    assert startup.server_config.api_keys == KEYS
    assert "sk-first" not in startup_text(startup, GpuPlan(())) + startup_json(startup, GpuPlan(()))
    with pytest.raises(SettingsError, match=r"--api-key .*VLLM_API_KEY"):
        load_startup(None, {**environ, "VLLM_API_KEY": "k"}, given)
