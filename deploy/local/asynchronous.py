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
from urllib.parse import quote, unquote

from deploy.local.errors import (
    RuntimeApiError,
    constraint_violation,
    internal_failure,
    service_unavailable,
    validation_error,
)
from deploy.local.invocation import Answer, Invocation, Invoker
from deploy.local.parameters import Headers

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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call in the queue."""

    invocation: Invocation
    input_location: str | None
    output: str
    """Location of the result."""
    failure: str
    """Location of the error, where there is no result."""
    expires: float
    """On the monotonic clock."""
    timeout: int


class AsyncInvocations:
    """Accepts calls now and makes them later, in order."""

    def __init__(self, invoker: Invoker, place: str) -> None:
        """`place`: a folder, or `s3://bucket/prefix`, for the results."""
        self._invoker = invoker
        self._place = place.rstrip("/") if place.startswith(_S3) else Path(place).resolve().as_uri()
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(QUEUE_SIZE)
        self._workers: list[asyncio.Task[None]] = []

    def accept(self, invocation: Invocation) -> tuple[str, Headers]:
        """Queue a call. Returns its inference id, and headers with the places of its result and of its error.

        Raises:
            RuntimeApiError: ValidationError, a parameter is wrong; ServiceUnavailable, the queue is full.
        """
        inference_id = invocation.parameters.values.get("InferenceId")
        if inference_id is None:
            inference_id = str(uuid.uuid4())
            forwarded = (*invocation.parameters.forwarded, ("x-amzn-sagemaker-inference-id", inference_id))
            invocation = replace(invocation, parameters=replace(invocation.parameters, forwarded=forwarded))
        call = self._waiting(invocation)
        try:
            self._queue.put_nowait(call)
        except asyncio.QueueFull:
            raise service_unavailable(
                f"Endpoint {invocation.endpoint} has {QUEUE_SIZE} asynchronous calls waiting and takes no more."
            ) from None
        if not self._workers:
            self._workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        headers = [
            (b"x-amzn-sagemaker-outputlocation", call.output.encode("ascii")),
            (b"x-amzn-sagemaker-failurelocation", call.failure.encode("ascii")),
        ]
        return inference_id, headers

    async def close(self) -> None:
        """End the workers. Unfinished calls are lost."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    def _waiting(self, invocation: Invocation) -> _Waiting:
        parameters = invocation.parameters
        location = parameters.values.get("InputLocation")
        if location is None and not invocation.body:
            raise validation_error("One of InputLocation and Body is required.")
        if location is not None and invocation.body:
            raise validation_error("InputLocation and Body cannot be given together.")
        if location is not None and not (location.startswith(_S3) and all(split_s3(location))):
            raise validation_error(f"InputLocation {location} is not supported here; expected s3://bucket/key.")
        extension = parameters.values.get("S3OutputPathExtension") or ""
        folders = [segment for segment in extension.split("/") if segment]
        if not {".", ".."}.isdisjoint(folders):
            constraint = "Member must not contain . or .. as a segment"
            raise constraint_violation("S3OutputPathExtension", extension, constraint)
        identity = str(uuid.uuid4())
        key = "/".join([*folders, parameters.values.get("Filename") or f"{identity}.out"])
        return _Waiting(
            invocation=invocation,
            input_location=location,
            output=self._location(key),
            failure=self._location(f"async-endpoint-failures/{invocation.endpoint}/{identity}-error.out"),
            expires=time.monotonic() + int(parameters.values.get("RequestTTLSeconds") or _TTL_SECONDS),
            timeout=int(parameters.values.get("InvocationTimeoutSeconds") or _TIMEOUT_SECONDS),
        )

    def _location(self, key: str) -> str:
        return f"{self._place}/{key if self._place.startswith(_S3) else quote(key)}"

    async def _work(self) -> None:
        while True:
            call = await self._queue.get()
            try:
                await self._run(call)
            except RuntimeApiError as error:
                await self._fail(call, error)
            except StoreError as error:
                await self._fail(call, validation_error(str(error)))
            except Exception:
                logger.exception("asynchronous call failed: %s", call.output)
                await self._fail(call, internal_failure())

    async def _run(self, call: _Waiting) -> None:
        if time.monotonic() > call.expires:
            raise validation_error("The request expired while it waited (RequestTTLSeconds).")
        invocation = call.invocation
        if call.input_location is not None:
            body = await asyncio.to_thread(_read_input, call.input_location)
            invocation = replace(invocation, body=body)
        answer = await self._invoke(invocation, call)
        content_type = dict(answer.headers).get(b"content-type", b"application/octet-stream").decode("latin-1")
        await asyncio.to_thread(_write, call.output, answer.body, content_type)
        logger.info("asynchronous call succeeded: %s", call.output)

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
        logger.warning("asynchronous call failed: %s: %s", call.failure, error.message)
        try:
            await asyncio.to_thread(_write, call.failure, error.body(), "application/json")
        except StoreError as failure:
            logger.error("%s", failure)


class StoreError(Exception):
    """An object cannot be read or written; the text says which and why."""


def _write(location: str, data: bytes, content_type: str) -> None:
    """Write a result: a file, whole or not at all, or an object of S3. Blocks.

    Raises:
        StoreError: it cannot be written.
    """
    if not location.startswith(_S3):
        write_file(Path(unquote(location.removeprefix("file://"))), data)
        return
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = split_s3(location)
    try:
        _s3().put_object(Bucket=bucket, Key=key, Body=data, ContentType=content_type)
    except (BotoCoreError, ClientError) as error:
        raise StoreError(f"{location} cannot be written: {error}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
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
