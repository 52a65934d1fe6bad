"""Asynchronous invocations: a bounded queue, a few workers, results in files.

Source: contracts/sagemaker_hosting.md section 5, and the service model of InvokeEndpointAsync.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deploy.local.errors import RuntimeApiError, constraint_violation, service_unavailable, validation_error
from deploy.local.invocation import Answer, Invocation, Invoker
from deploy.local.parameters import Headers, Parameters

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

logger = logging.getLogger(__name__)

MAX_PAYLOAD = 1 << 30
"""Bytes of an input in S3, and of an output: sagemaker_hosting.md section 2."""

_S3 = "s3://"


class StoreError(Exception):
    """An object cannot be read or written; the text says which and why."""


class OutputStore(Protocol):
    """Takes results, each whole or not at all."""

    def location(self, key: str) -> str:
        """The URI of a result."""

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Put a result where `location` says. Blocks.

        Raises:
            StoreError: it cannot be written.
        """


class Folder:
    """A folder of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def location(self, key: str) -> str:
        """A `file://` URI."""
        return (self._directory / key).as_uri()

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Write a file under another name and rename it."""
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
    """A prefix of an S3 bucket."""

    def __init__(self, uri: str) -> None:
        """`uri`: `s3://bucket/prefix`."""
        self._bucket, self._prefix = split_s3(uri)

    def location(self, key: str) -> str:
        """An `s3://` URI."""
        return f"{_S3}{self._bucket}/{self._key(key)}"

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Put an object."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            _s3().put_object(Bucket=self._bucket, Key=self._key(key), Body=data, ContentType=content_type)
        except (BotoCoreError, ClientError) as error:
            raise StoreError(f"{self.location(key)} cannot be written: {error}") from error

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


def output_store(place: str) -> OutputStore:
    """The store for a folder's path or an `s3://` URI."""
    return Bucket(place) if place.startswith(_S3) else Folder(Path(place))


def split_s3(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://` URI, the key without slashes at its ends."""
    bucket, _, key = uri.removeprefix(_S3).partition("/")
    return bucket, key.strip("/")


def check_input_location(uri: str) -> None:
    """See that an input can be read from there at all.

    Raises:
        RuntimeApiError: ValidationError, it is not in S3.
    """
    if not uri.startswith(_S3) or not all(split_s3(uri)):
        raise validation_error(f"InputLocation {uri} is not supported here; expected s3://bucket/key.")


def read_input(uri: str) -> bytes:
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

    return boto3.session.Session().client(
        "s3", config=Config(connect_timeout=5, read_timeout=60, retries={"max_attempts": 2})
    )


QUEUE_SIZE = 1000
WORKERS = 4
"""Calls that run at a time; on the platform `MaxConcurrentInvocationsPerInstance`."""
MAX_INLINE_BODY = 128_000
"""Bytes; more has to be in S3."""

_TTL_SECONDS, _TIMEOUT_SECONDS = 21600, 900
_PASSING = frozenset({"ModelNotReadyException", "ServiceUnavailable"})
_AGAIN_SECONDS = 1.0
_CLOSING_SECONDS = 5.0
"""For all calls that are unfinished when the endpoint stops to be written down as failed."""
_FAILURES = "async-endpoint-failures"


@dataclass(frozen=True, slots=True)
class _Job:
    invocation: Invocation
    inference_id: str
    input_location: str | None
    output: str
    failure: str
    expires: float
    """On the monotonic clock."""
    timeout: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the caller gets at once."""

    inference_id: str
    headers: Headers


class AsyncInvocations:
    """Takes calls now and makes them later, in order."""

    def __init__(self, invoker: Invoker, store: OutputStore) -> None:
        self._invoker, self._store = invoker, store
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(QUEUE_SIZE)
        self._workers: list[asyncio.Task[None]] = []

    def accept(self, invocation: Invocation) -> Accepted:
        """Queue a call.

        Raises:
            RuntimeApiError: ValidationError, a parameter is wrong; ServiceUnavailable, the queue is full.
        """
        job = self._job(invocation)
        try:
            self._queue.put_nowait(job)
        except asyncio.QueueFull:
            raise service_unavailable(
                f"Endpoint {invocation.endpoint} has {QUEUE_SIZE} asynchronous calls waiting and takes no more."
            ) from None
        if not self._workers:
            self._workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        locations = (
            (b"x-amzn-sagemaker-outputlocation", self._store.location(job.output)),
            (b"x-amzn-sagemaker-failurelocation", self._store.location(job.failure)),
        )
        return Accepted(job.inference_id, [(name, value.encode("ascii")) for name, value in locations])

    async def close(self) -> None:
        """End the workers. What is not finished fails, and says so, as far as the store takes it in a few seconds."""
        for worker in self._workers:
            worker.cancel()
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                await asyncio.gather(*self._workers, return_exceptions=True)
                while not self._queue.empty():
                    await self._fail(self._queue.get_nowait(), _stopped())
        except TimeoutError:
            logger.error("%d asynchronous calls are unfinished, and their failure is not written", self._queue.qsize())

    def _job(self, invocation: Invocation) -> _Job:
        parameters = invocation.parameters
        location = parameters.get("inputLocation")
        if location is None and not invocation.body:
            raise validation_error("One of InputLocation and Body is required.")
        if location is not None and invocation.body:
            raise validation_error("InputLocation and Body cannot be given together.")
        if location is not None:
            check_input_location(location)
        ttl = parameters.seconds("requestTTLSeconds", _TTL_SECONDS, 60, 21600)
        inference_id = parameters.get("inferenceId") or str(uuid.uuid4())
        identity = str(uuid.uuid4())
        folder = _folder(parameters)
        name = parameters.get("filename") or f"{identity}.out"
        if parameters.get("inferenceId") is None:
            forwarded = (*parameters.forwarded, ("x-amzn-sagemaker-inference-id", inference_id))
            invocation = replace(invocation, parameters=replace(parameters, forwarded=forwarded))
        return _Job(
            invocation=invocation,
            inference_id=inference_id,
            input_location=location,
            output=folder + name,
            failure=f"{_FAILURES}/{invocation.endpoint}/{identity}-error.out",
            expires=time.monotonic() + ttl,
            timeout=parameters.seconds("invocationTimeoutSeconds", _TIMEOUT_SECONDS, 1, 3600),
        )

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            try:
                await self._run(job)
            except asyncio.CancelledError:
                await self._fail(job, _stopped())
                raise
            except RuntimeApiError as error:
                await self._fail(job, error)
            except StoreError as error:
                await self._fail(job, validation_error(str(error)))
            except Exception:
                logger.exception("asynchronous call %s failed", job.inference_id)
                await self._fail(job, RuntimeApiError("InternalFailure", 500, "The call failed for an unknown reason."))

    async def _run(self, job: _Job) -> None:
        if time.monotonic() > job.expires:
            raise validation_error("The request expired while it waited (RequestTTLSeconds).")
        invocation = job.invocation
        if job.input_location is not None:
            body = await asyncio.to_thread(read_input, job.input_location)
            invocation = replace(invocation, body=body)
        answer = await self._invoke(invocation, job)
        content_type = dict(answer.headers).get(b"content-type", b"application/octet-stream").decode("latin-1")
        await asyncio.to_thread(self._store.write, job.output, answer.body, content_type)
        logger.info("asynchronous call %s: %s", job.inference_id, self._store.location(job.output))

    async def _invoke(self, invocation: Invocation, job: _Job) -> Answer:
        """The answer. A container that is not there yet is waited for, as long as the call may wait at all."""
        while True:
            try:
                return await self._invoker.invoke(invocation, job.timeout, MAX_PAYLOAD)
            except RuntimeApiError as error:
                if error.name not in _PASSING or time.monotonic() > job.expires:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _fail(self, job: _Job, error: RuntimeApiError) -> None:
        logger.warning("asynchronous call %s failed: %s", job.inference_id, error.message)
        try:
            await asyncio.to_thread(self._store.write, job.failure, error.body(), "application/json")
        except StoreError as failure:
            logger.error("asynchronous call %s: %s", job.inference_id, failure)


def _stopped() -> RuntimeApiError:
    return service_unavailable("The endpoint was stopped before the call was finished.")


def _folder(parameters: Parameters) -> str:
    """What `S3OutputPathExtension` puts before the file's name; it cannot lead out of the output's place."""
    extension = parameters.get("s3OutputPathExtension")
    if extension is None:
        return ""
    segments = [segment for segment in extension.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise constraint_violation("s3OutputPathExtension", extension, "Member must not contain . or .. as a segment")
    return "".join(segment + "/" for segment in segments)
