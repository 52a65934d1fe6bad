"""SageMaker's script mode in real workers: the functions, their arguments and their defaults."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.interface import EngineStartError
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.worker_process.script_mode import Text
from tests.unit.handlers.custom.harness import MODELS, Client, Recorder, serving
from tests.waiting import until

DEFAULTS = {"entry_point": str(MODELS / "script" / "code" / "inference.py")}
STEPS = """
def pre_model_fn(model_dir):
    global steps
    steps = ["before"]

def model_fn(model_dir, context):
    steps.append(context.system_properties["gpu_id"])
    return {"dir": model_dir.endswith("own"), "steps": steps}

def model_warmup_fn(model_dir, model):
    steps.append("after")

def input_fn(body, content_type):
    shown = ["str", body] if isinstance(body, str) else [type(body).__name__, body.hex()]
    return shown + [content_type]

def predict_fn(data, model, context):
    return data + [model["dir"], model["steps"], sorted(context.system_properties)]

def output_fn(prediction, accept):
    import json
    return json.dumps(prediction + [accept])
"""


def npy(values: Any) -> bytes:
    body = io.BytesIO()
    np.save(body, values)
    return body.getvalue()


async def ask(client: Client, body: bytes | str, content_type: str = "", accept: str = "") -> Recorder:
    headers: Mapping[str, str] = {"Accept": accept} if accept else {}
    headers = {**headers, **({"Content-Type": content_type} if content_type else {})}
    return await client.ask(body, headers=headers, content_type=content_type)


async def test_the_defaults_take_and_give_json_csv_and_npy() -> None:
    async with serving("script", **DEFAULTS) as client:
        for given, body in {
            "": "[[1, 2], [3, 4]]",
            "application/json": "[[1, 2], [3, 4]]",
            "text/csv; charset=utf-8": "1,2\n3,4\n",
            "application/x-npy": npy([[1, 2], [3, 4]]),
        }.items():
            answer = await ask(client, body, given, "text/csv")
            assert (answer.status, answer.content_type) == (200, "text/csv")
            assert np.genfromtxt(io.BytesIO(answer.body), delimiter=",").tolist() == [[3, 5], [7, 9]]
        for accept, type_, body in (
            ("", "application/json", b"[3, 5]"),
            ("*/*", "application/json", b"[3, 5]"),
            ("text/html, application/json;q=0.9", "application/json", b"[3, 5]"),
            ("text/csv", "text/csv", b"3\n5\n"),
            ("application/x-npy", "application/x-npy", npy([3, 5])),
        ):
            answer = await ask(client, "[1, 2]", accept=accept)
            assert (answer.status, answer.content_type, answer.body) == (200, type_, body)


async def test_a_default_accept_counts_where_the_client_says_none() -> None:
    async with serving("script", properties={"default_accept": "text/csv"}, **DEFAULTS) as client:
        assert (await ask(client, "[1]")).content_type == "text/csv"
        assert (await ask(client, "[1]", accept="application/json")).content_type == "application/json"


async def test_what_the_defaults_cannot_do_is_said() -> None:
    async with serving("script", **DEFAULTS) as client:
        for content_type, accept in (("image/png", ""), ("", "image/png")):
            answer = await ask(client, "[1]", content_type, accept)
            assert (answer.status, json.loads(answer.body)["code"]) == (415, 415)
            assert "the content type 'image/png' needs" in json.loads(answer.body)["error"]
        answer = await ask(client, npy(np.array([{}], dtype=object)), "application/x-npy")  # A pickled array.
        assert (answer.status, b"pickle" in answer.body) == (424, True)
        assert (await ask(client, "{")).status == 424
        assert (await ask(client, "[1]")).status == 200


def script(directory: Path, code: str) -> dict[str, Any]:
    path = directory / "own" / "inference.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    return {"model": path.parent, "entry_point": str(path)}


async def test_each_function_gets_what_sagemakers_toolkit_gives_it(tmp_path: Path) -> None:
    async with serving(**script(tmp_path, STEPS)) as client:
        properties = ["batch_size", "gpu_id", "model_dir", "server_name", "server_version"]
        common = [True, ["before", None, "after"], properties]
        answer = await ask(client, "a,b", "text/csv", "x/y")
        assert (answer.status, answer.content_type) == (200, "x/y")
        assert json.loads(answer.body) == ["str", "a,b", "text/csv", *common, "x/y"]
        answer = await ask(client, b"\x00\xff", "application/octet-stream")
        assert json.loads(answer.body) == ["bytes", "00ff", "application/octet-stream", *common, "application/json"]


CONTEXT = """
def shown(context):
    processor = context.request_processor[0]
    assert processor.get_request_properties() is context.get_all_request_header(0)
    return {
        "id": context.get_request_id(0),
        "same id": context.request_ids[0] == context.get_request_id(),
        "attributes": context.get_request_header(0, "X-Amzn-SageMaker-Custom-Attributes"),
        "lower case": processor.get_request_property("x-amzn-sagemaker-custom-attributes"),
        "all": context.get_all_request_header(0).get("x-other"),
        "there": ["X-OTHER" in context.get_all_request_header(0), context.get_all_request_header(0)["x-Other"]],
        "missing": [context.get_request_header(0, name) for name in ("user", "X-None")],
    }

def model_fn(model_dir, context):
    assert context.get_request_id() is None
    return [context.model_name, context.manifest, context.system_properties["model_dir"] == model_dir]
"""
STEPS_WITH_CONTEXT = """
def input_fn(body, content_type, context):
    return [shown(context)]

def predict_fn(data, model, context):
    return data + [shown(context), model]

def output_fn(prediction, accept, context):
    import json
    context.set_response_header(0, "X-Rows", "3")
    context.set_response_content_type(0, "text/x-rows")
    assert context.get_response_content_type(0) == "text/x-rows"
    context.set_response_status(code=201, phrase="Made", idx=0)
    assert context.get_response_status(0) == (201, "Made")
    return json.dumps(prediction + [shown(context)])
"""
TRANSFORM_WITH_CONTEXT = """
def transform_fn(model, body, content_type, accept, context):
    import json
    context.set_response_header(0, "Content-Type", "text/x-rows")
    context.set_response_header(0, "x-rows", 3)
    context.set_all_response_status(201, "Made")
    return json.dumps([shown(context), shown(context), model, shown(context)]), accept
"""


@pytest.mark.parametrize("functions", [STEPS_WITH_CONTEXT, TRANSFORM_WITH_CONTEXT], ids=["steps", "transform_fn"])
async def test_the_context_has_the_request_and_sets_the_reply(tmp_path: Path, functions: str) -> None:
    async with serving(**script(tmp_path, CONTEXT + functions)) as client:
        for attributes in ("user=7; plan", '{"user": 7}'):
            headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes, "X-Other": "é"}
            answer = await client.ask("[1]", headers=headers)
            request, same, model, last = json.loads(answer.body)
            assert request == same == last
            assert request.pop("id").startswith("id-")
            assert request == {
                "same id": True,
                "attributes": attributes,
                "lower case": attributes,
                "all": "é",
                "there": [True, "é"],
                "missing": [None, None],
            }
            assert model == ["model", None, True]
            assert (answer.status, answer.content_type) == (201, "text/x-rows")
            assert {name.lower(): value for name, value in answer.headers.items()} == {"x-rows": "3"}


async def test_the_metrics_of_the_context_are_those_of_the_handler(tmp_path: Path) -> None:
    code = """
def model_fn(model_dir, context):
    context.metrics.add_size("Weights", 2, unit="GB")

def predict_fn(data, model, context):
    context.metrics.add_counter("Rows seen", 3)
    context.metrics.add_time("Predict", 1.5, 0)
    context.metrics.add_percent("Hits", 50, dimensions=["Kind:warm"])
    context.metrics.add_error("Cause", "none")
    context.metrics.add_metric("Depth", 4, None, "levels")
    return data
"""
    async with serving(**script(tmp_path, code)) as client:
        for _ in range(2):
            assert (await client.ask("[1]")).status == 200
        metrics = client.handler.pool.metrics
        # The lines come through a pipe, after the answers.
        await until(lambda: any(m.name == "Depth" for m in metrics.snapshot()) and _total(metrics, "Rows_seen") == 6)
        assert {(m.name, m.unit, m.label, *m.numbers.items()) for m in metrics.snapshot()} == {
            ("Weights", "Gigabytes", "ModelName", ("model", 2.0)),
            ("Rows_seen", "Count", "ModelName", ("model", 6.0)),
            ("Predict", "Milliseconds", "ModelName", ("model", 1.5)),
            ("Hits", "Percent", "Kind", ("warm", 50.0)),
            ("Depth", "levels", "ModelName", ("model", 4.0)),
        }


def _total(metrics: HandlerMetrics, name: str) -> float:
    return sum(sum(metric.numbers.values()) for metric in metrics.snapshot() if metric.name == name)


async def test_a_reply_of_one_request_does_not_reach_the_next(tmp_path: Path) -> None:
    code = """
class Busy(Exception):
    status_code, message = 503, "busy"

def model_fn(model_dir, context):
    return None

def transform_fn(model, body, content_type, accept, context):
    if body != "[1]":
        context.set_response_status(202)
        context.set_response_header(0, "Retry-After", "3")
    if body == "[3]":
        raise Busy
    return body
"""
    async with serving(**script(tmp_path, code)) as client:
        for body, status, headers in (
            ("[1]", 200, {}),
            ("[2]", 202, {"Retry-After": "3"}),
            ("[3]", 503, {"Retry-After": "3"}),
            ("[1]", 200, {}),
        ):
            answer = await client.ask(body)
            assert (answer.status, answer.headers, answer.content_type) == (status, headers, "application/json")


LMIS = """
import io
import json
import numpy as np

def model_fn(model_dir):
    return sum

def input_fn(request_body, request_content_type):
    if request_content_type == "application/json":
        return np.array(json.loads(request_body.decode("utf-8"))["inputs"])
    return np.loadtxt(io.StringIO(request_body.decode()), delimiter=",")

def output_fn(prediction, response_content_type):
    return json.dumps({"predictions": prediction.tolist()}).encode("utf-8")
"""
TOOLKITS = LMIS.replace('.decode("utf-8")', "").replace(".decode()", "")


@pytest.mark.parametrize("code", [LMIS, TOOLKITS], ids=["LMI", "toolkit"])
async def test_a_body_that_is_text_may_be_decoded_or_used_as_it_is(tmp_path: Path, code: str) -> None:
    async with serving(**script(tmp_path, code)) as client:
        for content_type, body in (("application/json", '{"inputs": [[1, 2], [3, 4]]}'), ("text/csv", "1,2\n3,4\n")):
            answer = await ask(client, body, content_type)
            assert (answer.status, json.loads(answer.body)) == (200, {"predictions": [4, 6]})


def test_a_body_is_decoded_as_its_bytes_would_be() -> None:
    body = Text("é")
    assert (body, body.decode(), body.decode("latin-1"), bytes(body)) == ("é", "é", "Ã©", "é".encode())
    with pytest.raises(UnicodeDecodeError):
        body.decode("ascii")
    assert body.decode("ascii", "ignore") == ""


async def test_transform_fn_replaces_the_three_and_may_choose_the_type(tmp_path: Path) -> None:
    code = """
class Refused(Exception):
    status_code, message = 400, "not these"

def model_fn(model_dir):
    return "m"

def transform_fn(model, body, content_type, accept):
    if body == "no":
        raise Refused
    return f"{model}{body}{content_type}{accept}".encode(), "text/plain"
"""
    async with serving(**script(tmp_path, code)) as client:
        answer = await ask(client, "1", "text/csv", "x/y")
        assert (answer.status, answer.content_type, answer.body) == (200, "text/plain", b"m1text/csvx/y")
        refused = await ask(client, "no", "text/csv")
        assert (refused.status, json.loads(refused.body)["error"]) == (400, "not these")


async def test_requests_that_come_together_have_their_own_statuses_and_types_with_a_batch_size() -> None:
    async with serving("script", batch_size=7, max_batch_delay=500, **DEFAULTS) as client:
        assert json.loads((await ask(client, "[0]")).body) == [1], "a single request waits for no others"
        answers = await asyncio.gather(
            ask(client, "[1]"),
            ask(client, "[2]", accept="text/csv"),
            ask(client, "{broken"),
            ask(client, "[3]", "image/png"),
            ask(client, "[4]", accept="image/png"),
            ask(client, "5,6", "text/csv"),
            ask(client, "[7]", accept="application/x-npy"),
        )
    assert [answer.status for answer in answers] == [200, 200, 424, 415, 415, 200, 200]
    assert [(answers[i].content_type, answers[i].body) for i in (0, 1, 5, 6)] == [
        ("application/json", b"[3]"),
        ("text/csv", b"5\n"),
        ("application/json", b"[11.0, 13.0]"),
        ("application/x-npy", npy([15])),
    ]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def model_fn(model_dir): raise ValueError('no weights')", r"no weights \(inference\.py, line 1\)"),
        ("def model_fn(): ...", "model_fn .*0 .*1"),
        (
            "def model_fn(model_dir): ...\ndef transform_fn(m, b, c, a): ...\ndef input_fn(b, c): ...",
            "transform_fn .*input_fn",
        ),
        ("def predict_fn(data, model): ...", "`handle`"),
    ],
)
async def test_a_script_that_cannot_be_used_fails_the_load(tmp_path: Path, code: str, why: str) -> None:
    with pytest.raises(EngineStartError, match=why):
        async with serving(**script(tmp_path, code)):
            pass


async def test_a_handle_goes_before_a_script(tmp_path: Path) -> None:
    code = "from djl_python import Output\ndef model_fn(model_dir): raise ValueError\n"
    code += "def handle(inputs): return Output().add('mine')"
    async with serving(**script(tmp_path, code)) as client:
        assert (await ask(client, "x")).body == b"mine"
