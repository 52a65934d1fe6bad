"""Asynchronous invocations: a bounded queue, a few workers, and results in a folder or an S3 bucket."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.local.errors import RuntimeApiError, constraint_violation, service_unavailable, validation_error
from deploy.local.invocation import Answer, Invocation, Invoker
from deploy.local.parameters import Headers, Parameters

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1000
WORKERS = 4
"""Calls that run at a time; on the platform `MaxConcurrentInvocationsPerInstance`."""
MAX_INLINE_BODY = 128_000
"""Bytes of an input in the request; a larger one has to be in S3."""
MAX_PAYLOAD = 1 << 30
"""Bytes of an input in S3, and of an output."""

_S3 = "s3://"
_TTL_SECONDS, _TIMEOUT_SECONDS = 21600, 900
_PASSING = frozenset({"ModelNotReadyException", "ServiceUnavailable"})
_AGAIN_SECONDS = 1.0
_CLOSING_SECONDS = 5.0
"""Time in which the failures of all unfinished calls are written when the endpoint stops."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call in the queue."""

    invocation: Invocation
    inference_id: str
    input_location: str | None
    output: str
    """Key of the result."""
    failure: str
    """Key of the error, where there is no result."""
    expires: float
    """On the monotonic clock."""
    timeout: int


class AsyncInvocations:
    """Accepts calls now and makes them later, in order."""

    def __init__(self, invoker: Invoker, store: Folder | Bucket) -> None:
        self._invoker, self._store = invoker, store
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(QUEUE_SIZE)
        self._workers: list[asyncio.Task[None]] = []

    def accept(self, invocation: Invocation) -> tuple[str, Headers]:
        """Queue a call. Returns its inference id, and headers with the places of its result and of its error.

        Raises:
            RuntimeApiError: ValidationError, a parameter is wrong; ServiceUnavailable, the queue is full.
        """
        call = _waiting(invocation)
        try:
            self._queue.put_nowait(call)
        except asyncio.QueueFull:
            raise service_unavailable(
                f"Endpoint {invocation.endpoint} has {QUEUE_SIZE} asynchronous calls waiting and takes no more."
            ) from None
        if not self._workers:
            self._workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        output, failure = self._store.location(call.output), self._store.location(call.failure)
        headers = [
            (b"x-amzn-sagemaker-outputlocation", output.encode("ascii")),
            (b"x-amzn-sagemaker-failurelocation", failure.encode("ascii")),
        ]
        return call.inference_id, headers

    async def close(self) -> None:
        """End the workers. Unfinished calls fail; their errors are written as far as a few seconds allow."""
        for worker in self._workers:
            worker.cancel()
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                await asyncio.gather(*self._workers, return_exceptions=True)
                while not self._queue.empty():
                    await self._fail(self._queue.get_nowait(), _stopped())
        except TimeoutError:
            logger.error("%d asynchronous calls are unfinished, and their failure is not written", self._queue.qsize())

    async def _work(self) -> None:
        while True:
            call = await self._queue.get()
            try:
                await self._run(call)
            except asyncio.CancelledError:
                await self._fail(call, _stopped())
                raise
            except RuntimeApiError as error:
                await self._fail(call, error)
            except StoreError as error:
                await self._fail(call, validation_error(str(error)))
            except Exception:
                logger.exception("asynchronous call %s failed", call.inference_id)
                await self._fail(
                    call, RuntimeApiError("InternalFailure", 500, "The call failed for an unknown reason.")
                )

    async def _run(self, call: _Waiting) -> None:
        if time.monotonic() > call.expires:
            raise validation_error("The request expired while it waited (RequestTTLSeconds).")
        invocation = call.invocation
        if call.input_location is not None:
            body = await asyncio.to_thread(_read_input, call.input_location)
            invocation = replace(invocation, body=body)
        answer = await self._invoke(invocation, call)
        content_type = dict(answer.headers).get(b"content-type", b"application/octet-stream").decode("latin-1")
        await asyncio.to_thread(self._store.write, call.output, answer.body, content_type)
        logger.info("asynchronous call %s: %s", call.inference_id, self._store.location(call.output))

    async def _invoke(self, invocation: Invocation, call: _Waiting) -> Answer:
        """The answer. While the container is not there yet the call is tried again, until it expires."""
        while True:
            try:
                return await self._invoker.invoke(invocation, call.timeout, MAX_PAYLOAD)
            except RuntimeApiError as error:
                if error.name not in _PASSING or time.monotonic() > call.expires:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _fail(self, call: _Waiting, error: RuntimeApiError) -> None:
        logger.warning("asynchronous call %s failed: %s", call.inference_id, error.message)
        try:
            await asyncio.to_thread(self._store.write, call.failure, error.body(), "application/json")
        except StoreError as failure:
            logger.error("asynchronous call %s: %s", call.inference_id, failure)


def _stopped() -> RuntimeApiError:
    return service_unavailable("The endpoint was stopped before the call was finished.")


def _waiting(invocation: Invocation) -> _Waiting:
    parameters = invocation.parameters
    location = parameters.get("inputLocation")
    if location is None and not invocation.body:
        raise validation_error("One of InputLocation and Body is required.")
    if location is not None and invocation.body:
        raise validation_error("InputLocation and Body cannot be given together.")
    if location is not None and not (location.startswith(_S3) and all(split_s3(location))):
        raise validation_error(f"InputLocation {location} is not supported here; expected s3://bucket/key.")
    ttl = parameters.seconds("requestTTLSeconds", _TTL_SECONDS, 60, 21600)
    inference_id = parameters.get("inferenceId")
    if inference_id is None:
        inference_id = str(uuid.uuid4())
        forwarded = (*parameters.forwarded, ("x-amzn-sagemaker-inference-id", inference_id))
        invocation = replace(invocation, parameters=replace(parameters, forwarded=forwarded))
    identity = str(uuid.uuid4())
    return _Waiting(
        invocation=invocation,
        inference_id=inference_id,
        input_location=location,
        output=_folder(parameters) + (parameters.get("filename") or f"{identity}.out"),
        failure=f"async-endpoint-failures/{invocation.endpoint}/{identity}-error.out",
        expires=time.monotonic() + ttl,
        timeout=parameters.seconds("invocationTimeoutSeconds", _TIMEOUT_SECONDS, 1, 3600),
    )


def _folder(parameters: Parameters) -> str:
    """The folder that `S3OutputPathExtension` names; it is always inside of the place for outputs."""
    extension = parameters.get("s3OutputPathExtension") or ""
    segments = [segment for segment in extension.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise constraint_violation("s3OutputPathExtension", extension, "Member must not contain . or .. as a segment")
    return "".join(segment + "/" for segment in segments)


class StoreError(Exception):
    """An object cannot be read or written; the text says which and why."""


class Folder:
    """Results as files. Each is written whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def location(self, key: str) -> str:
        """The URI of a result."""
        return (self._directory / key).as_uri()

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Write a result. Blocks.

        Raises:
            StoreError: it cannot be written.
        """
        path = self._directory / key
        unfinished: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(unfinished, path)
        except OSError as error:
            if unfinished is not None:
                Path(unfinished).unlink(missing_ok=True)
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error


class Bucket:
    """Results as objects of an S3 bucket; the same methods as those of `Folder`."""

    def __init__(self, uri: str) -> None:
        """`uri`: `s3://bucket/prefix`."""
        self._bucket, self._prefix = split_s3(uri)

    def location(self, key: str) -> str:
        return f"{_S3}{self._bucket}/{self._key(key)}"

    def write(self, key: str, data: bytes, content_type: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            _s3().put_object(Bucket=self._bucket, Key=self._key(key), Body=data, ContentType=content_type)
        except (BotoCoreError, ClientError) as error:
            raise StoreError(f"{self.location(key)} cannot be written: {error}") from error

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


def output_store(place: str) -> Folder | Bucket:
    """The store for a folder's path or an `s3://` URI."""
    return Bucket(place) if place.startswith(_S3) else Folder(Path(place))


def split_s3(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://` URI, the key without slashes at its ends."""
    bucket, _, key = uri.removeprefix(_S3).partition("/")
    return bucket, key.strip("/")


def _read_input(uri: str) -> bytes:
    """An object of S3. Blocks.

    Raises:
        StoreError: it cannot be read, or is larger than MAX_PAYLOAD.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = split_s3(uri)
    try:
        found = _s3().get_object(Bucket=bucket, Key=key)
        with found["Body"] as body:
            if found["ContentLength"] > MAX_PAYLOAD:
                raise StoreError(f"{uri} has {found['ContentLength']} bytes; at most {MAX_PAYLOAD} are allowed")
            return body.read()
    except (BotoCoreError, ClientError) as error:
        raise StoreError(f"{uri} cannot be read: {error}") from error


def _s3() -> S3Client:
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=5, read_timeout=60, retries={"max_attempts": 2})
    return boto3.session.Session().client("s3", config=config)
