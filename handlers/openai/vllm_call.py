"""A call of OpenAI's routes that vLLM's front end answers.

The front end runs as an ASGI application in this process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec

from engines.errors import DeadlineExceeded, InvalidRequest
from handlers.contract import JSON, LONG_BODY, Call, Reply, ReplyWriter, ended_at_deadline, media_type
from handlers.openai.constraints import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.error_forms import error_form
from handlers.openai.media.limits import MediaMemory
from handlers.openai.media.speech import SPEECH, check_form
from handlers.openai.routes import error_reply, refuse
from handlers.openai.vllm_body import for_vllm
from handlers.parsing.images import ImageLoader
from handlers.parsing.json_limits import off_the_loop

logger = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
_COMMENT = b":"  # Begins a comment of a stream. It keeps the connection open while the answer waits for the engine.
# Routes whose streams are held back until the first token, because the engine may refuse the request until then.
_GENERATED = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES, *SPEECH})
# Request headers that are not copied to the application. `scope` sets the length, the content type and the id itself,
# the body is no longer chunked, and Slipway itself sends the load report.
_OURS = frozenset(
    {b"content-length", b"content-type", b"transfer-encoding", b"x-request-id", b"endpoint-load-metrics-format"}
)
_FRAMING = frozenset({"content-type", "content-length"})


@dataclass(frozen=True, slots=True)
class VllmApp:
    """vLLM's front end of a model."""

    app: Any  # The FastAPI application.
    llm: Any  # vLLM's engine, which identifies requests by the ids of their answers.
    parses_tools: bool = False  # Whether the model has a tool-call parser.
    media: MediaMemory | None = None  # The memory for the images, audio and videos of all requests.
    images: ImageLoader | None = None
    most_sound_mib: int = 25  # The size limit of a file to be transcribed.
    # Returns the reply to an exception of the application, or None if the client did not cause it.
    refusal: Callable[[BaseException], Reply | None] = lambda _: None


class VllmCall:
    """A running call in vLLM's front end. A task runs the front end as an ASGI application."""

    def __init__(
        self, vllm: VllmApp, openai_call: OpenAICall, call: Call, writer: ReplyWriter, path: str, model: str | None
    ) -> None:
        self._vllm, self._openai_call, self._call, self._writer, self._path = vllm, openai_call, call, writer, path
        self._model = model
        self._errors = error_form(path)
        self._held_back = b""  # The events that are held back until the engine begins the answer.
        self._gone = asyncio.Event()
        self._body_read = False
        self._status, self._content_type = 0, ""
        self._headers: tuple[tuple[str, str], ...] = ()
        # The header with the id from the body. Empty if the body has no id.
        self._id_header: tuple[tuple[str, str], ...] = ()
        self._started = self._complete = False
        if path in _GENERATED:
            openai_call.on_begin = self._release
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run())  # None when it has ended.

    @property
    def request_id(self) -> str:
        return self._call.request_id

    def cancel(self) -> None:
        """Tell the front end that the client has disconnected. Its tasks end, and further output is dropped."""
        self._gone.set()
        if self._status and not self._complete and self._task is not None:
            self._task.cancel()  # A reply that has begun does not listen for a disconnect.

    def _miss_deadline(self, error: DeadlineExceeded) -> None:
        """Answer with an error, and end the front end's tasks as if the client had disconnected."""
        begun = self._status and not self._complete
        self._finish(ended_at_deadline(refuse(error)))
        self._gone.set()
        if begun and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        call, path = self._call, self._path
        current_call.set(self._openai_call)
        began = time.monotonic()
        try:
            self._call = await off_the_loop(call.body, self._read)
            if self._call.request_id != call.request_id:  # the body has an id
                self._id_header = (("x-request-id", self._call.request_id),)
            call = self._call
            self._openai_call.request_id = call.request_id
            self._openai_call.start_deadline(self._miss_deadline)
            await self._vllm.app(scope(call, path), self._receive, self._send)
        except InvalidRequest as error:
            self._finish(refuse(error))
        except UnicodeEncodeError:
            self._finish(error_reply("The body holds text that is not valid Unicode.", "BadRequestError", 400))
        except Exception as error:
            # If the engine has failed, some of vLLM's streams raise other errors as a result.
            if not self._openai_call.failed:
                if (refused := self._vllm.refusal(error)) is not None:
                    self._finish(refused)
                else:
                    logger.exception("vLLM's front end failed", extra={"request_id": call.request_id})
        finally:
            self._openai_call.close()
            if not self._gone.is_set():
                reason = self._openai_call.failed or "Internal server error"
                self._finish(error_reply(reason, "InternalServerError", 500))
            # `_gone` does not tell whether the reply is complete, because the server cancels every call in the end.
            if self._complete and self._openai_call.generates:
                failed = bool(self._openai_call.failed)
                self._openai_call.statistics.calls.count(time.monotonic() - began, failed=failed)
            self._task = None  # A cancelled task holds its exception, whose traceback holds this object.
            if len(self._call.body) >= LONG_BODY:
                gc.collect(0)  # Pydantic's union of message types leaves reference cycles that hold the images.

    def _read(self) -> Call:
        """Return the call for vLLM.

        Raises:
            InvalidRequest: The call is refused.
        """
        call, openai_call = self._call, self._openai_call
        if self._path in SPEECH:
            check_form(call, self._vllm.most_sound_mib)
            return call
        return for_vllm(call, self._path, openai_call, model=self._model, parses_tools=self._vllm.parses_tools)

    async def _receive(self) -> dict[str, Any]:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        """Pass on the application's messages.

        The reply begins only with its first bytes, because these show whether it is a stream.
        """
        if self._gone.is_set():
            raise asyncio.CancelledError  # Only this error ends the application's work on the call.
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._content_type = headers.get("content-type", "")
            self._headers = tuple(pair for pair in headers.items() if pair[0] not in _FRAMING) + self._id_header
            if self._path in SPEECH and media_type(self._content_type) == _EVENTS:
                self._openai_call.begin_stream()
        elif message["type"] == "http.response.body":
            self._pass_on(message.get("body", b""), last=not message.get("more_body", False))
            await self._writer.drain()

    def _pass_on(self, data: bytes, *, last: bool) -> None:
        writer = self._writer
        if self._path in _GENERATED and not (last or self._openai_call.begun or data.startswith(_COMMENT)):
            self._held_back += data  # vLLM begins a stream before the engine can refuse it
            return
        if self._held_back:
            data, self._held_back = self._held_back + data, b""
        if last and not self._started:
            self._reply(self._whole(data))
        elif last:
            writer.end(data)
        elif data:
            if not self._started:
                self._started = True
                writer.start(self._status, self._content_type, self._reply_headers())
            writer.write(data)
            self._errors.sent(data)
        self._complete = self._complete or last

    def _release(self) -> None:
        """Send the events that were held back."""
        if self._held_back and not self._gone.is_set():
            self._pass_on(b"", last=False)

    def _whole(self, data: bytes) -> Reply:
        """Return the reply for an answer that comes in one piece.

        A stream with only an error gets the error's status.
        """
        place = data.find(b'data: {"error":')
        if place < 0 or self._openai_call.begun or media_type(self._content_type) != _EVENTS:
            return Reply(self._status, self._content_type, data, self._reply_headers())
        document = msgspec.json.decode(data[place:].removeprefix(b"data: ").partition(b"\n\n")[0])
        return Reply(document["error"]["code"], JSON, msgspec.json.encode(document), self._headers)

    def _reply_headers(self) -> tuple[tuple[str, str], ...]:
        call = self._openai_call
        return (*self._headers, *((*call.not_held, *call.reached) if self._status < 400 else ()))

    def _reply(self, reply: Reply) -> None:
        self._writer.reply(self._errors.whole(reply) if reply.status >= 400 else reply)

    def _finish(self, reply: Reply) -> None:
        if self._complete or self._gone.is_set():
            return
        self._complete = True
        if not self._started:
            self._reply(reply)
        elif media_type(self._content_type) == _EVENTS:
            self._writer.end(self._errors.last_events(reply))
        else:
            self._writer.end(b"")


def scope(call: Call, path: str) -> dict[str, Any]:
    """Return the call as an ASGI scope. The application uses the request's id in its answer."""
    headers = [(name, value) for name, value in call.headers.items() if name not in _OURS]
    if call.content_type:
        headers.append((b"content-type", call.content_type.encode("latin-1", "replace")))
    headers += [
        (b"content-length", str(len(call.body)).encode()),
        (b"x-request-id", call.request_id.encode("latin-1", "replace")),
    ]
    return {
        "type": "http",
        # With a `spec_version` below 2.4, Starlette listens for a disconnect while it streams. If the client
        # disconnects, this listener leaves a reference cycle with the request. So `VllmCall` cancels the application
        # instead.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(call.query).encode(),
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
