"""Changes vLLM's `/v1/messages`, so that answers, prefilled turns and errors match Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.exceptions import GracefulHTTPError


class _Message(AnthropicMessagesResponse):  # type: ignore[misc]
    """A whole answer of `/v1/messages`. It has all fields of Anthropic's contract, including fields that are null."""

    @model_serializer(mode="wrap")
    def _with_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {**fields, "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


def change_messages(messages: Any) -> None:
    """Change the serving object of messages: prefilled turns, nulls in whole answers, and errors in streams."""
    whole, stream = messages.messages_full_converter, messages.message_stream_converter
    messages.to_chat_completion_request = partial(_continuing, messages.to_chat_completion_request)
    messages.messages_full_converter = lambda answer: _Message.model_construct(**dict(whole(with_whole_calls(answer))))
    messages.message_stream_converter = partial(_raising, stream)


def with_whole_calls(answer: ChatCompletionResponse) -> ChatCompletionResponse:
    """Return an answer in which tool calls with unreadable arguments have become text.

    vLLM's converter decodes the arguments of each tool call, and fails if a call is cut off or nested too deeply.
    """
    message = answer.choices[0].message
    for call in [*message.tool_calls]:
        try:
            json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            message.tool_calls.remove(call)
            message.content = (message.content or "") + call.function.arguments
    return answer


def _continuing(convert: Callable[..., ChatCompletionRequest], request: Any, **options: Any) -> ChatCompletionRequest:
    """Convert a request of Anthropic's API to a chat. If the last message is the assistant's, the answer continues it.

    Anthropic's API does the same, and clients use this to set how an answer begins. vLLM alone would begin a new turn.
    """
    chat = convert(request, **options)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat.add_generation_prompt, chat.continue_final_message = False, True
    return chat


async def _raising(
    convert: Callable[[AsyncIterator[str]], AsyncGenerator[str, None]], chunks: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Convert the chunks of a chat to the events of a message. If an error ends the chat, raise that error.

    vLLM's converter expects no errors among the chunks. Its events for errors have types that Anthropic's API lacks.

    Raises:
        GracefulHTTPError: The chat ended with an error.
    """
    errors: list[dict[str, Any]] = []

    async def until_error() -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            if chunk.startswith('data: {"error":'):
                errors.append(json.loads(chunk.removeprefix("data: "))["error"])
                return
            yield chunk

    async for event in convert(until_error()):
        if event.startswith("event: error\n"):
            errors.append({"message": "Internal server error", "code": 500})
            break
        yield event
    if errors:
        raise GracefulHTTPError(errors[0]["message"], HTTPStatus(errors[0]["code"]))
