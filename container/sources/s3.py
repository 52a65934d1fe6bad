"""A model's folder on S3: which files it has, how they come here, and what S3's refusals mean in plain words.

boto3 finds credentials, region and endpoint as everywhere with AWS: in the environment, the profile, or the role of the
container or machine; AWS_ENDPOINT_URL_S3 names another S3. boto3 is imported when it is needed: most models are local.
"""

from __future__ import annotations

import base64
import hashlib
import os
import queue
import threading
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

THREADS = 8
"""Ranges of objects that are read at a time."""
RANGE = 16 << 20
"""Bytes of a range."""
_READ_ATTEMPTS = 6
"""How often a range is read whose connection breaks."""
_REQUEST_ATTEMPTS = 5
"""How often botocore sends a request that S3 answers with an error of its own."""
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_BLOCK = 1 << 20
_MAX_FILES = 100_000

WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".tar", ".gz", ".tgz", ".zip"}
)
"""Suffixes of files from which no setting is read."""
_MAX_SETTINGS_BYTES = 32 << 20
"""A larger file counts as weights, whatever its name."""
_DUPLICATES = frozenset({".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt"})
"""Suffixes of weights that engines do not load where there are `*.safetensors` beside them."""
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as S3 lists it."""

    path: str
    """Below the model's directory, with `/` between its parts."""
    size: int
    """Bytes."""
    etag: str
    """In quotes, as S3 gives it; another one means another content."""
    checksums: tuple[str, ...] = field(default=(), compare=False)
    """Algorithms of the checksums that S3 has of the whole object."""

    @property
    def is_weights(self) -> bool:
        """Whether the settings can be read without this file."""
        return self.size > _MAX_SETTINGS_BYTES or PurePosixPath(self.path).suffix.lower() in WEIGHTS


def check_path(path: str) -> str:
    """Return `path` if it names a file below the directory that it is joined to.

    Raises:
        SourceError: it leads out of the directory, or is no valid file name.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise SourceError(f"{path!a} cannot be the path of a file below the model's directory")
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        raise SourceError(f"{path[:80]!a}... is too long for the name of a file")
    return path


def selected(files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return the files to fetch, sorted by path: all but weights that are there as `*.safetensors` too.

    Empty objects that stand for folders are left out.

    Raises:
        SourceError: an object with content has the path of a folder with others.
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
    if path.suffix.lower() in _DUPLICATES and str(path.parent) in with_safetensors:
        return True
    # Llama's repositories have the weights once more in `original/`.
    return any(parent.name == "original" and str(parent.parent) in with_safetensors for parent in path.parents)


class S3Folder:
    """A folder of a bucket. Any thread may use it."""

    def __init__(self, url: S3Url) -> None:
        """Make a client; S3 is not asked yet.

        Raises:
            SourceError: AWS is configured wrongly in the environment or in its files.
        """
        self.url = url
        self._client = _client(url)
        self._reads = _Reads(self._client)

    def files(self) -> tuple[RemoteFile, ...]:
        """List all objects in the folder, save for those that stand for folders.

        Raises:
            SourceError: S3 refuses or cannot be reached, or the folder is empty.
        """
        try:
            found = tuple(self._listed())
        except Exception as error:
            raise self.explained(error) from error
        if not found and self.url.name.lower().endswith(_ARCHIVES):
            raise SourceError(f"{self.url}: an archive is not unpacked; give a folder with the unpacked files")
        if not found:
            raise SourceError(f"{self.url}: there are no objects below this prefix; give the folder that holds them")
        return found

    def _listed(self) -> Iterator[RemoteFile]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.url.bucket, Prefix=self.url.key_prefix
        )
        count = 0
        for page in pages:
            for found in page.get("Contents", ()):
                path = found["Key"].removeprefix(self.url.key_prefix)
                if not path or path.endswith("/"):
                    continue
                count += 1
                if count > _MAX_FILES:
                    raise SourceError(f"{self.url}: more than {_MAX_FILES} objects; give the folder of one model")
                whole = found.get("ChecksumType") != "COMPOSITE"
                algorithms = tuple(found.get("ChecksumAlgorithm", ())) if whole else ()
                yield RemoteFile(check_path(path), found["Size"], found["ETag"], algorithms)

    def transfers(self, on_bytes: Callable[[int], None]) -> Transfers:
        """Return what downloads files of this folder; `on_bytes` is told how many bytes came, or have to come again."""
        return Transfers(self, self._client, self._reads, on_bytes)

    def verify(self, file: RemoteFile, path: Path, check: Callable[[], None]) -> None:
        """Compare a downloaded file with its size and, where S3 has a checksum of the whole object, with that.

        Args:
            file: what was downloaded.
            path: where it is.
            check: called for each block that is read; what it raises ends the comparison.

        Raises:
            SourceError: they differ, or S3 refuses.
            OSError: the file cannot be read.
        """
        size = path.stat().st_size
        if size != file.size:
            raise SourceError(f"{self.url}: {file.path} has {size} bytes instead of {file.size}")
        algorithm = next((name for name in _CHECKSUMS if name in file.checksums), None)
        if algorithm is None or (expected := self._checksum(file, algorithm)) is None:
            return
        found = _CHECKSUMS[algorithm]()
        with path.open("rb", buffering=0) as content:
            while block := content.read(_BLOCK):
                check()
                found.update(block)
        if base64.b64encode(found.digest()).decode() != expected:
            raise SourceError(f"{self.url}: {file.path} came with another {algorithm} checksum than S3 has of it")

    def _checksum(self, file: RemoteFile, algorithm: str) -> str | None:
        try:
            answer: Any = self._client.head_object(
                Bucket=self.url.bucket, Key=self.url.key_prefix + file.path, IfMatch=file.etag, ChecksumMode="ENABLED"
            )
        except Exception as error:
            raise self.explained(error, file.path) from error
        checksum: str | None = answer.get(f"Checksum{algorithm}")
        # "...-7" is of a multipart upload's seven checksums.
        return None if checksum is None or "-" in checksum else checksum

    def explained(self, error: Exception, path: str = "") -> SourceError:
        """Return the error in plain words, with the folder's URL; `path` is the file that it is about."""
        return error if isinstance(error, SourceError) else SourceError(f"{self.url}: {_reason(error, self.url, path)}")


class Transfers:
    """Objects that boto3's TransferManager downloads in ranges, several at a time, into files of this machine."""

    def __init__(self, folder: S3Folder, client: S3Client, reads: _Reads, on_bytes: Callable[[int], None]) -> None:
        from s3transfer.manager import TransferConfig, TransferManager

        self._folder, self._reads, self._on_bytes = folder, reads, on_bytes
        config = TransferConfig(
            multipart_threshold=1,  # only ranges are read on condition that the object is still the one that was listed
            multipart_chunksize=RANGE,
            max_request_concurrency=THREADS,
            # No waiting in `add`: this many fit.
            max_submission_queue_size=_MAX_FILES,
            max_request_queue_size=1 << 20,
            max_io_queue_size=64,
            io_chunksize=_BLOCK,
            num_download_attempts=_READ_ATTEMPTS,
        )
        self._manager = TransferManager(client, config)
        self._futures: list[TransferFuture] = []
        self._ended: queue.SimpleQueue[tuple[_Transfer, TransferFuture]] = queue.SimpleQueue()

    def add(self, file: RemoteFile, path: Path) -> None:
        """Begin to download `file` to `path`, which is written whole or not at all."""
        url = self._folder.url
        transfer = _Transfer(file, path, self._on_bytes, self._ended)
        # boto3 takes any object with these methods; its base class would have to be imported with this module.
        subscriber = cast("BaseSubscriber", transfer)
        future = self._manager.download(url.bucket, url.key_prefix + file.path, str(path), subscribers=[subscriber])
        self._futures.append(future)

    def next(self, seconds: float) -> tuple[RemoteFile, Path] | None:
        """Wait for the next file that has come, and return it with its path; None where none comes in so many seconds.

        Raises:
            SourceError: a download failed.
            OSError: a file cannot be written.
        """
        try:
            transfer, future = self._ended.get(timeout=seconds)
        except queue.Empty:
            return None
        try:
            future.result()
        except OSError:
            raise
        except Exception as error:
            raise self._folder.explained(error, transfer.file.path) from error
        return transfer.file, transfer.path

    def close(self) -> None:
        """Cancel what has not come. Threads that still wait for S3 end by themselves soon after, and write nothing."""
        for future in self._futures:
            future.cancel()
        threading.Thread(target=self._shut_down, name="download-end", daemon=True).start()

    def _shut_down(self) -> None:
        self._manager.shutdown()
        self._reads.close()


class _Transfer:
    """One file of `Transfers`; boto3 calls the methods named `on_`."""

    def __init__(
        self,
        file: RemoteFile,
        path: Path,
        on_bytes: Callable[[int], None],
        ended: queue.SimpleQueue[tuple[_Transfer, TransferFuture]],
    ) -> None:
        self.file, self.path = file, path
        self._on_bytes, self._ended = on_bytes, ended

    def on_queued(self, future: TransferFuture, **_: Any) -> None:
        future.meta.provide_transfer_size(self.file.size)
        future.meta.provide_object_etag(self.file.etag)

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self._on_bytes(bytes_transferred)

    def on_done(self, future: TransferFuture, **_: Any) -> None:
        self._ended.put((self, future))


class _Crc32:
    """CRC-32, with the methods of hashlib's classes."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


_CHECKSUMS: dict[str, Callable[[], Any]] = {"CRC32": _Crc32, "SHA256": hashlib.sha256, "SHA1": hashlib.sha1}
"""What can be computed fast without AWS's C library; S3 also has CRC32C and CRC64NVME."""


def _client(url: S3Url) -> S3Client:
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
    # Where no region is set, S3 tells the bucket's own in its first answer, and botocore follows.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        session = boto3.session.Session(region_name=region)
        return session.client("s3", config=config, region_name=session.region_name or "us-east-1")
    except (BotoCoreError, ValueError) as error:
        raise SourceError(f"{url}: {error}") from error


class _Reads:
    """Looks at each `GetObject` of a client, by botocore's events.

    Some S3 servers ignore `If-Match`, so each answer is compared with it. And boto3 leaves the connection of a broken
    or cancelled read open until it is collected: here it is closed before its thread's next read, and at the end.
    """

    def __init__(self, client: S3Client) -> None:
        self._bodies: dict[int, Any] = {}
        client.meta.events.register("provide-client-params.s3.GetObject", self._begin)
        client.meta.events.register("after-call.s3.GetObject", self._answered)

    def close(self) -> None:
        """Close all connections; to be called when nothing is read any more."""
        while self._bodies:
            self._bodies.popitem()[1].close()

    def _begin(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        if (body := self._bodies.pop(threading.get_ident(), None)) is not None:
            body.close()
        context["expected_etag"] = params.get("IfMatch")

    def _answered(self, parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        if "Body" in parsed:
            self._bodies[threading.get_ident()] = parsed["Body"]
        expected = context["expected_etag"]
        if expected is not None and parsed.get("ETag", expected) != expected:
            raise _Replaced


class _Replaced(Exception):
    """An object is not the one that was listed."""


_DENIED = frozenset({"AccessDenied", "403"})
_OTHER_REGION = "the bucket is in another region; set AWS_REGION to it"
_REFUSALS = {
    "AllAccessDisabled": "access to the bucket is disabled",
    "NoSuchBucket": "there is no such bucket",
    "404": "there is no such bucket or object",
    "NoSuchKey": "an object that was listed is not there any more",
    "InvalidObjectState": "an object is archived; restore it first",
    "InvalidAccessKeyId": "S3 does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "IllegalLocationConstraintException": _OTHER_REGION,
}


def _reason(error: BaseException, url: S3Url, path: str) -> str:
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    replaced = f"an object was replaced while it was read: {path}"
    match error:
        case RetriesExceededError():
            return _reason(error.last_exception, url, path)
        case _Replaced():
            return replaced
        case S3DownloadFailedError():
            return f"{replaced} (PreconditionFailed)"
        case ClientError():
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            message = str(error.response.get("Error", {}).get("Message", ""))
            if code == "412":
                return f"{replaced} ({code})"
            if code in _DENIED:
                return f"{_denied(error.operation_name, url, message)} ({code})"
            return f"{_REFUSALS.get(code, message or 'S3 refuses')} ({code})"
        case NoCredentialsError() | PartialCredentialsError():
            return "no AWS credentials were found: give the container a role, or set AWS_ACCESS_KEY_ID and its secret"
        case ConnectionError() | HTTPClientError():
            return f"S3 cannot be reached: {error}"
        case BotoCoreError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def _denied(operation: str, url: S3Url, message: str) -> str:
    """What to permit, and what S3 says, which may name the policy that denies it."""
    needed = (
        f"s3:ListBucket on the bucket {url.bucket}"
        if operation == "ListObjectsV2"
        else f"s3:GetObject on {url.bucket}/{url.key_prefix}*, and kms:Decrypt where a KMS key encrypts the objects"
    )
    said = f"; S3 says: {message}" if "not authorized" in message else ""
    return f"access is denied; allow {needed}{said}"
