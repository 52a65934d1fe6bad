"""Changes vLLM's `/v1/responses`: the ends of streams, and background responses.

`OpenAIServingResponses.background_tasks` gets the task of each background response, in the context of its call.
`response_store` has the state of the response. `event_store` has the events of the response's stream, and a signal for
new events. `responses_background_stream_generator` reads the events. tests/live/test_openai_internals.py checks these
internals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from openai.types.responses import ResponseFailedEvent, ResponseIncompleteEvent
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.exceptions import VLLMValidationError

from handlers.openai.current_call import current_call
from handlers.openai.vllm.tool_parsers import hiding_constraints

logger = logging.getLogger(__name__)


class ResponseFailed(ResponseFailedEvent):
    """The last event of a background response that has failed or was cancelled."""

    response: ResponsesResponse


class ResponseIncomplete(ResponseIncompleteEvent):
    """The last event of a response that `max_output_tokens` has cut off."""

    response: ResponsesResponse


class _BackgroundTasks(dict[str, "asyncio.Task[None]"]):
    """The tasks of vLLM's background responses, by the ids of the responses.

    A task keeps the resources of its call. If the task fails, the response gets the status `failed`. vLLM would leave
    the status at `queued`.
    """

    def __init__(self, serving: Any) -> None:
        super().__init__()
        self._responses: Mapping[str, Any] = serving.response_store
        self._events: Mapping[str, tuple[Sequence[Any], asyncio.Event]] = serving.event_store

    def __setitem__(self, response_id: str, task: asyncio.Task[None]) -> None:
        super().__setitem__(response_id, task)
        current_call.get().goes_on_in(task)
        task.add_done_callback(partial(self._ended, response_id))

    def _ended(self, response_id: str, task: asyncio.Task[None]) -> None:
        response = self._responses[response_id]
        if response.status in ("queued", "in_progress"):
            response.status = "failed"
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a response in the background failed: %s", type(error).__name__)
        self.pop(response_id, None)
        if response_id in self._events:
            self._events[response_id][1].set()

    async def events(self, response_id: str, starting_after: int | None = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a response. vLLM's generator would wait forever if the response fails.

        Raises:
            VLLMValidationError: The response has no events.
        """
        if response_id not in self._events:
            raise VLLMValidationError(f"Unknown response_id: {response_id}", parameter="response_id", value=response_id)
        events, arrived = self._events[response_id]
        place = 0 if starting_after is None else max(starting_after + 1, 0)
        while True:
            arrived.clear()
            while place < len(events):
                yield events[place]
                place += 1
            if response_id not in self:
                break
            await arrived.wait()
        response = self._responses[response_id]
        if response.status in ("failed", "cancelled"):
            yield ResponseFailed(type="response.failed", sequence_number=len(events), response=response)


def change_responses(responses: Any) -> None:
    """Change the serving object of responses: failures, the events at the end of a stream, and constraints."""
    responses.background_tasks = tasks = _BackgroundTasks(responses)
    responses.responses_background_stream_generator = tasks.events
    responses._convert_generation_error_to_streaming_response = _reraise
    responses.responses_stream_generator = _telling_incomplete(responses.responses_stream_generator)
    create = responses.create_responses
    if responses.enable_store:  # Otherwise vLLM stores nothing, and refuses background responses.
        create = partial(_stored, create)
    responses.create_responses = partial(with_own_id, create, tasks, set())
    renderer = responses.online_renderer
    if renderer.parser is not None:
        renderer.parser = hiding_constraints(renderer.parser)


async def with_own_id(
    create: Callable[..., Awaitable[Any]],
    running: Collection[str],
    beginning: set[str],
    request: ResponsesRequest,
    *rest: Any,
) -> Any:
    """Create a response. Refuse it if a background response with the same id is running.

    Otherwise the new response would replace the running response in `response_store`.

    Args:
        create: Creates the response. When it returns, the id of a background response is in `running`.
        running: The ids of the running background responses.
        beginning: The ids of background responses whose `create` has not returned yet.
        request: The request that the response answers.
        rest: Further arguments of `create`.

    Raises:
        VLLMValidationError: A background response with this id is running.
    """
    own = request.request_id
    if own in running or own in beginning:
        raise VLLMValidationError("`request_id` is that of a response that is being made", parameter="request_id")
    if not request.background:
        return await create(request, *rest)
    beginning.add(own)
    try:
        return await create(request, *rest)
    finally:
        beginning.discard(own)


async def _stored(create: Callable[..., Awaitable[Any]], request: ResponsesRequest, *rest: Any) -> Any:
    """Create a response. If the call asks for an explanation, store nothing, and run nothing in the background."""
    call = current_call.get()
    if request.background:
        call.leave_client()
    if call.explained is not None:
        request = request.model_copy(update={"background": False, "store": False})
    return await create(request, *rest)


def _reraise(error: Exception) -> str:
    """Raise the error of a stream. vLLM would make an event that OpenAI lacks, and that fails vLLM's own validation."""
    raise error


def _telling_incomplete(stream: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap vLLM's event generator, so that an incomplete response ends as in OpenAI's API. vLLM calls it completed."""

    async def events(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        async for event in stream(*args, **options):
            if event.type == "response.completed" and event.response.status == "incomplete":
                number, response = event.sequence_number, event.response
                yield ResponseIncomplete(type="response.incomplete", sequence_number=number, response=response)
            else:
                yield event

    return events
