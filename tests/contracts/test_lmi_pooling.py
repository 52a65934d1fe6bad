"""LMI's contracts for vectors, scores and classes: bytes in, numbers in, bytes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import EngineDead, InvalidRequest, Overloaded
from engines.pooling import Pooling, PoolingModel, kind_of_model
from engines.request import GenerationRequest, TokenDelta
from handlers.contract import Contract, ContractError, Exchange, Reply
from handlers.lmi.vectors.contracts import pooling_contract
from tests.contracts.exchange import MODEL, call
from tests.settings import configured

EMBEDDING = PoolingModel(kind="embedding", task="embed", tasks=frozenset({"embed"}), vector_size=2)
RERANKER = PoolingModel(kind="reranker", task="classify", tasks=frozenset({"classify"}), vector_size=0)
CLASSIFIER = PoolingModel(
    kind="classifier",
    task="classify",
    tasks=frozenset({"classify"}),
    vector_size=0,
    labels={0: "bad", 1: "good"},
)
OTHER = PoolingModel(kind="late interaction", task="token_embed", tasks=frozenset({"token_embed"}), vector_size=2)


def contract(model: PoolingModel, **settings: Any) -> Contract:
    return pooling_contract(configured(MODEL, **settings), model)


def requests(model: PoolingModel, document: Any, **settings: Any) -> list[tuple[Any, Pooling | None]]:
    parsed = contract(model, **settings).parse(call(document)).requests
    return [(request.prompt, request.pooling) for request in parsed]


def answer(model: PoolingModel, document: Any, *numbers: list[float], **settings: Any) -> bytes:
    exchange = contract(model, **settings).parse(call(document))
    assert len(exchange.requests) == len(numbers)
    # The engine's order is not that of the prompts.
    parts = [
        exchange.answer.feed(place, TokenDelta("", last=True, numbers=np.array(one, np.float32)))
        for place, one in reversed(list(enumerate(numbers)))
    ]
    assert not any(parts[:-1])
    return parts[-1]


def attempt(chosen: Contract, document: Any) -> Exchange | Reply:
    try:
        return chosen.parse(call(document))
    except ContractError as error:
        return error.reply


def refusal(model: PoolingModel, document: Any, **settings: Any) -> Reply:
    with pytest.raises(ContractError) as raised:
        contract(model, **settings).parse(call(document))
    return raised.value.reply


# Vectors

DJL = Pooling(task="embed", activation=True, cut="right")


def test_djls_engines_write_one_text_flat_and_several_nested() -> None:
    assert answer(EMBEDDING, {"inputs": "a"}, [0.0059961616, -1.0498056]) == b"[0.0059961616,-1.0498056]"
    assert answer(EMBEDDING, {"inputs": ["a"]}, [0.5, 1.0]) == b"[[0.5,1.0]]"
    assert answer(EMBEDDING, ["a", "b"], [0.5, 1.0], [0.25, 0.0]) == b"[[0.5,1.0],[0.25,0.0]]"
    assert answer(EMBEDDING, "a", [0.5, 1.0]) == b"[0.5,1.0]"


def test_djls_engines_take_numbers_and_booleans_as_texts() -> None:
    texts = [text for text, _ in requests(EMBEDDING, {"inputs": ["é", 5, 1.5, True]})]
    assert texts == ["é", "5", "1.5", "true"]
    assert requests(EMBEDDING, {"inputs": "a"}) == [("a", DJL)]
    assert requests(EMBEDDING, {"inputs": "a"}, normalize=False)[0][1] == Pooling(
        task="embed", activation=False, cut="right"
    )


WITHOUT_TEXT = {"an object": {"a": 1}, "null": None, "an array": ["a"], "an empty array": []}
IN_LISTS = [(kind, ["a", value]) for kind, value in WITHOUT_TEXT.items()]


@pytest.mark.parametrize("model", [EMBEDDING, CLASSIFIER], ids=["vectors", "classes"])
@pytest.mark.parametrize(("kind", "inputs"), [("an object", {"a": 1}), *IN_LISTS])
def test_djls_engines_refuse_what_has_no_text(model: PoolingModel, kind: str, inputs: Any) -> None:
    reply = refusal(model, {"inputs": inputs}, djl_engine=True)
    refused = json.loads(reply.body)
    assert (reply.status, refused["code"], refused["type"]) == (400, 400, "TranslateException")
    assert refused["message"].startswith('"inputs" must be a text or a list of texts')
    assert kind.replace("empty ", "") in refused["message"]
    assert refusal(model, inputs if isinstance(inputs, list) else [inputs], djl_engine=True) == reply


@pytest.mark.parametrize("value", WITHOUT_TEXT.values(), ids=WITHOUT_TEXT)
def test_scores_refuse_what_has_no_text(value: Any) -> None:
    reply = refusal(RERANKER, {"query": "a", "texts": ["b", value]})
    assert (reply.status, json.loads(reply.body)["message"][:7]) == (400, '"texts"')
    for document in ({"text": "a", "text_pair": value}, {"inputs": value}, [{"key": value, "value": "b"}]):
        assert refusal(RERANKER, document).status == 400


@pytest.mark.parametrize("value", [{"a": 1}, None, [["a"]], ["a", 1], ["a", None], [True], [1.5], True, 5, []])
def test_lmis_handlers_refuse_what_has_no_text(value: Any) -> None:
    for model, settings in ((EMBEDDING, {"vector_format": "vllm"}), (CLASSIFIER, {})):
        reply = refusal(model, {"inputs": value}, **settings)
        assert reply.status == 424
        assert "inputs" in json.loads(reply.body)["error"]


def test_lmis_vllm_handler_writes_pythons_json() -> None:
    assert answer(EMBEDDING, {"inputs": "a"}, [0.5, 1.0], vector_format="vllm") == b"[[0.5, 1.0]]\n"
    assert answer(EMBEDDING, {}, [0.5], vector_format="vllm") == b"[[0.5]]\n"
    assert requests(EMBEDDING, {}, vector_format="vllm") == [("", Pooling(task="embed", activation=True))]
    assert requests(EMBEDDING, {"inputs": [1, 2]}, vector_format="vllm")[0][0] == (1, 2)
    assert [text for text, _ in requests(EMBEDDING, {"inputs": ["a", "b"]}, vector_format="vllm")] == ["a", "b"]


def test_lmis_vllm_handler_takes_texts_in_lower_case_if_the_model_says_so() -> None:
    model, given = replace(EMBEDDING, lower_case=True), {"inputs": ["Hello"]}
    assert requests(model, given, vector_format="vllm")[0][0] == "hello"
    assert requests(model, given)[0][0] == "Hello"


def test_the_requests_have_room_for_nothing_and_their_own_ids() -> None:
    parsed = contract(EMBEDDING).parse(call({"inputs": ["a", "b"]})).requests
    assert [(request.request_id, request.room) for request in parsed] == [("r-0", 0), ("r-1", 0)]


def test_adapters_are_those_of_the_header_and_the_body() -> None:
    given = call({"inputs": ["a", "b"], "adapters": ["one", "two"]})
    parsed = contract(EMBEDDING, enable_lora=True).parse(given).requests
    assert [request.adapter for request in parsed] == ["one", "two"]
    with pytest.raises(ContractError):
        contract(EMBEDDING, enable_lora=True).parse(call({"inputs": ["a", "b"], "adapters": ["one"]}))


# TEI's options beside `inputs`

WITH_PROMPTS = replace(EMBEDDING, prompts={"query": "query: "})


@pytest.mark.parametrize(
    ("options", "pooling"),
    [
        ({"normalize": False}, Pooling(task="embed", activation=False, cut="right")),
        ({"normalize": None, "truncate": None}, DJL),
        ({"truncate": False}, Pooling(task="embed", activation=True)),
        ({"truncation_direction": "Left"}, Pooling(task="embed", activation=True, cut="left")),
        ({"dimensions": 1}, Pooling(task="embed", activation=False, cut="right")),
    ],
)
def test_options_of_tei_have_their_effect(options: dict[str, Any], pooling: Pooling) -> None:
    assert requests(WITH_PROMPTS, {"inputs": "a", **options}) == [("a", pooling)]


def test_the_handlers_texts_are_cut_only_if_a_call_says_so() -> None:
    given = {"inputs": "a", "truncate": True}
    assert requests(EMBEDDING, given, vector_format="vllm") == [("a", DJL)]
    left = {"inputs": "a", "truncation_direction": "left"}
    assert requests(EMBEDDING, left, vector_format="vllm") == [("a", Pooling(task="embed", activation=True))]


def test_a_named_prompt_goes_in_front_of_each_text() -> None:
    texts = [text for text, _ in requests(WITH_PROMPTS, {"inputs": ["a", "b"], "prompt_name": "query"})]
    assert texts == ["query: a", "query: b"]


def test_vectors_are_cut_and_then_scaled() -> None:
    given = {"inputs": "a", "dimensions": 1}
    assert answer(EMBEDDING, given, [4.0, 3.0]) == b"[1.0]"
    assert answer(EMBEDDING, given | {"normalize": False}, [4.0, 3.0]) == b"[4.0]"
    assert answer(EMBEDDING, given, [4.0, 3.0], vector_format="vllm") == b"[[1.0]]\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": 1}, "`normalize` must be true or false, got 1"),
        ({"truncate": "yes"}, '`truncate` must be true or false, got "yes"'),
        ({"truncation_direction": "up"}, '`truncation_direction` must be left or right, got "up"'),
        ({"dimensions": 0}, "`dimensions` must be at least 1, got 0"),
        ({"dimensions": 3}, "`dimensions` must be at most 2, got 3"),
        ({"prompt_name": "title"}, "`prompt_name` must be one of the model's prompts: query"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    djl = refusal(WITH_PROMPTS, {"inputs": "a", **options})
    assert (djl.status, json.loads(djl.body)["message"]) == (400, message)
    handler = refusal(WITH_PROMPTS, {"inputs": "a", **options}, vector_format="vllm")
    assert (handler.status, json.loads(handler.body)["error"]) == (424, message)


def test_token_ids_have_no_text_in_front() -> None:
    given = {"inputs": [1, 2], "prompt_name": "query"}
    assert (
        b"must be texts if a prompt goes in front of them, got token ids"
        in refusal(WITH_PROMPTS, given, vector_format="vllm").body
    )
    nameless = {"inputs": "a", "prompt_name": "query"}
    assert b"config_sentence_transformers.json" in refusal(EMBEDDING, nameless).body


# Scores of pairs


def test_pairs_keep_their_order() -> None:
    pair = {"text": "q", "text_pair": "d"}
    assert answer(RERANKER, pair, [0.0]) == b"[0.5]"
    assert answer(RERANKER, [pair, {"key": "q", "value": "e"}], [0.0], [-100.0]) == b"[[0.5],[3.8e-44]]"
    assert answer(RERANKER, {"query": "q", "texts": ["d", "e"]}, [0.0], [0.0]) == b"[[0.5],[0.5]]"
    assert answer(RERANKER, pair, [-3.5], sigmoid=False) == b"[-3.5]"
    pooling = Pooling(task="classify", activation=False, second="d", cut="right")
    assert requests(RERANKER, {"inputs": pair}) == [("q", pooling)]


# Classes


def test_djls_classes_are_the_most_probable_five() -> None:
    assert answer(CLASSIFIER, {"inputs": "a"}, [0.25, 0.75], djl_engine=True) == (
        b'[{"className":"good","probability":0.75},{"className":"bad","probability":0.25}]'
    )
    many = replace(CLASSIFIER, labels={})
    found = answer(many, ["a"], [0.1, 0.2, 0.3, 0.05, 0.05, 0.3], djl_engine=True)
    assert found.count(b"className") == 5
    assert found.startswith(b'[[{"className":"2","probability":0.3},{"className":"5","probability":0.3}')


def test_a_pipelines_classes() -> None:
    assert answer(CLASSIFIER, {"inputs": "a"}, [0.0, 100.0]) == (
        b'[\n  {\n    "label":"good",\n    "score":1.0\n  }\n]'
    )
    top = {"inputs": ["a"], "parameters": {"top_k": 2, "function_to_apply": "none"}}
    assert answer(CLASSIFIER, top, [-1.0, 2.5]) == (
        b'[\n  [\n    {\n      "label":"good",\n      "score":2.5\n    },\n'
        b'    {\n      "label":"bad",\n      "score":-1.0\n    }\n  ]\n]'
    )
    sigmoid = {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}}
    assert b'"score":0.5' in answer(CLASSIFIER, sigmoid, [0.0, -1.0])
    pair = {"inputs": [{"text": "q", "text_pair": "d"}]}
    assert requests(CLASSIFIER, pair) == [("q", Pooling(task="classify", activation=False, second="d", cut="right"))]


@pytest.mark.parametrize(
    ("problem_type", "score"),
    [
        ("", b'"score":0.88079'),  # softmax
        ("single_label_classification", b'"score":0.88079'),
        ("multi_label_classification", b'"score":0.95257'),  # sigmoid
        ("regression", b'"score":3.0'),
    ],
)
def test_a_pipelines_scores_depend_on_the_models_problem(problem_type: str, score: bytes) -> None:
    model = replace(CLASSIFIER, problem_type=problem_type)
    assert score in answer(model, {"inputs": "a"}, [1.0, 3.0])


# Errors


@pytest.mark.parametrize(
    ("model", "document", "message"),
    [
        (EMBEDDING, b"{", "Input is not a valid json."),
        (EMBEDDING, {"texts": ["a"]}, 'Missing \\"inputs\\" in json.'),
        (EMBEDDING, {"inputs": []}, '\\"inputs\\" is empty.'),
        (RERANKER, {"text": "a"}, "Missing text or text_pair in json."),
        (RERANKER, [{"key": "a"}], "Missing key or value in input."),
        (RERANKER, [5], "Unexpected json type"),
        (RERANKER, {"query": "q"}, 'Missing \\"query\\" or \\"texts\\" in json.'),
    ],
)
def test_djls_engines_refuse_with_400(model: PoolingModel, document: Any, message: str) -> None:
    reply = refusal(model, document)
    assert reply.status == 400
    expected = f'{{\n  "code": 400,\n  "type": "TranslateException",\n  "message": "{message}"\n}}\n'
    assert reply.body.decode() == expected


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"{", "Input parsing failed: the body is not valid JSON: Input data was truncated"),
        ({"inputs": 5}, "Input parsing failed: \\u0027inputs\\u0027 must be a string or list of strings, got int"),
        (
            {"inputs": []},
            "Input parsing failed: \\u0027inputs\\u0027 must hold at least one string, and strings only or "
            "token ids only",
        ),
        (["a"], "Input parsing failed: the body must be an object, got an array"),
    ],
)
def test_lmis_vllm_handler_refuses_with_424(document: Any, message: str) -> None:
    reply = refusal(EMBEDDING, document, vector_format="vllm")
    assert (reply.status, reply.body.decode()) == (424, f'{{"error":"{message}","code":424}}')


def test_a_model_without_a_form_of_lmi_names_the_route() -> None:
    reply = refusal(OTHER, {"inputs": "a"})
    assert reply.status == 424
    assert b"late interaction; send `input` as to /pooling" in reply.body


@pytest.mark.parametrize(
    ("error", "djl", "handler"),
    [(InvalidRequest("long"), 400, 424), (EngineDead(), 500, 500), (Overloaded("full", 429), 429, 429)],
)
def test_errors_of_the_engine_have_the_statuses_of_the_form(error: Any, djl: int, handler: int) -> None:
    for status, form in ((djl, "djl"), (handler, "vllm")):
        exchange = contract(EMBEDDING, vector_format=form).parse(call({"inputs": "a"}))
        assert exchange.answer.fail(error).status == status


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "text", "text_pair", "key", "value", "query", "texts", "parameters", "top_k", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(_JSON, st.sampled_from([EMBEDDING, RERANKER, CLASSIFIER]), st.booleans(), st.sampled_from(["djl", "vllm"]))
def test_every_body_is_answered_or_refused(document: Any, model: PoolingModel, in_order: bool, form: str) -> None:
    exchange = attempt(contract(model, djl_engine=in_order, vector_format=form), document)
    if isinstance(exchange, Reply):
        assert exchange.status in (400, 424)
        return
    numbers = np.array([0.5, 0.25], np.float32)
    parts = [
        exchange.answer.feed(place, TokenDelta("", last=True, numbers=numbers))
        for place in range(len(exchange.requests))
    ]
    assert parts[-1]
    assert all(isinstance(request, GenerationRequest) and request.pooling for request in exchange.requests)


def test_the_kind_of_a_model_follows_from_its_task_and_labels() -> None:
    assert [kind_of_model("classify", labels) for labels in (1, 2)] == ["reranker", "classifier"]
    assert kind_of_model("token_embed", 0) == "late interaction"
