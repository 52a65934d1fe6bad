"""Slipway's contract for completions and chats. The contract also decides which calls Slipway answers itself.

It leaves these calls to vLLM's serving classes: requests with a field that `body` lacks, requests with a value that
vLLM would convert or refuse, and chats with models whose answers are parsed for tool calls or reasoning. A request gets
the same bytes either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engines.request import EngineMemo, GenerationRequest
from handlers.contract import JSON, Call, Exchange
from handlers.openai.answer import VLLM_FORM, AnswerForm, AnswerOptions
from handlers.openai.body import (
    Body,
    ChatBody,
    CompletionBody,
    LeftToVllm,
    Message,
    read_chat,
    read_completion,
    sampling_of,
)
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import GREEDY_BELOW

# Request headers that change the answer of vLLM's serving classes.
_STEERING = frozenset({b"x-data-parallel-rank", b"x-session-id", b"x-vllm-priority"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """The settings of vLLM's front end that the contract needs."""

    model: str  # The model's name in answers.
    accepts: Callable[[str], bool]  # Returns True if a name is the model's.
    adapters: Collection[str]  # The names of the adapters. They change as adapters are loaded and unloaded.
    fingerprint: str | None  # `system_fingerprint` of answers.
    role: str  # The role of answers in a chat.
    default_sampling: Mapping[str, Any]  # The model's default sampling parameters, by vLLM's names.
    most_new_tokens: int | None  # The limit on new tokens. No request can raise the limit.
    max_model_len: int  # The length of the model's context in tokens.
    most_prompts: int  # The maximum number of prompts in the body of a completion.
    most_sequences: int  # The maximum number of sequences for each prompt.
    most_stop_strings: int
    # Makes a prompt from messages. If None, vLLM's serving classes answer all chats.
    render: Callable[[list[dict[str, Any]]], str] | None


class OpenAIContract:
    """Parses completions and chats for one model."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        # Caches of parsed requests, keyed by their parameters. Each call adds its id, prompt and adapter.
        self._completions, self._chats = ParameterMemo[GenerationRequest](), ParameterMemo[GenerationRequest]()

    def parse(
        self,
        call: Call,
        path: str,
        *,
        any_model: bool = False,
        adapter: str | None = None,
        form: AnswerForm = VLLM_FORM,
        body: Body | None = None,
    ) -> Exchange | None:
        """Parse a call.

        Args:
            call: The call. If the call was split into its fields, it is not a common call.
            path: The path of OpenAI's API that the call is for.
            any_model: True accepts every `model` in the body.
            adapter: Replaces the `model` in the body. An empty string means the model itself.
            form: The form of the answer.
            body: The body, if it was decoded.

        Returns:
            The exchange, or None if the call is left to vLLM's serving classes.
        """
        if call.fields is not None or not is_common(call):
            return None
        try:
            if path == CHAT:
                read: ChatBody | CompletionBody = body if isinstance(body, ChatBody) else read_chat(call.body)
            elif path == COMPLETIONS:
                read = body if isinstance(body, CompletionBody) else read_completion(call.body)
            else:
                return None
            name = read.model if adapter is None else adapter
            adapter = named_adapter(name, self._front_end.adapters, self._front_end.accepts, any_model=any_model)
            if isinstance(read, ChatBody):
                return self._chat(call, read, adapter, form)
            return self._completion(call, read, adapter, form)
        except (msgspec.DecodeError, LeftToVllm) as reason:
            if call.explanation is not None:
                call.explanation.because.append(f"Slipway's own contract leaves it to vLLM's front end: {reason}")
            return None

    def _completion(self, call: Call, body: CompletionBody, adapter: str | None, form: AnswerForm) -> Exchange:
        prompts = self._prompts(body)
        key = msgspec.json.encode(msgspec.structs.replace(body, prompt="", model=None, user=None))
        if (request := self._completions.get(key)) is None:
            max_tokens = 16 if body.max_tokens is None else body.max_tokens
            request = self._completions.keep(key, self._request(body, body.n, max_tokens, body.logprobs))
        options = self._options(body, f"cmpl-{call.request_id}", request, adapter)
        requests = tuple(
            [
                msgspec.structs.replace(
                    request, request_id=f"{options.id}-{place}", prompt=prompt, adapter=adapter, **call.steering
                )
                for place, prompt in enumerate(prompts)
            ]
        )
        answer = form.completion(options, len(prompts), stream=bool(body.stream))
        return Exchange(requests, answer, model_defaults=self._front_end.default_sampling)

    def _prompts(self, body: CompletionBody) -> Sequence[str | tuple[int, ...]]:
        prompt = body.prompt
        if not prompt:
            raise LeftToVllm("prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not all(prompt):
            raise LeftToVllm("prompt")
        if all(isinstance(item, int) for item in prompt):
            return [tuple(prompt)]  # type: ignore[arg-type]
        if len(prompt) > self._front_end.most_prompts:
            raise LeftToVllm("prompt")
        if all(isinstance(item, str) for item in prompt):
            return prompt  # type: ignore[return-value]
        if all(isinstance(item, list) for item in prompt):
            return [tuple(item) for item in prompt]  # type: ignore[arg-type]
        raise LeftToVllm("prompt")

    def _chat(self, call: Call, body: ChatBody, adapter: str | None, form: AnswerForm) -> Exchange:
        if self._front_end.render is None:
            raise LeftToVllm("chats")
        key = msgspec.json.encode(msgspec.structs.replace(body, messages=[], model=None, user=None))
        if (request := self._chats.get(key)) is None:
            given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            top = body.top_logprobs or 0
            if top and not body.logprobs:
                raise LeftToVllm("top_logprobs")
            request = self._request(body, body.n or 1, given, top if body.logprobs else None)
            request = self._chats.keep(key, msgspec.structs.replace(request, add_special_tokens=False))
        options = self._options(body, f"chatcmpl-{call.request_id}", request, adapter)
        try:
            prompt = self._front_end.render(list(map(_message, body.messages)))
        except Exception as error:  # the model's template may raise any exception
            raise LeftToVllm(str(error)) from None
        request = msgspec.structs.replace(
            request, request_id=options.id, prompt=prompt, adapter=adapter, **call.steering
        )
        answer = form.chat(options, stream=bool(body.stream))
        return Exchange((request,), answer, model_defaults=self._front_end.default_sampling)

    def _request(self, body: Body, sequences: int, max_tokens: int | None, logprobs: int | None) -> GenerationRequest:
        """Return the request for a prompt, without the id, the prompt and the adapter."""
        front_end = self._front_end
        if max_tokens is not None and max_tokens > front_end.max_model_len:
            raise LeftToVllm("max_tokens")
        if sequences > front_end.most_sequences:
            raise LeftToVllm("n")
        if isinstance(body.stop, list) and len(body.stop) > front_end.most_stop_strings:
            raise LeftToVllm("stop")
        limits = (front_end.default_sampling.get("max_tokens") if max_tokens is None else max_tokens,)
        known = [limit for limit in (*limits, front_end.most_new_tokens) if limit is not None]
        sampling = sampling_of(body, front_end.default_sampling, min(known, default=None))
        if sequences > 1 and sampling.temperature < GREEDY_BELOW:
            raise LeftToVllm("n")
        return GenerationRequest(
            sampling=sampling,
            # If the engine does not stream several sequences, it sorts them by probability. vLLM keeps their order.
            stream=bool(body.stream) or sequences > 1,
            sequences=sequences,
            candidates=sequences,
            room=max(1, body.min_tokens),
            want_tokens=logprobs is not None,
            want_logprobs=logprobs is not None,
            tokens_apart=True,
            top_tokens=logprobs or 0,
            memo=EngineMemo(),
        )

    def _options(self, body: Body, answer_id: str, request: GenerationRequest, adapter: str | None) -> AnswerOptions:
        asked = body.stream_options
        usage = asked is not None and bool(asked.include_usage)
        return AnswerOptions(
            id=answer_id,
            created=int(time.time()),
            model=adapter or self._front_end.model,
            fingerprint=self._front_end.fingerprint,
            role=self._front_end.role,
            sequences=request.sequences,
            logprobs=request.want_logprobs,
            top=request.top_tokens,
            usage=usage,
            running_usage=usage and asked is not None and bool(asked.continuous_usage_stats),
            stop_token_ids=body.stop_token_ids or (),
        )


def is_common(call: Call) -> bool:
    """Return True if neither the content type nor the headers change the answer."""
    # `media_type` would accept a blank before the semicolon. vLLM refuses it (`validate_json_request`).
    is_json = call.content_type.partition(";")[0].lower() == JSON
    return is_json and _STEERING.isdisjoint(call.headers)


def named_adapter(
    name: str | None, adapters: Collection[str], accepts: Callable[[str], bool], *, any_model: bool
) -> str | None:
    """Return the adapter that a call names, or None if it names the model.

    Args:
        name: The name in the call.
        adapters: The names of the adapters.
        accepts: Returns True if a name is the model's.
        any_model: True if every other name means the model.

    Raises:
        LeftToVllm: The name is unknown.
    """
    if name and name in adapters:
        return name
    if name and not any_model and not accepts(name):
        raise LeftToVllm("model")
    return None


def _message(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if not isinstance(content, str):
        content = [{"type": part.type, "text": part.text} for part in content]
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    return turn
