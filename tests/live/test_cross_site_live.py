"""Pages of other sites in a real Chromium: they can neither command a server on this machine nor learn from it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.live.chromium import MISSING, PROGRAM, REBOUND, Browser, Page, chromium
from tests.live.server import Server

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"
TELLING = ("/models", "/metrics", "/console/state", "/openapi.json", "/endpoints/my-endpoint/invocations")


class Blank(BaseHTTPRequestHandler):
    """Serves a page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!DOCTYPE html><title>another site</title>")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def other_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with a custom handler, the management API and a local endpoint."""
    directory = tmp_path_factory.mktemp("victim")
    shutil.copytree(HANDLERS / "echo", directory / "model")
    arguments = ("--local-endpoint", "my-endpoint")
    with Server(directory / "model", directory / "server.log", arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


def opened(browser: Browser, url: str) -> Page:
    page = browser.new_page()
    page.open(url)
    page.wait_for("document.readyState === 'complete' && document.title")
    return page


def trojan(directory: Path) -> tuple[Path, Path]:
    """Return a model's directory, and the file that the model's code writes if it runs."""
    model, proof = directory / "trojan", directory / "was-run"
    model.mkdir()
    (model / "model.py").write_text(f"open({str(proof)!r}, 'w').close()\ndef handle(inputs):\n    return None\n")
    return model, proof


def status(page: Page, method: str, url: str, mode: str = "cors") -> object:
    """Return the status that `fetch` reports, 0 if the page may not see the status, or the name of the error."""
    options = json.dumps({"method": method, "mode": mode})
    return page.evaluate(f"fetch({json.dumps(url)}, {options}).then((r) => r.status, (error) => error.name)")


@pytest.mark.parametrize("site", ["127.0.0.1", REBOUND], ids=["the same machine", "another name"])
def test_another_sites_page_runs_no_code_here(
    browser: Browser, victim: Server, other_port: int, tmp_path: Path, site: str
) -> None:
    page = opened(browser, f"http://{site}:{other_port}/")
    model, proof = trojan(tmp_path)
    for path in (f"/models?url={model}", f"/models?url={model}&synchronous=true", f"/adapters?name=x&src={model}"):
        # A simple request: the browser sends it without asking, and hides the answer.
        assert status(page, "POST", victim.url + path, "no-cors") in (0, "TypeError")
    assert [known["modelName"] for known in victim.client.get("/models").json()["models"]] == ["model"]
    assert not proof.exists()


def test_a_page_whose_name_leads_here_now_runs_and_learns_nothing(
    browser: Browser, victim: Server, tmp_path: Path
) -> None:
    url = f"http://{REBOUND}:{victim.port}"
    page = opened(browser, f"{url}/console")
    model, proof = trojan(tmp_path)
    assert {path: status(page, "GET", url + path) for path in TELLING} == dict.fromkeys(TELLING, 403)
    assert status(page, "POST", f"{url}/models?url={model}&synchronous=true") == 403
    assert not proof.exists()


def test_the_servers_own_page_may_ask_and_command(browser: Browser, victim: Server, tmp_path: Path) -> None:
    page = opened(browser, f"{victim.url}/console")
    assert {path: status(page, "GET", victim.url + path) for path in TELLING[:4]} == dict.fromkeys(TELLING[:4], 200)
    model, proof = trojan(tmp_path)
    assert status(page, "POST", f"{victim.url}/models?url={model}&model_name=own&synchronous=true") == 200
    assert proof.exists()
    assert victim.client.delete("/models/own").status_code == 200
