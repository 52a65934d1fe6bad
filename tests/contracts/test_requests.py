"""The bodies in `requests/*.yaml`, by contract, and the requests that the engine gets. UPDATE_CASES=1 writes the
requests.

A row states the reply instead of the requests in three cases: the engine gets no request, the reply is an error, or the
row gives the engine's answer in `numbers`. The rows leave out headers that most replies have, fields with default
values, and the id of a single request.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.interface import Generation, Sink
from engines.request import FinishReason, GenerationRequest, TokenDelta
from handlers.all_contracts import CONTRACTS
from handlers.route_declarations import GenerationRoute, takes
from tests.contracts.exchange import MODEL
from tests.contracts.test_cases import HEADERS, CaseEngine, application, reply_of
from tests.rows import read_rows, write_rows
from tests.stand_ins.scripted_engine import ScriptedGeneration

FILES = sorted((Path(__file__).parent / "requests").glob("*.yaml"))
assert FILES
NUMBERS = {"reranker": [[1.0]], "classifier": [[1.0, 2.0, 3.0]]}
OF_SERVER = ("options", "environment", "model", "state", "places", "error", "numbers")
GIVEN = ("method", "path", *OF_SERVER, "headers", "body")
STATED = ("engine", "status", "reply", *HEADERS)
COMMON = (("content-type", "application/json"), ("cache-control", "no-cache; no-store, must-revalidate, private"))
COMMON += (("x-compute-type", "gpu+optimized"),)


class RequestEngine(CaseEngine):
    """Answers each request with one token, and keeps the requests."""

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if self.pooling is not None or self.error is not None:
            return await super().submit(request, sink)
        self.seen.append(request)
        for sequence in range(request.sequences):
            last = sequence == request.sequences - 1
            sink.on_delta(TokenDelta("a", [], sequence, FinishReason.LENGTH, 1, 1, -0.5, last=last))
        return ScriptedGeneration(request, sink, self)


def without_defaults(value: Any) -> Any:
    """Return a struct as plain data, without the fields that have their defaults."""
    if isinstance(value, msgspec.Struct):
        fields = {field.name: field.default for field in msgspec.structs.fields(value) if field.name != "memo"}
        pairs = {name: getattr(value, name) for name, default in fields.items() if getattr(value, name) != default}
        return {name: without_defaults(found) for name, found in pairs.items()}
    return msgspec.json.decode(msgspec.json.encode(value))


async def effect(row: dict[str, Any], directory: Path, servers: dict[str, tuple[RequestEngine, Any]]) -> dict[str, Any]:
    """Return what a row states: the requests that the engine gets, or the reply.

    Rows with the same settings share an engine and its application.
    `servers`: the engines and applications of earlier rows.
    """
    key = repr([row.get(name) for name in OF_SERVER])
    if key not in servers:
        model = row.get("model", "generating")
        case = {"model": model, "numbers": NUMBERS.get(model, [[0.5] * 4]), **row}
        engine = RequestEngine(case)
        servers[key] = engine, application(case, directory, engine)
    engine, app = servers[key]
    engine.seen.clear()
    reply = await reply_of(app, row)
    if engine.seen and reply["status"] < 400 and "numbers" not in row:
        alone = engine.seen if len(engine.seen) > 1 else [msgspec.structs.replace(engine.seen[0], request_id="")]
        return {"engine": [without_defaults(request) for request in alone]}
    body = reply.pop("body")
    return {name: value for name, value in reply.items() if (name, value) not in COMMON} | {"reply": body}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_engine_gets_the_requests_of_the_row(path: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    (directory := tmp_path / "model").mkdir()
    updating = "UPDATE_CASES" in os.environ
    rows_by_title = read_rows(path)
    servers: dict[str, tuple[RequestEngine, Any]] = {}
    with asyncio.Runner() as runner:
        for title, rows in rows_by_title.items():
            for place, row in enumerate(rows):
                with subtests.test(title, row=place + 1):
                    assert row.keys() - {*GIVEN, *STATED} == set()
                    found = runner.run(effect(row, directory, servers))
                    rows[place] = {name: row[name] for name in GIVEN if name in row} | found
                    assert updating or rows[place] == row
    if updating:
        write_rows(path, rows_by_title)


def test_each_contract_of_a_route_is_steered_by_headers() -> None:
    """If the contracts of several routes read calls with the same method, one row is enough for these routes."""
    rows = [row for rows in read_rows(FILES[0].parent / "steering.yaml").values() for row in rows]
    found, expected = set(), set()
    for kind in ("generating", "embedding"):
        engine = RequestEngine({"model": kind})
        paths = [row["path"] for row in rows if row.get("model", "generating") == kind]
        for route in [route for family in CONTRACTS for route in family.routes]:
            if not isinstance(route, GenerationRoute) or route.contract is None:
                continue
            if not takes(route, pooling=kind == "embedding"):
                continue
            method = type(route.contract(MODEL, engine)).parse.__qualname__
            expected.add(method)
            if any(re.fullmatch(re.sub("{.*?}", "[^/]+", route.path), path) for path in paths):
                found.add(method)
    assert found == expected
