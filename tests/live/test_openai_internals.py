"""Parts of vLLM that Slipway's OpenAI front end uses, without an engine: the options, and the limits of requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from engines.errors import InvalidParameter
from handlers.model_config import ModelConfig

CONFIG = ModelConfig(name="model", model_dir=Path("."), model_id="m")


def params(**fields: Any) -> Any:
    from vllm import SamplingParams

    made = SamplingParams()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def limits() -> Any:
    from engines.vllm.sampling import SamplingTranslator

    return SamplingTranslator(max_model_len=16, max_top_tokens=1, vocabulary_size=100)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [100]},
        {"stop_token_ids": list(range(99)) * 2},
        {"allowed_token_ids": [100]},
        {"logit_bias": {100: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"stop": ["x"] * 65},
        {"stop": ["x" * 1001]},
        {"top_k": 2**63},
        {"min_tokens": 2**63},
        {"extra_args": {"typical_p": "x"}},
        {"extra_args": {"typical_p": True}},
        {"extra_args": {"typical_p": 0.0}},
        {"extra_args": {"typical_p": math.nan}},
        {"extra_args": {"kv_transfer_params": "x"}},
        {"extra_args": {"kv_transfer_params": [1]}},
        {"extra_args": {"ec_transfer_params": 1.5}},
        # These take long.
        {"bad_words": ["x" * 1_000_000]},
        {"bad_words": [str(number) for number in range(2000)]},
        {"repetition_detection": SimpleNamespace(max_pattern_size=3000, min_count=2)},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_would_harm_the_engine_is_refused_by_name(fields: dict[str, Any]) -> None:
    from handlers.openai.vllm.parameter_checks import check_parameters

    with pytest.raises(InvalidParameter) as caught:
        check_parameters(params(**fields), limits(), None)
    assert caught.value.parameter == next(iter(fields.get("extra_args", fields)))


def test_the_deepest_parameters_that_are_read_reach_the_engine() -> None:
    from handlers.parsing.json_limits import MOST_DEPTH

    value: Any = 1
    for level in range(MOST_DEPTH):
        value = [value] if level % 2 else {"a": value}
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(("tokens", "most", "given"), [(65536, 1, True), (65537, 1, False), (10000, 20, False)])
def test_log_probabilities_of_the_prompt_have_a_limit(tokens: int, most: int, given: bool) -> None:
    from handlers.openai.vllm.parameter_checks import check_prompt_logprobs

    with contextlib.nullcontext() if given else pytest.raises(InvalidParameter, match="prompt_logprobs"):
        check_prompt_logprobs(params(prompt_logprobs=most), tokens)


def test_what_does_no_harm_passes() -> None:
    from handlers.openai.vllm.parameter_checks import check_parameters

    check_parameters(params(), limits(), None)
    given = params(stop="x", stop_token_ids=[99], logit_bias={0: -100.0}, extra_args={"typical_p": 1}, seed=-5)
    check_parameters(given, limits(), None)


def test_a_clients_error_is_told_where_a_reply_had_begun() -> None:
    from vllm.exceptions import GracefulHTTPError, VLLMValidationError

    from handlers.openai.vllm.errors import refusal

    refused = refusal(VLLMValidationError("no such token", parameter="bad_words"))
    assert refused is not None
    assert refused.body == (
        b'{"error":{"message":"no such token (parameter=bad_words)","type":"BadRequestError","param":"bad_words",'
        b'"code":400}}'
    )
    begun = RuntimeError("Caught handled exception, but response already started.")
    begun.__cause__ = GracefulHTTPError("full", HTTPStatus.SERVICE_UNAVAILABLE)
    told = refusal(begun)
    assert told is not None
    assert told.status == 503
    assert refusal(ValueError("a bug of vLLM's")) is refusal(RuntimeError()) is None


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("error", [UnicodeEncodeError("utf-8", "\ud800", 0, 1, "x"), OverflowError(), "cancelled"])
async def test_what_fails_after_vllm_has_registered_it_is_taken_out_again_and_nothing_else(
    error: Any, sequences: int
) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    from engines.statistics import EngineStatistics
    from handlers.openai.current_call import OpenAICall
    from handlers.openai.vllm.engine_client import EngineClient
    from handlers.queue import EngineQueue

    aborted: list[str] = []

    class Llm:
        """A stand-in for vLLM's engine that cannot send a request to its process."""

        output_processor = OutputProcessor(None, log_stats=False)
        engine_core = SimpleNamespace(abort_requests_async=lambda ids: _note(aborted, ids))
        errored = log_requests = False
        abort = AsyncLLM.abort

        def register(self, request_id: str, number: int) -> None:
            params = SamplingParams(detokenize=False)
            request = EngineCoreRequest(f"{request_id}-{number}", [1], None, params, None, 0.0, None, None, None)
            request.external_req_id = request_id
            self.output_processor.add_request(request, None)

        async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
            for number in range(params.n):
                self.register(request_id, number)
            if isinstance(error, Exception):
                raise error
            await asyncio.Event().wait()

    llm: Any = Llm()
    llm.register("a", 99)  # another client's request with the same id
    engine: Any = _engine(llm)
    call = OpenAICall(EngineQueue(SimpleNamespace(statistics=EngineStatistics()), 4))  # type: ignore[arg-type]
    call.take(sequences)
    stream = EngineClient(engine, CONFIG)._generate(call, {}, SamplingParams(n=sequences), "a", {}, places=sequences)
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises((UnicodeEncodeError, VLLMValidationError, asyncio.CancelledError)):
        await task
    assert list(llm.output_processor.request_states) == ["a-99"]
    assert aborted == [f"a-{number}" for number in range(sequences)]


async def _note(noted: list[str], ids: list[str]) -> None:
    noted += ids


def _engine(llm: Any) -> Any:
    """Return a stand-in for Slipway's engine that accepts requests at once."""
    from engines.statistics import EngineStatistics

    async def wait_until_ready() -> None: ...

    return SimpleNamespace(
        async_llm=llm,
        statistics=EngineStatistics(),
        adapters=None,
        wait_until_ready=wait_until_ready,
        waits=False,
        sent_media=SimpleNamespace(engine_got=lambda _: None),
    )


def test_a_body_that_vllm_stumbles_over_is_the_clients_fault_until_something_is_generated() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from engines.statistics import EngineStatistics
    from handlers.openai.current_call import OpenAICall, current_call
    from handlers.openai.vllm.errors import answer_stumbling_readers
    from handlers.queue import EngineQueue

    call = OpenAICall(EngineQueue(SimpleNamespace(statistics=EngineStatistics()), 4))  # type: ignore[arg-type]
    app = FastAPI()
    answer_stumbling_readers(app)

    @app.post("/responses")
    def responses() -> int:
        empty: list[int] = []
        return empty[0]

    async def of_the_call(*connection: Any) -> None:
        current_call.set(call)
        await app(*connection)

    message = "the body has a value that cannot be used: list index out of range"
    refusal = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    with TestClient(of_the_call, raise_server_exceptions=False) as client:
        refused = client.post("/responses")
        assert (refused.status_code, refused.json()) == (400, {"error": refusal})
        call.submitted = True
        assert client.post("/responses").status_code == 500


TEXTS = st.text(max_size=20)
CONTENTS = TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1, max_size=3)
CHATS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        CONTENTS,
    ),
    min_size=1,
    max_size=5,
)


def test_chats_are_rendered_as_vllms_renderer_does_without_asking_it(sample_model: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.hf import HfRenderer

    from handlers.openai.vllm.chat_prompts import chat_renderer

    config = AsyncEngineArgs(model=str(sample_model), max_model_len=512).create_engine_config()
    renderer = HfRenderer(config, AutoTokenizer.from_pretrained(sample_model))
    online = SimpleNamespace(
        chat_template=None, chat_template_content_format="auto", default_chat_template_kwargs={"documents": None}
    )
    chat = SimpleNamespace(online_renderer=online, renderer=renderer, model_config=config.model_config)
    params = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}]).build_chat_params(None, "auto")
    params = params.with_defaults({"tools": None, "tokenize": False})
    theirs, asked = renderer.render_messages, []
    renderer.render_messages = lambda *given: asked.append(given) or theirs(*given)
    render = chat_renderer(chat)
    assert asked, "the two are compared first"
    asked.clear()

    @settings(max_examples=40)
    @given(messages=CHATS)
    def check(messages: list[dict[str, Any]]) -> None:
        assert render(messages) == theirs(messages, params)[1]["prompt"]

    check()
    assert not asked

    renderer.tokenizer.chat_template = "{{ raise_exception('never') }}"
    render = chat_renderer(chat)
    with pytest.raises(Exception, match="never"):
        render([{"role": "user", "content": "x"}])
    assert asked, "a template that refuses the trial is left to vLLM"


def test_a_wrong_parameter_of_a_query_is_named_and_is_no_fault_of_the_body() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from handlers.openai.vllm.errors import name_faults

    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    name_faults(app)

    @app.get("/v1/responses/{response_id}")
    async def responses(response_id: str, starting_after: int | None = None) -> None:
        pass

    with TestClient(app) as client:
        refused = client.get("/v1/responses/x?starting_after=abc")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "query.starting_after")
    assert "body" not in error["message"]


async def _begun_together(*requests: Any) -> list[Any]:
    from handlers.openai.vllm.responses import with_own_id

    tasks: dict[str, None] = {}
    beginning: set[str] = set()

    async def create(request: Any) -> str:
        await asyncio.sleep(0)
        if request.background:
            tasks[request.request_id] = None
        return "created"

    calls = (with_own_id(create, tasks, beginning, request) for request in requests)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert not beginning
    return [result if isinstance(result, str) else type(result).__name__ for result in results]


def test_two_responses_in_the_background_that_begin_together_need_their_own_ids() -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    def asked(own: str, background: bool = True) -> Any:
        return ResponsesRequest(input="x", request_id=own, background=background)

    refused = "VLLMValidationError"
    assert asyncio.run(_begun_together(asked("a"), asked("a"), asked("b"))) == ["created", refused, "created"]
    assert asyncio.run(_begun_together(asked("a"), asked("a", background=False))) == ["created", refused]
    assert asyncio.run(_begun_together(asked("a", False), asked("a", False))) == ["created"] * 2


def test_lists_in_requests_are_refused_with_their_first_wrong_item() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    from handlers.openai.vllm.app import routers
    from handlers.openai.vllm.tokenize import CountedChat

    routers()
    wrong: tuple[tuple[Any, str, Any], ...] = (
        (ChatCompletionRequest, "messages", {}),
        (ChatCompletionRequest, "messages", {"role": "x", "content": [1] * 50}),
        (CountedChat, "messages", {}),
        (CompletionRequest, "prompt", {}),
        (ResponsesRequest, "input", {}),
        (ResponsesRequest, "input", {"role": "user", "content": [{}] * 50}),
    )
    for kind, field, item in wrong:
        with pytest.raises(ValidationError) as one:
            TypeAdapter(kind).validate_python({field: [item]})
        with pytest.raises(ValidationError) as many:
            TypeAdapter(kind).validate_python({field: [item] * 50})
        assert many.value.error_count() == one.value.error_count()
        assert one.value.error_count() < 300
    with pytest.raises(ValidationError) as members:
        TypeAdapter(CompletionRequest).validate_python({"prompt": "a", "vllm_xargs": {str(n): {} for n in range(50)}})
    assert members.value.error_count() < 10
    assert TypeAdapter(ChatCompletionRequest).validate_python({"messages": [{"role": "user", "content": "a"}]}).messages


_PARTS = ["/", "a", "-", ".", "/tmp", "\n", " ", 'File "x", line 3, in f', 'File "', " at 0x", "ff", ">"]
_PARTS += ['", line ', ", in "]


@given(st.lists(st.sampled_from(_PARTS), max_size=14).map("".join))
def test_messages_lose_the_same_parts_as_in_vllm(message: str) -> None:
    from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

    from handlers.openai.vllm.errors import sanitized

    assert sanitized(message) == sanitize_message(message)


def test_arguments_of_vllm_have_the_names_of_options_in_messages() -> None:
    from handlers.openai.vllm.errors import sanitized

    message = (
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; `--max-model-len`'
    )
    names = "option.enable_auto_tool_choice and option.tool_call_parser to be set; `option.max_model_len`"
    assert sanitized(message) == f'"auto" tool choice requires {names}'
    listed = sanitized(message.partition(";")[0]).partition("; allowed: ")[2].split(", ")
    assert {"auto", "none", "hermes", "mistral"} < set(listed)
    for other in ("--my-own-argument", "a--max-model-len", "--max-model-length"):
        assert sanitized(other) == other


@pytest.mark.parametrize("part", ["/a", " ", 'File "', " at 0xf", '\nFile "a", line 1, in f'])
def test_a_long_message_takes_no_minutes(part: str) -> None:
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    from handlers.openai.vllm.errors import bound_errors

    bound_errors()
    refused = create_error_response(ValueError(f"no model {part * 100_000}"))
    assert refused.error.message.startswith("no model")


def test_ids_that_the_engine_would_repeat_are_bounded() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from handlers.openai.vllm.engine_client import EngineClient

    client = EngineClient(_engine(None), CONFIG)
    with pytest.raises(VLLMValidationError, match="`request_id` may have 512 characters"):
        client.generate({}, SamplingParams(), "x" * 513)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ('{"a": 1}', "tool_use"),
        ('{"a": "', "text"),
        ("", "text"),
        pytest.param('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "text", id="deep"),
    ],
)
def test_calls_of_a_message_that_cannot_be_decoded_are_text(arguments: str, kind: str) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    from handlers.openai.vllm.messages import with_whole_calls

    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}} for name in "ab"]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = ChatCompletionResponse.model_validate(
        {
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
    )
    converted = AnthropicServingMessages.messages_full_converter(SimpleNamespace(), with_whole_calls(answer))
    assert [block.type for block in converted.content] == (["text"] if kind == "text" else [kind, kind])
    assert converted.content[0].text == (arguments * 2 if kind == "text" else None)


def test_each_prompt_of_a_call_is_explained_once() -> None:
    from vllm import SamplingParams

    from engines.interface import ExplainedRequest
    from engines.statistics import EngineStatistics
    from handlers.openai.current_call import OpenAICall, current_call
    from handlers.openai.vllm.engine_client import EngineClient
    from handlers.queue import EngineQueue

    prepared: list[Any] = []

    def explain_prompt(prompt: Any, *_: Any) -> ExplainedRequest:
        prepared.append(prompt)
        return ExplainedRequest(token_ids=prompt["prompt_token_ids"], parameters={})

    async def ask(*, explains_one: bool) -> list[list[int]]:
        call = OpenAICall(EngineQueue(SimpleNamespace(statistics=EngineStatistics()), 100))  # type: ignore[arg-type]
        call.explained, call.explains_one = asyncio.get_running_loop().create_future(), explains_one
        current_call.set(call)
        prompts = [{"prompt": "a", "prompt_token_ids": [number]} for number in range(100)]
        generators = [client.generate(prompt, SamplingParams(), str(place)) for place, prompt in enumerate(prompts)]
        ended = await asyncio.gather(*map(anext, generators), return_exceptions=True)
        assert {type(error) for error in ended} == {asyncio.CancelledError}
        return [prompt.request.token_ids for prompt in call.explained.result()]

    config = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
    engine = _engine(SimpleNamespace(vllm_config=config))
    engine.explain_prompt, engine.tokenizer = explain_prompt, None
    engine.sampling = SimpleNamespace(
        prompt_logprobs_refusal="", typical_refusal="", check_listed_tokens=lambda _: None
    )
    client = EngineClient(engine, CONFIG)
    assert asyncio.run(ask(explains_one=False)) == [[number] for number in range(100)]
    assert len(prepared) == 100
    assert asyncio.run(ask(explains_one=True)) == [[0]]
    assert len(prepared) == 101
