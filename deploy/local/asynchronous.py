"""Asynchronous invocations: a bounded queue, a few calls at a time, and results in a folder or an S3 bucket."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from deploy.local.errors import (
    RuntimeApiError,
    constraint_violation,
    internal_failure,
    service_unavailable,
    validation_error,
)
from deploy.local.invocation import Invocation, invoke
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
_AGAIN_SECONDS = 1.0
_INFERENCE_ID = b"x-amzn-sagemaker-inference-id"


class AsyncInvocations:
    """Accepts calls now and makes them later, in order."""

    def __init__(self, place: str) -> None:
        """`place`: a folder, or `s3://bucket/prefix`, for the results."""
        self._place = place.rstrip("/") if place.startswith(_S3) else Path(place).resolve().as_uri()
        self._running = asyncio.Semaphore(WORKERS)
        self._calls: set[asyncio.Task[None]] = set()

    def accept(self, call: Invocation) -> tuple[str, Headers]:
        """Queue a call. Returns its inference id, and headers with the places of its result and of its error.

        Raises:
            RuntimeApiError: ValidationError, a parameter is wrong; ServiceUnavailable, the queue is full.
        """
        given = call.parameters.values
        location, extension = given.get("InputLocation"), given.get("S3OutputPathExtension") or ""
        if location is None and not call.body:
            raise validation_error("One of InputLocation and Body is required.")
        if location is not None and call.body:
            raise validation_error("InputLocation and Body cannot be given together.")
        if location is not None and not (location.startswith(_S3) and all(split_s3(location))):
            raise validation_error(f"InputLocation {location} is not supported here; expected s3://bucket/key.")
        folders = [segment for segment in extension.split("/") if segment]
        if not {".", ".."}.isdisjoint(folders):
            constraint = "Member must not contain . or .. as a segment"
            raise constraint_violation("S3OutputPathExtension", extension, constraint)
        if len(self._calls) >= QUEUE_SIZE + WORKERS:
            raise service_unavailable(
                f"Endpoint {call.endpoint} has {QUEUE_SIZE} asynchronous calls waiting and takes no more."
            )
        inference_id, identity = given.get("InferenceId") or str(uuid.uuid4()), str(uuid.uuid4())
        output = self._location("/".join([*folders, given.get("Filename") or f"{identity}.out"]))
        failure = self._location(f"async-endpoint-failures/{call.endpoint}/{identity}-error.out")
        if "InferenceId" not in given:
            call = replace(call, headers=[*call.headers, (_INFERENCE_ID, inference_id.encode())])
        task = asyncio.create_task(self._run(replace(call, receive=_forever), location, output, failure))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return inference_id, [
            (b"x-amzn-sagemaker-outputlocation", output.encode("ascii")),
            (b"x-amzn-sagemaker-failurelocation", failure.encode("ascii")),
        ]

    async def close(self) -> None:
        """Give up all calls that are not finished."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _location(self, key: str) -> str:
        return f"{self._place}/{key if self._place.startswith(_S3) else quote(key)}"

    async def _run(self, call: Invocation, location: str | None, output: str, failure: str) -> None:
        expires = time.monotonic() + int(call.parameters.values.get("RequestTTLSeconds") or _TTL_SECONDS)
        try:
            async with self._running:
                if location is not None:
                    call = replace(call, body=await asyncio.to_thread(_read_input, location))
                await _invoke(call, expires, output)
            logger.info("asynchronous call succeeded: %s", output)
            return
        except RuntimeApiError as error:
            failed = error
        except StoreError as error:
            failed = validation_error(str(error))
        except Exception:
            logger.exception("asynchronous call failed: %s", output)
            failed = internal_failure()
        logger.warning("asynchronous call failed: %s: %s", failure, failed.message)
        try:
            await asyncio.to_thread(_write, failure, failed.body(), "application/json")
        except StoreError as error:
            logger.error("%s", error)


async def _invoke(call: Invocation, expires: float, output: str) -> None:
    """Make the call and write its answer. While the model is loading it is tried again, until it expires."""
    timeout = int(call.parameters.values.get("InvocationTimeoutSeconds") or _TIMEOUT_SECONDS)
    while time.monotonic() <= expires:
        try:
            answer = await invoke(call, timeout, MAX_PAYLOAD)
        except RuntimeApiError as error:
            if error.name != "ModelNotReadyException":
                raise
            await asyncio.sleep(_AGAIN_SECONDS)
            continue
        content_type = dict(answer.headers).get(b"content-type", b"application/octet-stream").decode("latin-1")
        await asyncio.to_thread(_write, output, answer.body, content_type)
        return
    raise validation_error("The request expired while it waited (RequestTTLSeconds).")


async def _forever() -> Any:
    """ASGI's `receive` of a client that never leaves."""
    await asyncio.Event().wait()


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as unfinished:
            whole = Path(unfinished, "result")
            whole.write_bytes(data)
            os.replace(whole, path)
    except OSError as error:
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
