"""A model's folder on S3: lists its files and downloads them.

boto3 finds credentials, region and endpoint in the environment, the profile, or the role of the container or machine.
AWS_ENDPOINT_URL_S3 overrides the endpoint. boto3 is imported only if it is needed, because most models are local.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import os
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from container.sources.location import S3Url, SourceError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from s3transfer.futures import TransferFuture
    from s3transfer.subscribers import BaseSubscriber

THREADS = 8  # The number of ranges of objects that are read at a time.
RANGE = 16 << 20  # The size of a range in bytes.
_READ_ATTEMPTS = 6  # The number of attempts to read a range if its connection breaks.
_REQUEST_ATTEMPTS = 5  # The number of botocore's attempts if S3 answers a request with a server error.
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_BLOCK = 1 << 20
_MAX_FILES = 100_000

# Suffixes of files that contain no settings.
WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".tar", ".gz", ".tgz", ".zip"}
)
_MAX_SETTINGS_BYTES = 32 << 20  # A larger file counts as weights, even without such a suffix.
# Engines do not load these files if `*.safetensors` are next to them: weights in other formats, and training state. The
# names are those of transformers, diffusers, PEFT and Llama's repositories. Files with other names are not left out,
# because they may be parts of a model.
_DUPLICATES = re.compile(
    r"(diffusion_)?pytorch_model[-\w]*\.bin|tf_model[-\w]*\.h5|flax_model[-\w]*\.msgpack|consolidated[-.\w]*\.pth"
    r"|adapter_model\.bin|optimizer\.(pt|bin)"
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a listing of S3."""

    path: str  # The path relative to the model's directory, with `/` between the parts.
    size: int  # Bytes.
    etag: str  # S3's tag, which changes with the content. It includes the quotes that S3 sends.
    # The algorithms for which S3 stores a checksum of the whole object.
    checksums: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_weights(self) -> bool:
        """True if the settings can be read without this file."""
        return self.size > _MAX_SETTINGS_BYTES or PurePosixPath(self.path).suffix.lower() in WEIGHTS


def check_path(path: str) -> str:
    """Return a relative path, after a check that it stays inside its directory.

    Raises:
        SourceError: The path may leave the directory.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise SourceError(f"{path!a} cannot be the path of a file below the model's directory")
    return path


def selected(files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return the files to fetch, sorted by path.

    If there are `*.safetensors` files, the same weights in other formats are left out. Empty objects that represent
    folders are left out, too.

    Raises:
        SourceError: An object with content has the same path as a folder of other objects.
    """
    everything = sorted(files, key=lambda file: file.path)
    folders = {str(parent) for file in everything for parent in PurePosixPath(file.path).parents}
    if both := [file.path for file in everything if file.path in folders and file.size]:
        raise SourceError(f"{both[0]!a} is an object, and the folder of others: no directory can hold both")
    everything = [file for file in everything if file.path not in folders]
    safetensors = [PurePosixPath(file.path) for file in everything if file.path.endswith(".safetensors")]
    with_safetensors = {str(path.parent) for path in safetensors}
    return tuple(file for file in everything if not _is_duplicate(PurePosixPath(file.path), with_safetensors))


def _is_duplicate(path: PurePosixPath, with_safetensors: set[str]) -> bool:
    if _DUPLICATES.fullmatch(path.name) is None:
        return False
    # Llama's repositories store the second copy in `original/`.
    places = (path.parent, path.parent.parent) if path.parent.name == "original" else (path.parent,)
    return any(str(place) in with_safetensors for place in places)


class S3Folder:
    """A folder of a bucket. Any thread may use it."""

    def __init__(self, url: S3Url) -> None:
        """Create the client. No request is sent to S3 yet.

        Raises:
            SourceError: The AWS configuration is invalid.
        """
        self.url = url
        try:
            self._client = s3_client()
        except SourceError as error:
            raise SourceError(f"{url}: {error}") from error

    def files(self) -> tuple[RemoteFile, ...]:
        """List all objects in the folder, except the empty objects that represent folders.

        Raises:
            SourceError: S3 refuses the request or cannot be reached, or the folder is empty.
        """
        try:
            found = tuple(itertools.islice(self._listed(), _MAX_FILES + 1))
        except Exception as error:
            raise self._explained(error) from error
        if not found:
            raise SourceError(
                f"{self.url}: there are no objects below this prefix; give the folder that holds the unpacked files"
            )
        if len(found) > _MAX_FILES:
            raise SourceError(f"{self.url}: more than {_MAX_FILES} objects; give the folder of one model")
        return found

    def _listed(self) -> Iterator[RemoteFile]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.url.bucket, Prefix=self.url.key_prefix
        )
        for page in pages:
            for found in page.get("Contents", ()):
                path = found["Key"].removeprefix(self.url.key_prefix)
                if path and not path.endswith("/"):
                    of_parts = found.get("ChecksumType") == "COMPOSITE"
                    checksums = () if of_parts else tuple(found.get("ChecksumAlgorithm", ()))
                    yield RemoteFile(check_path(path), found["Size"], found["ETag"], checksums)

    @contextlib.contextmanager
    def transfers(self, on_bytes: Callable[[int], None]) -> Iterator[Callable[[RemoteFile, Path], TransferFuture]]:
        """Yield a function that begins to download a file to a path. The path exists only after a complete download.

        boto3's TransferManager reads several ranges of objects at a time. `on_bytes` gets the number of bytes that were
        downloaded. The number is negative if bytes have to be downloaded again. When the context ends, unfinished
        downloads are cancelled. Threads that still wait for S3 end soon after that.
        """
        from s3transfer.manager import TransferConfig, TransferManager

        config = TransferConfig(
            # With this threshold, boto3 reads all objects in ranges. Only then does boto3 check that an object has not
            # changed since it was listed.
            multipart_threshold=1,
            multipart_chunksize=RANGE,
            max_request_concurrency=THREADS,
            # The queue has room for all files, so `begin` never waits.
            max_submission_queue_size=_MAX_FILES,
            max_request_queue_size=1 << 20,
            max_io_queue_size=64,
            io_chunksize=_BLOCK,
            num_download_attempts=_READ_ATTEMPTS,
        )
        manager = TransferManager(self._client, config)
        futures: list[TransferFuture] = []

        def begin(file: RemoteFile, path: Path) -> TransferFuture:
            # boto3 accepts any object with a subscriber's methods. A subclass of BaseSubscriber would need boto3 when
            # this module is imported.
            subscriber = cast("BaseSubscriber", _Subscriber(file, on_bytes))
            key = self.url.key_prefix + file.path
            futures.append(manager.download(self.url.bucket, key, str(path), subscribers=[subscriber]))
            return futures[-1]

        try:
            yield begin
        finally:
            for future in futures:  # `shutdown(cancel=True)` raises a TypeError (s3transfer 0.19).
                future.cancel()
            threading.Thread(target=manager.shutdown, name="download-end", daemon=True).start()

    def check(self, file: RemoteFile, download: TransferFuture, path: Path, go_on: Callable[[], None]) -> None:
        """Check a finished download: raise its error if it failed, and compare the file with S3's checksum.

        Args:
            file: The file as S3 listed it.
            download: The finished download.
            path: The downloaded file.
            go_on: A function that is called for each block of the file. It aborts the check by raising an error.

        Raises:
            SourceError: S3 failed, or the content differs from the listed object.
            OSError: The disk failed.
        """
        algorithm = next((name for name in _CHECKSUMS if name in file.checksums), None)
        try:
            download.result()
            expected = None if algorithm is None else self._checksum(file, algorithm)
        except Exception as error:
            if isinstance(error, OSError) and not _is_botocores(error):
                raise
            raise self._explained(error, file.path) from error
        if algorithm is None or expected is None:
            return
        found = _CHECKSUMS[algorithm]()
        with path.open("rb", buffering=0) as content:
            while block := content.read(_BLOCK):
                go_on()
                found.update(block)
        if base64.b64encode(found.digest()).decode() != expected:
            raise SourceError(f"{self.url}: {file.path} came with another {algorithm} checksum than S3 has of it")

    def _checksum(self, file: RemoteFile, algorithm: str) -> str | None:
        key = self.url.key_prefix + file.path
        answer: Any = self._client.head_object(
            Bucket=self.url.bucket, Key=key, IfMatch=file.etag, ChecksumMode="ENABLED"
        )
        checksum: str | None = answer.get(f"Checksum{algorithm}")
        # A checksum such as "...-7" is computed from the checksums of seven parts, not from the whole object.
        return None if checksum is None or "-" in checksum else checksum

    def _explained(self, error: Exception, path: str = "") -> SourceError:
        return error if isinstance(error, SourceError) else SourceError(f"{self.url}: {_reason(error, path)}")


@dataclass(frozen=True, slots=True)
class _Subscriber:
    """Handles boto3's callbacks for the download of one file."""

    file: RemoteFile
    on_bytes: Callable[[int], None]

    def on_queued(self, future: TransferFuture, **_: Any) -> None:
        future.meta.provide_transfer_size(self.file.size)
        future.meta.provide_object_etag(self.file.etag)

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self.on_bytes(bytes_transferred)


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


# These checksums are fast without AWS's C library. S3's other checksums, CRC32C and CRC64NVME, are not used.
_CHECKSUMS: dict[str, Callable[[], Any]] = {"CRC32": _Crc32, "SHA256": hashlib.sha256, "SHA1": hashlib.sha1}


def s3_client() -> S3Client:
    """Return a client that any thread may use.

    Raises:
        SourceError: The AWS configuration is invalid.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _REQUEST_ATTEMPTS},
        max_pool_connections=THREADS,
        tcp_keepalive=True,
    )
    # If no region is set, S3's first reply names the bucket's region, and botocore repeats the request there.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        session = boto3.session.Session(region_name=region)
        client = session.client("s3", config=config, region_name=session.region_name or "us-east-1")
    except (BotoCoreError, ValueError) as error:
        raise SourceError(str(error)) from error
    client.meta.events.register("after-call.s3.GetObject", _close_with_body)
    return client


def _is_botocores(error: OSError) -> bool:
    """Return True if the error is botocore's, and thus from the network. Some of botocore's errors are OSErrors."""
    from botocore.exceptions import BotoCoreError

    return isinstance(error, BotoCoreError)


def _close_with_body(parsed: dict[str, Any], **_: Any) -> None:
    """Close the connection of a response when its body is freed.

    After a cancelled read, boto3 leaves the connection open.
    """
    if (body := parsed.get("Body")) is not None:
        weakref.finalize(body, body._raw_stream.close)


def _reason(error: BaseException, path: str) -> str:
    from botocore.exceptions import ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    match error:
        case RetriesExceededError():
            return _reason(error.last_exception, path)
        case S3DownloadFailedError() | ClientError(response={"Error": {"Code": "412"}}):
            return f"an object was replaced while it was read: {path}"
        case _:
            return str(error) or type(error).__name__
