"""Debian's Chromium without a window, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.waiting import SECONDS, wait_until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "no Chromium here; apt-get install chromium"
REBOUND = "rebound.example"
"""A foreign host name that leads to this machine."""
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--hide-scrollbars"),
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
_CONTROL = 2


class Page:
    """A page of the browser. Its requests, errors and warnings are recorded."""

    def __init__(self, connection: ClientConnection, session: str, numbers: Iterator[int]) -> None:
        self._connection, self._session, self._numbers = connection, session, numbers
        self.requests: list[str] = []
        """The URLs of its requests."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, of the network and of the policy."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "sessionId": self._session, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer}"
                return dict(answer["result"])
            self._record(answer)

    def _record(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(parameters["args"])[:1000])
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.complaints.append(f"{entry['text']} ({entry.get('url')})")

    def open(self, url: str) -> None:
        """Load a page. Its records begin anew."""
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. If the value is a promise, return its result."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_until(
            lambda: self.evaluate(f"Boolean({expression})"),
            about=lambda: f"{expression}\n{self.evaluate('document.body.innerText')}",
        )

    def fill(self, selector: str, value: str) -> None:
        """Set a control's value, as its user does."""
        place = json.dumps(selector)
        self.evaluate(
            f"""(() => {{ const control = document.querySelector({place}); control.value = {json.dumps(value)};
            for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind, {{bubbles: true}})); }})()"""
        )

    def click(self, selector: str) -> None:
        """Click an element."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def middle(self, selector: str) -> dict[str, float]:
        """Scroll to an element if it is outside the window. Return the place of the element's middle."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{place}.scrollIntoViewIfNeeded()")
        found: dict[str, float] = self.evaluate(
            f"(({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))({place}.getBoundingClientRect())"
        )
        return found

    def mouse_down(self, place: dict[str, float]) -> None:
        """Move the mouse to a place and press its button, as a hand does."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        self.call("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **place)

    def mouse_up(self, place: dict[str, float]) -> None:
        """Release the mouse's button."""
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **place)

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in a control for files."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def press(self, key: str, *, control: bool = False) -> None:
        """Press a key. It goes to the focused element."""
        modifiers = _CONTROL * control
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" and not control else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def text(self, selector: str) -> str:
        """Return the exact text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Show the page in a window of this size, in CSS pixels, with a light or a dark scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A running Chromium."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)

    def new_page(self) -> Page:
        """Return an empty page."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self._connection, session, self._numbers)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=SECONDS))
            if answer.get("id") == number:
                return dict(answer["result"])


@contextlib.contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """Start a browser with a new profile in the directory."""
    assert PROGRAM is not None, MISSING
    profile = directory / "profile"
    command = [PROGRAM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = _address(profile / "DevToolsActivePort", process)
        # No pings: their answers would be queued behind events that nobody reads while a test does something else.
        with connect(address, max_size=None, open_timeout=SECONDS, ping_interval=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(SECONDS)


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address at which the browser listens. The browser writes this address into its profile."""
    wait_until(lambda: (file.exists() and "/" in file.read_text()) or process.poll() is not None)
    assert process.poll() is None, f"Chromium ended with {process.returncode}"
    port, path = file.read_text().split()
    return f"ws://127.0.0.1:{port}{path}"
