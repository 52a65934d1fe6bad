"""Fuzz: wrong bodies of every contract, and requests for the routes in the API description.

    python -m tests.chaos.fuzz --minutes 5 --seed 3

The promises:

- Every request gets a status that is in the API description, in the form of its contract.
- Neither a reply nor the log contains a traceback.
- No request is left running.
- `/ping` always answers 200, even if the server has been idle for longer than its stall time.

If a promise is broken, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.chaos.__main__ import subject
from tests.chaos.actions import Stage, rest
from tests.chaos.client import Broken, Hung, ask, request_bytes
from tests.chaos.contracts import CONTRACTS, Answer, Contract, Malformed
from tests.chaos.load import Load
from tests.chaos.watch import Subject, clock

STALL_TIMEOUT = 2.0
_CLIENTS = 16
_REQUEST_SECONDS = 90.0
_REST_EVERY = 4000
"""The number of requests between two checks that the server is idle and healthy."""
_SHARE_OF_ROUTES = 0.4
"""The share of the time that is used for the routes in the API description."""
_SHOWN = 20
"""The number of different errors after which the run ends."""
_SUMMARY = 12000
"""The number of characters that are kept of schemathesis's first failures, and of the end of its output."""
_KIND = 60
"""The number of leading characters of an error's text that identify its kind."""
_HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, 1e308, -1e-320, float("nan"), float("inf"), 2**31, 2**63, -(2**64), 10**400,
    "", " ", "a", "\x00", "\ud800", "a\udfff", "\u2028", "日本", "\U0001f600", "1", "true", "null", "-1", "a" * 3000,
    "{{ 7*7 }}", "{% for x in range(9) %}", "../../etc/passwd", "http://127.0.0.1:1/", "<|end|>", "(a+)+$", "[",
    [], [[]], [None], [""], ["a", 1], [[1, 2], [3]], [0] * 300, ["\ud800"], {}, {"": ""}, {"a": {"b": [{}]}},
    {"type": "json", "value": {}}, {"type": "regex", "value": "("}, {"$ref": "#"}, {"type": "object"},
)  # fmt: skip
_CONTENT_TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
_EXCLUDED = "/unload|^/models$|^/adapters|/adapters|^/v2/repository/[^/]+/models"
"""The paths of the routes that are left out.

Some of these routes would remove models or adapters that other requests need. The others answer 501, as Triton does.
"""


def mutated(body: dict[str, Any], properties: list[str], random: Random) -> bytes:
    """Return a body with one to four mistakes. Its bytes may also be damaged."""
    document: Any = copy.deepcopy(body)
    for _ in range(random.randint(1, 4)):
        document = _changed(document, properties, random)
    data = json.dumps(document, ensure_ascii=random.random() < 0.7).encode(errors="surrogatepass")
    if random.random() < 0.15:
        data = _damaged(data, random)
    return data


def _changed(document: Any, properties: list[str], random: Random) -> Any:
    if not isinstance(document, dict) or random.random() < 0.03:
        return _hostile(random)
    keys = list(document)
    choice = random.random()
    if keys and choice < 0.1:
        del document[random.choice(keys)]
    elif keys and choice < 0.45:
        key = random.choice(keys)
        inner = document[key]
        if isinstance(inner, dict) and random.random() < 0.7:
            document[key] = _changed(inner, properties, random)
        elif isinstance(inner, list) and inner and random.random() < 0.7:
            inner[random.randrange(len(inner))] = _changed(inner[0], properties, random)
        else:
            document[key] = _hostile(random)
    else:
        document[random.choice(properties)] = _hostile(random)
    return document


def _hostile(random: Random) -> Any:
    return copy.deepcopy(random.choice(_HOSTILE))  # The caller may change the value.


def _damaged(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    match random.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + random.randbytes(random.randint(1, 4)) + data[at:]
        case 2:
            return data[:at] + b"[" * random.choice((10, 5000)) + data[at:]
        case 3:
            return data[:at] + random.choice((b"\\ud800", b"\x00", b'"', b"\\", b",", b"//")) + data[at:]
        case _:
            return data + data


def properties_of(description: dict[str, Any]) -> list[str]:
    """Return all property names in an API description."""
    found: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                found.update(node["properties"])
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(description)
    return sorted(found)


def documented(description: dict[str, Any], path: str) -> set[int]:
    """Return the statuses that an API description lists for POST to a path."""
    pattern = path.replace("/model/", "/{model}/") if path not in description["paths"] else path
    responses = description["paths"][pattern]["post"]["responses"]
    return {int(status) for status in responses if status.isdigit()}


class Fuzz:
    """Sends invalid bodies, and judges the replies."""

    def __init__(self, tested: Subject, description: dict[str, Any], seed: int) -> None:
        self.violations: list[str] = []
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._port, self._seed = tested.server.port, seed
        self._properties = properties_of(description)
        self._documented = {contract.path: documented(description, contract.path) for contract in CONTRACTS}

    async def run(self, stage: Stage, seconds: float, requests: float = math.inf) -> None:
        """Send bodies for the given time, or the given number of bodies. Pause sometimes to check that nothing runs."""
        randoms = [Random(f"{self._seed}/{number}") for number in range(_CLIENTS)]
        deadline = clock() + seconds
        while clock() < deadline and len(self.violations) < _SHOWN and self.statuses.total() < requests:
            await asyncio.gather(*(self._client(random, deadline) for random in randoms))
            await rest(stage, 0.0)

    async def _client(self, random: Random, deadline: float) -> None:
        for _ in range(_REST_EVERY // _CLIENTS):
            if clock() > deadline:
                return
            contract = random.choice(CONTRACTS)
            body = mutated(contract.body(random.randint(1, 16)), self._properties, random)
            kind = random.choice(_CONTENT_TYPES) if random.random() < 0.05 else "application/json"
            await self._send(contract, body, kind)

    async def _send(self, contract: Contract, body: bytes, content_type: str) -> None:
        request = request_bytes(contract.path, body, content_type=content_type)
        try:
            answer = await ask(self._port, request, _REQUEST_SECONDS)
            assert isinstance(answer, Answer)
            self.statuses[contract.name, answer.status] += 1
            if answer.status not in self._documented[contract.path]:
                raise Malformed(f"{answer.status} is not in the API description: {answer.body[:300]!r}")
            if answer.status >= 400:
                contract.judge(answer)
        except (Broken, Hung, Malformed) as error:
            kind = (contract.path, str(error)[:_KIND])
            self._kinds[kind] += 1
            if self._kinds[kind] == 1:  # Further errors of this kind are similar.
                self.violations.append(f"POST {contract.path} {content_type} {body[:500]!r}: {error}")


def routes(url: str, seed: int, seconds: float) -> tuple[bool, str]:
    """Make schemathesis try every route in the API description.

    Return two values: whether nothing failed, and the summary.
    """
    program = Path(sys.executable).with_name("st")
    command = [str(program) if program.exists() else shutil.which("st") or "st", "run", f"{url}/openapi.json"]
    # Only one worker: schemathesis fails if Python 3.11's parser fails in a thread.
    command += ["--seed", str(seed), "--max-time", str(int(seconds)), "--workers", "1", "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--no-color"]
    command += ["--exclude-method", "DELETE", "--exclude-method", "PUT", "--exclude-path-regex", _EXCLUDED]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command += ["--checks", checks, "--request-timeout", "90"]
    with tempfile.TemporaryDirectory() as directory:
        limit = seconds + 300
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, cwd=directory)
    text = done.stdout + done.stderr
    return done.returncode == 0, text[max(text.find("== FAILURES =="), 0) :][:_SUMMARY] + text[-_SUMMARY:]


async def fuzz(tested: Subject, description: dict[str, Any], seed: int, seconds: float, requests: float) -> Fuzz:
    """Send invalid bodies for every contract, with rests between them."""
    fuzzing, stage = Fuzz(tested, description, seed), _stage(tested, seed)
    await fuzzing.run(stage, seconds, requests)
    fuzzing.violations += stage.violations + stage.load.violations
    return fuzzing


async def idle(tested: Subject) -> list[str]:
    """Return the violations of a server that receives no requests for longer than its stall time."""
    stage = _stage(tested, 0)
    await rest(stage, 0.0)
    return stage.violations + stage.load.violations


def _stage(tested: Subject, seed: int) -> Stage:
    return Stage(tested, Load(tested, 0, seed), Random(seed), None, grace=5.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--requests", type=float, default=math.inf, help="maximum number of invalid bodies; then the routes are tried"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=STALL_TIMEOUT,
        help="SERVING_STALL_TIMEOUT of the server; use more on a busy machine",
    )
    parser.add_argument("--no-routes", action="store_true", help="send only invalid bodies, and run no schemathesis")
    given = parser.parse_args()
    seconds = 60 * given.minutes
    with subject(given.stall_timeout, max_model_len=256) as tested:
        tested.wait_until_ready()
        share = 0.0 if given.no_routes else _SHARE_OF_ROUTES
        description = httpx.get(f"{tested.server.url}/openapi.json", timeout=60).json()
        fuzzing = asyncio.run(fuzz(tested, description, given.seed, seconds * (1 - share), given.requests))
        well, summary = True, ""
        if share:
            well, summary = routes(tested.server.url, given.seed, seconds * share)
        violations = fuzzing.violations + asyncio.run(idle(tested)) + tested.watch.lies
        violations += [] if well else ["schemathesis found something; see routes"]
        log = tested.log_text()
        if (at := log.find("Traceback (most recent")) >= 0:
            violations.append(f"tracebacks in the log: {log.count('Traceback (most recent')}: {log[at : at + 3000]}")
        if (code := tested.end()) != 0:
            violations.append(f"exit code {code}")
    statuses: dict[str, dict[str, int]] = {}
    for (contract, status), count in sorted(fuzzing.statuses.items()):
        statuses.setdefault(contract, {})[str(status)] = count
    violations += tested.left_behind
    requests = fuzzing.statuses.total()
    report = {"seed": given.seed, "requests": requests, "statuses": statuses, "violations": violations}
    print(json.dumps(report, indent=1))
    print(summary)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
