"""A customer's formatters, which are written as in LMI's documentation: their requests and their answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_python import Input
from djl_python.request_io import RequestInput, RequestOutput, TextGenerationOutput, TextInput
from engines.errors import EngineDead, GenerationFailed, Overloaded
from engines.request import FinishReason, Token, TokenDelta
from handlers.contract import Call, ContractError, Exchange, Reply, read_steering
from handlers.custom.formatters import Formatters
from handlers.formatter_thread import FormatterThread
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.chat_answers import AsyncForm
from handlers.lmi.formatters.async_formatters import FormattedReply, formatted_call
from handlers.lmi.formatters.formatter_contract import FormatterContract
from handlers.lmi.rolling_batch import LmiRollingContract
from tests.contracts.exchange import MODEL, a_joke, call, refusal_of
from tests.settings import configured
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.request_headers import request_headers
from tests.waiting import until

PROMPT = {"inputs": "Tell me", "parameters": {"max_new_tokens": 2}}


def contract(
    read: Callable[..., Any] | None = None, write: Callable[..., Any] | None = None, **options: Any
) -> FormatterContract:
    config = configured(MODEL, **options)
    given = Formatters(FormatterThread(60), read, write)
    return FormatterContract(LmiRollingContract(config), config, given, "tokenizer")


def body(exchange: Exchange, *deltas: TokenDelta) -> str:
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas or a_joke()).decode()


def whole_answer(output: TextGenerationOutput) -> str:
    if not output.finished:
        return ""
    text = "".join(token.text for token in output.sequences[output.best_sequence_index].tokens)
    return json.dumps({"text": text, "reason": output.sequences[0].finish_reason, "prompt": output.input.input_text})


def one_line_each(request_output: RequestOutput) -> str:
    sequence = request_output.sequences[request_output.best_sequence_index]  # type: ignore[attr-defined]
    token, index, first, last = sequence.get_next_token()
    return f"{index}{token.text}{'!' if first else ''}{'.' if last else ''}\n"


def test_an_output_formatter_writes_the_whole_answer() -> None:
    exchange = contract(write=whole_answer).parse(call(PROMPT))
    assert exchange.answer.content_type == ""
    assert body(exchange) == '{"text": " a joke", "reason": "length", "prompt": "Tell me"}'


@pytest.mark.parametrize("null", [{"stream": None}, {"parameters": {"stream": None}}])
def test_a_stream_of_null_is_no_stream(null: dict[str, Any]) -> None:
    answer = body(contract(write=whole_answer).parse(call(PROMPT | null)))
    assert answer == '{"text": " a joke", "reason": "length", "prompt": "Tell me"}'


BOTH = TokenDelta("ab", [Token(1, "a"), Token(2, "b")], finish_reason=FinishReason.EOS, token_count=2, last=True)
NO_TOKEN = TokenDelta("", finish_reason=FinishReason.EOS, last=True)


@pytest.mark.parametrize(
    ("deltas", "parts"),
    [(a_joke(), [b"0 a!\n", b"1 joke.\n"]), ([BOTH], [b"0a!\n1b.\n"]), ([NO_TOKEN], [b"0!.\n"])],
)
def test_an_output_formatter_is_called_for_each_token_of_a_stream_or_for_its_end(
    deltas: Sequence[TokenDelta], parts: list[bytes]
) -> None:
    exchange = contract(write=one_line_each).parse(call({**PROMPT, "stream": True}))
    assert [exchange.answer.feed(0, delta) for delta in deltas] == parts


def test_a_streaming_formatter_that_reads_nothing_is_an_error_and_no_endless_loop() -> None:
    exchange = contract(write=lambda output: "x").parse(call({**PROMPT, "stream": True}))
    with pytest.raises(GenerationFailed, match="get_next_token"):
        body(exchange)


def test_the_older_kind_of_formatter_is_called_with_each_token() -> None:
    calls = []

    def write(token: Any, first: bool, last: bool, details: Any, generated_text: Any, request_id: Any) -> str:
        calls.append((token.as_dict(), first, last, generated_text, request_id))
        return json.dumps(details) if last else token.text

    exchange = contract(write=write).parse(call({**PROMPT, "stream": True}))
    assert body(exchange) == " a{}"
    assert calls == [
        ({"id": 7, "text": " a", "log_prob": -0.5}, True, False, "", 0),
        ({"id": 9, "text": " joke", "log_prob": -0.25}, False, True, " a joke", 0),
    ]


def test_the_older_kind_gets_details_where_the_request_asks_for_them() -> None:
    def write(token: Any, first: bool, last: bool, details: Any, generated_text: Any, request_id: Any) -> str:
        return json.dumps(details) if last else ""

    asked = {"inputs": "Tell me", "parameters": {"details": True}}
    details = json.loads(body(contract(write=write).parse(call(asked))))
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == 2
    assert details["inputs"] == "Tell me"
    assert details["tokens"][1] == {"id": 9, "text": " joke", "log_prob": -0.25}


def test_a_request_may_ask_for_a_built_in_format_instead() -> None:
    asked = {"inputs": "Tell me", "parameters": {"output_formatter": "json"}}
    exchange = contract(write=whole_answer).parse(call(asked))
    assert exchange.answer.content_type == "application/json"
    assert body(exchange, *a_joke()) == '{"generated_text": " a joke"}'


def test_an_input_formatter_reads_the_request() -> None:
    seen: dict[str, Any] = {}

    def read(given: Input, **keywords: Any) -> TextInput:
        document = given.get_as_json()
        seen.update(keywords, session=given.get_property("x-session"))
        return TextInput(input_text=document["question"], parameters={"max_new_tokens": document["length"]})

    headers = request_headers(("X-Session", "s1"), ("X-Cache-Salt", "own"))
    steering, _ = read_steering(headers, "of the key")
    request = replace(call({"question": "Why?", "length": 5}), headers=headers, steering=steering)
    exchange = contract(read=read).parse(request)
    (asked,) = exchange.requests
    assert (asked.prompt, asked.sampling.max_tokens, asked.cache_salt) == ("Why?", 5, "own")
    assert (seen["tokenizer"], seen["is_rolling_batch"], seen["session"]) == ("tokenizer", True, "s1")
    assert body(exchange) == '{"generated_text": " a joke"}'


def test_an_input_formatter_without_keywords_is_called_without_them() -> None:
    def read(given: Input) -> TextInput:
        return TextInput(input_text=given.get_as_string())

    assert contract(read=read).parse(call(b"Hi", "text/x-mine")).requests[0].prompt == "Hi"


def test_an_input_formatter_may_ask_for_a_stream() -> None:
    def read(given: Input, **_: Any) -> TextInput:
        return TextInput(input_text="Hi", parameters={"stream": True})

    assert contract(read=read).parse(call(b"x")).answer.content_type == "application/jsonlines"


def test_what_the_runtime_fills_in_is_there_for_the_output_formatter() -> None:
    seen: list[RequestInput] = []

    def write(output: RequestOutput) -> str:
        seen.append(output.input)
        return "x"

    exchange = contract(write=write, tgi_compat=True).parse(call(PROMPT))
    body(exchange)
    assert seen[0].client_request_id == "r"
    assert seen[0].tgi_compat is True
    assert seen[0].server_parameters["max_new_tokens"] == 2
    assert exchange.requests[0].sampling.seed == seen[0].server_parameters["seed"]


def test_several_sequences_are_all_in_the_output() -> None:
    def write(output: TextGenerationOutput) -> str:
        return json.dumps({i: len(s.tokens) for i, s in output.sequences.items()}) if output.finished else ""

    asked = {"inputs": "Tell me", "parameters": {"n": 2, "do_sample": True}}
    exchange = contract(write=write).parse(call(asked))
    first = TokenDelta("a", [Token(1, "a")], finish_reason=FinishReason.EOS, token_count=1)
    second = TokenDelta("bc", [Token(1, "b"), Token(2, "c")], sequence=1, finish_reason=FinishReason.EOS, last=True)
    assert exchange.requests[0].sequences == 2
    assert body(exchange, first, second) == '{"0": 1, "1": 2}'


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("question")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (failing, "Custom formatter failed: 'question'"),
        (lambda given, **_: {"inputs": "x"}, "Custom formatter failed: the input formatter returned dict; expected"),
        (lambda given, **_: TextInput(input_text=object()), "Custom formatter failed: `input_text` or `parameters`"),
        (lambda given, **_: TextInput(input_text="x", parameters=[]), "`parameters` must be a dict"),
        (lambda given, **_: TextInput(input_text=""), "`inputs` must not be empty"),
    ],
)
def test_a_failing_input_formatter_refuses_its_request_and_says_why(read: Callable[..., Any], message: str) -> None:
    reply = refusal_of(contract(read=read), call(PROMPT))
    assert (reply.status, reply.content_type) == (424, "application/json")
    # LMI's errors are escaped for HTML.
    error = json.loads(reply.body)
    assert message in error["error"]
    assert error["code"] == 424


@pytest.mark.parametrize("write", [failing, lambda output: 5])
def test_a_failing_output_formatter_fails_its_request(write: Callable[..., Any]) -> None:
    exchange = contract(write=write).parse(call(PROMPT))
    with pytest.raises(GenerationFailed, match="Custom formatter failed: "):
        body(exchange)


def test_errors_of_a_formatted_answer_have_lmis_bytes() -> None:
    answer = contract(write=whole_answer).parse(call(PROMPT)).answer
    failed = answer.fail(GenerationFailed("Custom formatter failed: x"))
    assert failed == Reply(424, "application/json", b'{"error":"Custom formatter failed: x","code":424}')
    assert answer.fail_midway(GenerationFailed("y")) == b'{"error":"y","code":424}'
    assert answer.fail(EngineDead("gone")).status == 500
    assert answer.fail(Overloaded("full")).status == 503


@pytest.mark.parametrize("document", [b"{", [1], {"inputs": 5}, {"inputs": "x", "parameters": {"top_p": 5}}])
def test_a_wrong_request_is_refused_as_without_formatters(document: Any) -> None:
    without = LmiRollingContract(MODEL)
    assert refusal_of(contract(write=whole_answer), call(document)) == refusal_of(without, call(document))


def test_an_array_of_inputs_is_refused() -> None:
    reply = refusal_of(contract(write=whole_answer), call({"inputs": ["x", "y"]}))
    assert (reply.status, json.loads(reply.body)["code"]) == (424, 424)


def test_formatters_pass_on_what_the_request_says() -> None:
    def read(*_: Any, **__: Any) -> TextInput:
        return TextInput(input_text="x", adapters="f")

    document = {"inputs": "x", "adapters": "a"}
    by_body = contract(write=whole_answer, enable_lora=True)
    assert by_body.parse(call(document)).requests[0].adapter == "a"
    by_formatter = contract(read=read, enable_lora=True)
    assert by_formatter.parse(call(document)).requests[0].adapter == "f"
    with_header = replace(call(document), headers=request_headers(("X-Amzn-SageMaker-Adapter-Identifier", "h")))
    assert by_formatter.parse(with_header).requests[0].adapter == "h"


# Formatters of the asynchronous mode.


def changed_by(read: Callable[..., Any], request: Call) -> Call:
    formatters = Formatters(FormatterThread(60), read).offering(tokenizer="tokenizer")
    assert formatters.input is not None
    return formatted_call(formatters.input, request)


def completion_of(document: Any) -> Call:
    """Return the completion request that vLLM answers in place of a body with `inputs`."""
    completion, _ = LmiAsyncContract(configured(MODEL, async_mode=True)).as_completion(call(document))
    return completion


def renamed(decoded_payload: dict[str, Any], tokenizer: Any = None, **kwargs: Any) -> dict[str, Any]:
    if "inputPrompt" in decoded_payload:
        decoded_payload["inputs"] = decoded_payload.pop("inputPrompt")
    decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", 256)
    return decoded_payload


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b'{"inputPrompt": "Hi"}', "application/json", b'{"inputs": "Hi", "parameters": {"max_new_tokens": 256}}'),
        (
            b'{"prompt": "Hi", "parameters": {"max_new_tokens": 5}}',
            "",
            b'{"prompt": "Hi", "parameters": {"max_new_tokens": 5}}',
        ),
        (b"Hi", "text/plain", b'{"inputs": ["Hi"], "parameters": {"max_new_tokens": 256}}'),
        (
            b'{"messages": [], "adapters": "a"}',
            "application/json; charset=utf-8",
            b'{"messages": [], "parameters": {"max_new_tokens": 256}, "adapters": "a"}',
        ),
    ],
)
def test_a_payload_formatter_changes_the_body_before_it_is_parsed(
    body: bytes, content_type: str, expected: bytes
) -> None:
    changed = changed_by(renamed, call(body, content_type))
    assert (changed.body, changed.content_type) == (expected, "application/json")


def test_the_example_of_the_page_for_the_asynchronous_mode_changes_bodies_and_events() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formatters.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    changed = changed_by(names["read"], call({"question": "Why?"}))
    assert json.loads(changed.body) == {"messages": [{"role": "user", "content": "Why?"}]}
    assert names["write"]('data: {"id": "x"}\n\n') == 'data: {"id": "x", "reviewed": true}'
    assert names["write"]("data: [DONE]\n\n") == "data: [DONE]\n\n"


def test_a_payload_formatter_gets_the_tokenizer_where_it_takes_it_and_never_sees_adapters() -> None:
    seen: list[Any] = []

    def positional(payload: Any) -> Any:
        seen.append(payload.copy())
        return payload

    def named(payload: Any, tokenizer: Any) -> Any:
        seen.append(tokenizer)
        return payload

    def anything(payload: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return payload

    for read in (positional, named, anything):
        changed_by(read, call({"inputs": "x", "adapters": "a"}))
    assert seen == [{"inputs": "x"}, "tokenizer", {"tokenizer": "tokenizer"}]


@pytest.mark.parametrize(
    ("read", "request_", "message"),
    [
        (failing, call(PROMPT), "Custom formatter failed: 'question'"),
        (lambda given: None, call(PROMPT), "Custom formatter failed: the input formatter returned NoneType; expected"),
        (
            lambda given: {"inputs": object()},
            call(PROMPT),
            "Custom formatter failed: Object of type object is not JSON",
        ),
        (renamed, call(b"{"), "Input Parsing failed. The body is not valid JSON"),
        (renamed, call(b"\xff", "text/plain"), "Input Parsing failed. The body is not valid text/plain"),
    ],
)
def test_a_failing_payload_formatter_refuses_its_request_and_says_why(
    read: Callable[..., Any], request_: Call, message: str
) -> None:
    with pytest.raises(ContractError) as caught:
        changed_by(read, request_)
    reply = caught.value.reply
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert json.loads(reply.body)["error"].startswith(message)


def test_a_request_with_inputs_becomes_a_completion_for_an_output_formatter() -> None:
    asked = {
        "inputs": "Tell me",
        "model": "m",
        "parameters": {"max_new_tokens": 2, "do_sample": False, "stop_sequences": ["."], "return_full_text": True},
    }
    completion = completion_of(asked)
    assert completion.body == (
        b'{"prompt":"Tell me","stream":false,"max_tokens":2,"min_tokens":0,"temperature":0.0,"top_k":0,"top_p":1.0,'
        b'"min_p":0.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"stop":["."],'
        b'"include_stop_str_in_output":false,"ignore_eos":false,"skip_special_tokens":true,'
        b'"spaces_between_special_tokens":true,"echo":true,"model":"m"}'
    )


def test_details_and_streams_ask_vllm_for_tokens_and_usage_as_lmi_does() -> None:
    def completion(**more: Any) -> dict[str, Any]:
        given = {"inputs": "x", "parameters": {"details": True, "decoder_input_details": True}, **more}
        document: dict[str, Any] = json.loads(completion_of(given).body)
        return document

    shown = {"logprobs": 1, "return_tokens_as_token_ids": True}
    assert completion().items() >= {**shown, "prompt_logprobs": 1}.items()
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True).items() >= {**shown, "stream": True, "stream_options": usage}.items()


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"json_object": True}, {"json_object": True}),
        ({"json": {"type": "object"}}, {"json": '{"type":"object"}'}),
        ({"grammar": "root ::= x", "disable_any_whitespace": True}, {"grammar": "root ::= x"}),
    ],
)
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_a_constraint_stays_one(name: str, outputs: dict[str, Any], expected: dict[str, Any]) -> None:
    asked = {"inputs": "x", "parameters": {name: outputs}}
    document = json.loads(completion_of(asked).body)
    one_line = "disable_any_whitespace" in outputs
    assert document["structured_outputs"] == {**expected, "disable_any_whitespace": one_line}
    assert "guided_decoding" not in document


def test_a_request_that_lmi_refuses_is_refused_before_it_becomes_a_completion() -> None:
    with pytest.raises(ContractError):
        completion_of({"inputs": "x", "parameters": {"max_new_tokens": 0}})


class Dumped:
    """A response with pydantic's methods, like the responses of vLLM."""

    def model_dump_json(self) -> str:
        return '{"id":"x"}'


class Dumpable:
    def model_dump(self) -> dict[str, Any]:
        return {"id": "ü"}


def formatted_event(value: Any) -> CollectedReply:
    """Return the reply for a stream of one event. The output formatter returns `value` for this event."""

    async def reply() -> CollectedReply:
        client, formatters = CollectedReply(), Formatters(FormatterThread(60), output=lambda response: value)
        writer = FormattedReply(client, formatters, AsyncForm(), "/v1/completions")
        writer.start(200, "text/event-stream")
        writer.write(b'data: {"id":"x"}\n\n')
        await until(lambda: client.parts or client.finished)
        writer.cancel()
        formatters.thread.stop()
        return client

    return asyncio.run(reply())


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (Dumped(), b'{"id":"x"}\n'),
        (Dumpable(), '{"id": "ü"}\n'.encode()),
        ({"custom_formatter_applied": True}, b'{"custom_formatter_applied": true}\n'),
        ('data: {"id": 1}\n\n', b'data: {"id": 1}\n\n\n'),
        ("", b"\n"),
    ],
)
def test_what_an_output_formatter_returns_is_sent_as_a_line(value: Any, line: bytes) -> None:
    assert formatted_event(value).parts == [line]


@pytest.mark.parametrize("value", [None, 5, [1], b"x", {"x": object()}])
def test_what_cannot_be_sent_fails_the_request(value: Any) -> None:
    reply = formatted_event(value).whole
    assert reply is not None
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert json.loads(reply.body)["error"].startswith("Custom formatter failed: ")
