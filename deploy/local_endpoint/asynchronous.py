"""Asynchronous calls (InvokeEndpointAsync): a bounded queue, and the tasks that answer its calls.

The input is in the call or at an `s3://` location. The answer is written to `s3://`. Each call ends with an answer or a
failure file. SNS is not supported: clients poll for the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import quote

from starlette.types import Message, Scope

from container.sources.location import S3Url, SourceError
from container.sources.s3 import check_path
from deploy.local_endpoint.data_capture import DataCapture
from deploy.local_endpoint.errors import (
    RuntimeApiError,
    constraint_violation,
    internal_failure,
    refused_answer,
    validation_error,
)
from deploy.local_endpoint.invocation import ContainerRequest, Invocation, is_loading
from deploy.local_endpoint.parameters import INFERENCE_ID, Headers, Parameters, value_of
from deploy.local_endpoint.settings import LocalSettings
from deploy.local_endpoint.storage import Storage, StorageError, location, object_url

logger = logging.getLogger(__name__)

MAX_INLINE = 128_000  # The largest body inside a call, in bytes.
MAX_PAYLOAD = 1 << 30  # The largest input from S3, and the largest answer, in bytes.
MAX_CALLS = 1000  # The maximum number of calls that wait or run.
_CONCURRENCY = 16  # The number of concurrent calls to the container.
_LARGE = 64 << 20  # Only one input of more than this number of bytes is in memory at a time.
_MAX_HEADERS = 4096  # The largest size of the headers of the container's answer, in bytes.
_TTL, _TIMEOUT = "21600", "900"  # SageMaker's defaults of RequestTTLSeconds and InvocationTimeoutSeconds.
_PING_SECONDS = 1.0  # The time between two checks for whether the container is ready.
_LAST_SECONDS = 2.0  # The time for writing the failure files of abandoned calls.
_STORAGE_THREADS = 8

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCall:
    """A checked call. All times are in seconds."""

    scope: Scope  # `scope["app"]` is the container's application.
    request: ContainerRequest  # Has no body if `source` is set.
    source: S3Url | None  # The location of the input, unless the call contains the input.
    output: S3Url
    failure: S3Url
    request_id: str  # The endpoint's request id, `x-amzn-RequestId`.
    inference_id: str
    ttl: float  # The time for which the call may wait.
    timeout: float  # The time limit for the container's answer.

    @classmethod
    def of(
        cls, scope: Scope, settings: LocalSettings, name: str, parameters: Parameters, body: bytes, request_id: str
    ) -> AsyncCall:
        """Check a call.

        Raises:
            RuntimeApiError: The call has no input, two inputs, or a location that is not allowed.
        """
        given = parameters.values
        headers = settings.container_headers(name, parameters)
        source = given.get("InputLocation")
        if (source is None) is (not body):
            raise validation_error("Exactly one of InputLocation and Body has to be given.")
        inference_id = given.get("InferenceId") or str(uuid.uuid4())
        if "InferenceId" not in given:
            headers = [*headers, (INFERENCE_ID, inference_id.encode())]
        stem = quote(inference_id, safe="")
        output, failures = settings.async_output, settings.async_failures or settings.async_output
        folder = output.key_prefix + _extension(given.get("S3OutputPathExtension", ""))
        return cls(
            # The extensions act on the client's connection, which may be closed while the call runs.
            scope={**scope, "extensions": {}},
            request=ContainerRequest(endpoint=name, headers=headers, body=body),
            source=None if source is None else _source(source),
            output=S3Url(output.bucket, folder + given.get("Filename", f"{stem}.out")),
            failure=S3Url(failures.bucket, f"{failures.key_prefix}{given.get('Filename', stem)}-error.out"),
            request_id=request_id,
            inference_id=inference_id,
            ttl=float(given.get("RequestTTLSeconds", _TTL)),
            timeout=float(given.get("InvocationTimeoutSeconds", _TIMEOUT)),
        )


def _source(text: str) -> S3Url:
    try:
        return object_url(text)
    except SourceError as error:
        raise validation_error(f"InputLocation {text} cannot be read: {error}") from None


def _extension(text: str) -> str:
    extension = text.strip("/")
    if not extension:
        return ""
    try:
        return check_path(extension) + "/"
    except SourceError:
        constraint = "Member must be a path without empty parts, `.` and `..`"
        raise constraint_violation("S3OutputPathExtension", text, constraint) from None


class AsyncCalls:
    """The calls that wait or run."""

    def __init__(self, storage: Storage, capture: DataCapture | None, concurrency: int = _CONCURRENCY) -> None:
        """Create the queue.

        Args:
            storage: Holds the inputs, and stores the answers.
            capture: Records successful calls.
            concurrency: The number of concurrent calls to the container.
        """
        self._storage, self._capture = storage, capture
        self._places, self._room_for_large = asyncio.Semaphore(concurrency), asyncio.Lock()
        self._threads = ThreadPoolExecutor(_STORAGE_THREADS, "s3")
        self._tasks: set[asyncio.Task[None]] = set()
        # Tasks of calls that must still be sent to the container, for the first time or again.
        self._waiting: set[asyncio.Task[None]] = set()
        self._pings: asyncio.Task[None] | None = None  # Polls until the container is ready, for all waiting calls.
        self._stopping = False

    def submit(self, call: AsyncCall) -> None:
        """Add a call to the queue.

        Raises:
            RuntimeApiError: The queue is full, or the server is stopping.
        """
        if self._stopping:
            raise RuntimeApiError("ServiceUnavailable", 503, "The local endpoint is stopping.")
        if len(self._tasks) >= MAX_CALLS:
            raise RuntimeApiError("ServiceUnavailable", 503, f"{MAX_CALLS} asynchronous calls wait or run already.")
        task = asyncio.create_task(self._run(call))
        for tasks in (self._tasks, self._waiting):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def read(self, url: S3Url) -> bytes:
        """Return an object from the storage.

        Raises:
            StorageError: The object cannot be read.
        """
        return await self._in_thread(lambda: self._storage.read(url))

    async def drain(self, seconds: float) -> None:
        """Refuse further calls and drop waiting calls. Wait at most `seconds` for running calls.

        A call that is dropped, or that is still running after this time, gets a failure file.
        """
        self._stopping = True
        if tasks := set(self._tasks):  # The set is copied, because calls that end are removed from it.
            logger.info("stopping: %d asynchronous calls wait, %d in all", len(self._waiting), len(tasks))
            # New tasks must start first: a task that is cancelled before its first step writes no failure file.
            await asyncio.sleep(0)
            for task in self._waiting:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            lost = late and (await asyncio.wait(late, timeout=_LAST_SECONDS))[1]
            if lost:
                logger.error("%d asynchronous calls end without a failure file", len(lost))
        if self._pings is not None:
            self._pings.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: AsyncCall) -> None:
        try:
            await self._serve(call)
        except RuntimeApiError as error:
            await self._fail(call, error)
        except StorageError as error:
            await self._fail(call, internal_failure(f"{location(call.output)} cannot be written: {error}"))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            await self._fail(call, _stopped())
        except Exception:
            logger.exception("internal error", extra={"request_id": call.inference_id})
            await self._fail(call, internal_failure())

    async def _fail(self, call: AsyncCall, error: RuntimeApiError) -> None:
        about = {"request_id": call.inference_id}
        logger.info("asynchronous call: %s: %s", error.name, error.message, extra=about)
        try:
            await self._in_thread(lambda: self._storage.write(call.failure, error.body(), "application/json"))
        except (StorageError, RuntimeError) as reason:  # RuntimeError means that the threads were stopped.
            logger.error("%s cannot be written: %s", location(call.failure), reason, extra=about)

    async def _serve(self, call: AsyncCall) -> None:
        deadline = asyncio.get_running_loop().time() + call.ttl
        async with contextlib.AsyncExitStack() as stack:
            async with _until(deadline, call):
                await stack.enter_async_context(self._places)
            request = call.request
            if call.source is not None:
                request = replace(request, body=await self._input(call, call.source, deadline, stack))
            invocation = await self._ask(call, request, deadline)
            body = invocation.body
            assert body is not None, "`_ask` has checked the reply"
            kind = value_of(invocation.headers, b"content-type")
            await self._in_thread(lambda: self._storage.write(call.output, body, kind))
        if self._capture is not None:
            self._capture.record(call.request_id, request, invocation.headers, body)

    async def _input(self, call: AsyncCall, source: S3Url, deadline: float, stack: contextlib.AsyncExitStack) -> bytes:
        try:
            size = await self._in_thread(lambda: self._storage.size(source))
            if size > MAX_PAYLOAD:
                raise validation_error(f"{location(source)} has {size} bytes; at most {MAX_PAYLOAD} are allowed.")
            if size > _LARGE:
                async with _until(deadline, call):
                    await stack.enter_async_context(self._room_for_large)
            return await self._in_thread(lambda: self._storage.read(source))
        except StorageError as error:
            raise validation_error(f"{location(source)} cannot be read: {error}") from error

    async def _ask(self, call: AsyncCall, request: ContainerRequest, deadline: float) -> Invocation:
        """Call the container. While it cannot be reached or its model is loading, wait and retry.

        On SageMaker, a call waits in the same way for the first instance.
        """
        task = asyncio.current_task()
        assert task is not None
        while True:
            invocation = Invocation(call.scope, _stay, request, MAX_PAYLOAD, keep=self._capture is not None)
            self._waiting.discard(task)
            try:
                await invocation.whole(call.timeout)
            except RuntimeApiError as error:
                if error.name != "ModelNotReadyException":
                    raise
            else:
                _check_headers(request.endpoint, invocation)
                return invocation
            if self._stopping:
                raise _stopped()
            self._waiting.add(task)
            async with _until(deadline, call):
                await self._ready(call)

    async def _ready(self, call: AsyncCall) -> None:
        async def ask() -> None:
            while self._waiting and await is_loading(call.scope["app"]):
                await asyncio.sleep(_PING_SECONDS)

        if self._pings is None or self._pings.done():
            self._pings = asyncio.create_task(ask())
        await asyncio.shield(self._pings)

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


async def _stay() -> Message:
    """Wait forever, because the client of an asynchronous call cannot leave."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


@contextlib.asynccontextmanager
async def _until(deadline: float, call: AsyncCall) -> AsyncIterator[None]:
    """Cancel the `with` block at `deadline`, and raise the error of an expired call."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise validation_error(f"The request has expired: it waited for {call.ttl:g} s (RequestTTLSeconds).") from None


def _stopped() -> RuntimeApiError:
    return RuntimeApiError("ServiceUnavailable", 503, "The local endpoint was stopped before the call was answered.")


def _check_headers(endpoint: str, invocation: Invocation) -> None:
    """Refuse an answer that SageMaker would refuse.

    Raises:
        RuntimeApiError: The answer has no Content-Length (it was sent in chunks), or its headers are too large.
    """
    headers: Headers = invocation.headers
    if not any(name.lower() == b"content-length" for name, _ in headers):
        reason = "the answer has no Content-Length; SageMaker refuses answers in chunks to asynchronous calls"
        raise refused_answer(endpoint, invocation.status, reason)
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > _MAX_HEADERS:
        reason = f"the answer has {size} bytes of headers; SageMaker takes {_MAX_HEADERS} from asynchronous calls"
        raise refused_answer(endpoint, invocation.status, reason)
