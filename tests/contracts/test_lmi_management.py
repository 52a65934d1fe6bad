"""LMI's management API, byte for byte. Source: "DJL Serving Management API"."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Call, ContractError, Reply
from handlers.lmi.management import models as model_management
from handlers.lmi.management.models import read_page, read_registration, read_scale
from handlers.management import DescribedGroup, DescribedModel, DescribedWorker, ListedModel, Registration

A = ListedModel("a", None, "/opt/models/a", "READY")
B = ListedModel("b", "v2", "file:///opt/models/b", "PENDING")


def call(body: bytes = b"", content_type: str = "", **query: str) -> Call:
    return Call(body=body, content_type=content_type, request_id="r", query=tuple(query.items()))


def refusal(asked: Call) -> Reply:
    with pytest.raises(ContractError) as caught:
        read_registration(asked)
    return caught.value.reply


@pytest.mark.parametrize(
    ("reply", "status", "body"),
    [
        (model_management.model_list([], 0, 100), 200, b'{\n  "models": []\n}\n'),
        (
            model_management.model_list([A, B], 0, 100),
            200,
            b'{\n  "models": [\n    {\n      "modelName": "a",\n      "modelUrl": "/opt/models/a",\n'
            b'      "status": "READY"\n    },\n    {\n      "modelName": "b",\n      "version": "v2",\n'
            b'      "modelUrl": "file:///opt/models/b",\n      "status": "PENDING"\n    }\n  ]\n}\n',
        ),
        (
            model_management.model_list([B, A], 1, 1),
            200,
            b'{\n  "models": [\n    {\n      "modelName": "a",\n      "modelUrl": "/opt/models/a",\n'
            b'      "status": "READY"\n    }\n  ]\n}\n',
        ),
        (
            model_management.workflow_list([A, B], 0, 1),
            200,
            b'{\n  "nextPageToken": "1",\n  "workflows": [\n    {\n      "workflowName": "a"\n    }\n  ]\n}\n',
        ),
        (model_management.sagemaker_list([], 0, 100), 200, b'{"models":[]}'),
        (
            model_management.sagemaker_list([A, B], 0, 1),
            200,
            b'{"models":[{"modelName":"a","modelUrl":"/opt/models/a"}],"nextPageToken":"1"}',
        ),
        (model_management.sagemaker_description(A), 200, b'{"modelName":"a","modelUrl":"/opt/models/a"}'),
    ],
)
def test_an_answer_has_lmis_bytes(reply: Reply, status: int, body: bytes) -> None:
    assert (reply.status, reply.content_type, reply.body) == (status, "application/json", body)


def test_what_html_would_take_for_its_own_is_escaped_in_urls() -> None:
    reply = model_management.model_list([ListedModel("a", None, "/x/<a>&b='c'", "READY")], 0, 1)
    assert b"/x/\\u003ca\\u003e\\u0026b\\u003d\\u0027c\\u0027" in reply.body
    assert json.loads(reply.body)["models"][0]["modelUrl"] == "/x/<a>&b='c'"


def test_a_description_has_lmis_fields_in_lmis_order() -> None:
    described = DescribedModel(
        name="m",
        version="1",
        url="/x",
        batch_size=4,
        max_batch_delay=0.1,
        max_idle_time=60.0,
        queue_size=1000,
        waiting=3,
        status="Healthy",
        at_startup=True,
        groups=[DescribedGroup(None, 1, 1, [DescribedWorker(1, 1_700_000_000.042, "READY")])],
    )
    assert model_management.description([described]).body.decode() == (
        '[\n  {\n    "workflowName": "m",\n    "version": "1",\n    "models": [\n      {\n        "modelName": "m",\n'
        '        "modelUrl": "/x",\n        "batchSize": 4,\n        "maxBatchDelayMillis": 100,\n'
        '        "maxIdleSeconds": 60,\n        "queueSize": 1000,\n        "requestInQueue": 3,\n'
        '        "status": "Healthy",\n        "loadedAtStartup": true,\n        "workerGroups": [\n          {\n'
        '            "device": {\n              "deviceType": "cpu",\n              "deviceId": -1\n            },\n'
        '            "minWorkers": 1,\n            "maxWorkers": 1,\n            "workers": [\n              {\n'
        '                "id": 1,\n                "startTime": "2023-11-14T22:13:20.042Z",\n'
        '                "status": "READY"\n              }\n            ]\n          }\n        ]\n      }\n    ]\n'
        "  }\n]\n"
    )


def test_a_registration_is_read_from_the_query() -> None:
    asked = call(url="/x", model_version="2", batch_size="4", max_worker="2", synchronous="False", other="y")
    settings = {"batch_size": "4", "maxWorkers": "2"}
    assert read_registration(asked) == Registration("/x", None, "2", settings, False)


def test_a_registration_is_read_from_a_json_body() -> None:
    body = b'{"model_name": "abc123", "url": "/x", "job_queue_size": 5, "synchronous": true, "x": {}, "device": null}'
    asked = call(body, "application/json; charset=utf-8")
    assert read_registration(asked) == Registration("/x", "abc123", None, {"job_queue_size": "5"}, True)


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        (call(), "url"),
        (call(b"{}", "application/json"), "url"),
        (call(b'{"url": "/x"}', "application/json"), "model_name"),
        (call(b'{"url": ["/x"]}', "application/json"), "url"),
        (call(b"[]", "application/json"), ""),
        (call(b"{", "application/json"), ""),
        (call(url="/x", model_name="a/b"), "model_name"),
        (call(url="/x", model_name=".."), "model_name"),
        (call(url="/x", model_name="a", model_version="."), "model_version"),
        (call(url="/x", synchronous="later"), "synchronous"),
    ],
)
def test_a_wrong_registration_is_400_and_names_the_parameter(asked: Call, parameter: str) -> None:
    reply = refusal(asked)
    document = json.loads(reply.body)
    assert (reply.status, document["code"], document["type"]) == (400, 400, "BadRequestException")
    assert f" {parameter} " in document["message"] or not parameter


@given(body=st.binary() | st.text().map(str.encode), kind=st.sampled_from(["", "application/json"]))
def test_any_body_is_a_registration_or_a_refusal(body: bytes, kind: str) -> None:
    asked = call(body, kind, url="/x")
    with contextlib.suppress(ContractError):
        assert read_registration(asked).url


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"min_worker": "0", "max_worker": "0"}, (0, 0)),
        ({"max_worker": "0"}, (0, 0)),
        ({"min_worker": "3"}, (3, 3)),
        ({"max_worker": "4"}, (1, 4)),
    ],
)
def test_numbers_of_workers_are_read(query: dict[str, str], expected: tuple[int, int]) -> None:
    assert read_scale(call(**query), (1, 2)) == expected


@pytest.mark.parametrize(
    "query",
    [{}, {"min_worker": "x"}, {"min_worker": "-1"}, {"min_worker": "129"}, {"min_worker": "2", "max_worker": "1"}],
)
def test_wrong_numbers_of_workers_are_400(query: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="_worker") as caught:
        read_scale(call(**query), (1, 1))
    assert caught.value.reply.status == 400


def test_pages_follow_each_other() -> None:
    assert read_page(call()) == (0, 100)
    assert read_page(call(limit="1000", next_page_token="7")) == (7, 100)
    for query in ({"limit": "0"}, {"limit": "x"}, {"next_page_token": "-1"}):
        with pytest.raises(ContractError, match=next(iter(query))):
            read_page(call(**query))
