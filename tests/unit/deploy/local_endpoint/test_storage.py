"""The storages of `s3://` objects: a folder, and a stand-in for S3."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from container.sources.location import S3Url
from deploy.local_endpoint.settings import OWN_BUCKET, LocalSettings
from deploy.local_endpoint.storage import FolderStorage, S3Storage, Storage, StorageError, storage_of
from tests.stand_ins.s3 import BUCKET, CREDENTIALS, moto, put

ANSWER = S3Url(BUCKET, "answers/a b.out")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of S3's stand-in, which has one bucket. boto3's environment variables have its address."""
    with moto() as address:
        for name, value in CREDENTIALS.items() | {("AWS_ENDPOINT_URL_S3", address)}:
            monkeypatch.setenv(name, value)
        httpx.post(f"{address}/moto-api/reset")
        put(address, {})
        with contextlib.closing(boto3.client("s3", region_name="us-east-1")) as client:
            yield client


@pytest.fixture(params=["s3", "folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return storage_of(LocalSettings(endpoints=("e",), s3_folder=tmp_path))
    request.getfixturevalue("client")
    return storage_of(LocalSettings(endpoints=("e",), uses_s3=True))


def test_an_object_that_was_written_is_read_again(storage: Storage) -> None:
    for body in (b"\x00first", b"second", b""):
        storage.write(ANSWER, body, "application/json")
        assert (storage.size(ANSWER), storage.read(ANSWER)) == (len(body), body)


def test_an_object_that_is_missing_is_an_error(storage: Storage) -> None:
    for read in (storage.size, storage.read):
        with pytest.raises(StorageError, match=r"Not Found|No such file"):
            read(S3Url(BUCKET, "missing"))
    with pytest.raises(StorageError):
        storage.size(S3Url("no-such-bucket", "missing"))


@pytest.mark.parametrize(("region", "place"), [("us-east-1", None), ("eu-west-1", "eu-west-1")])
def test_the_default_bucket_alone_is_made_in_the_region(
    client: Any, monkeypatch: pytest.MonkeyPatch, region: str, place: str | None
) -> None:
    monkeypatch.setenv("AWS_REGION", region)
    S3Storage().write(S3Url(OWN_BUCKET, "a"), b"x", "text/csv")
    assert client.get_object(Bucket=OWN_BUCKET, Key="a")["ContentType"] == "text/csv"
    assert client.get_bucket_location(Bucket=OWN_BUCKET).get("LocationConstraint") == place
    with pytest.raises(StorageError, match="The specified bucket does not exist"):
        S3Storage().write(S3Url("other-bucket", "a"), b"x", "")


def test_a_link_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "s3"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError):
        FolderStorage(folder).read(S3Url("b", "link"))


def test_only_regular_files_are_read_and_nothing_blocks(tmp_path: Path) -> None:
    folder, bucket = FolderStorage(tmp_path), tmp_path / BUCKET
    bucket.mkdir()
    os.mkfifo(bucket / "pipe")
    (bucket / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bucket / "socket"))
    (bucket / "to-pipe").symlink_to("pipe")
    for key in ("pipe", "directory", "socket", "to-pipe"):
        for read in (folder.size, folder.read):
            with pytest.raises(StorageError):
                read(S3Url(BUCKET, key))


def test_a_loop_of_links_and_a_link_to_a_device_are_errors_with_a_reason(tmp_path: Path) -> None:
    folder, bucket = FolderStorage(tmp_path), tmp_path / BUCKET
    bucket.mkdir()
    (bucket / "a").symlink_to("b")
    (bucket / "b").symlink_to("a")
    (bucket / "zero").symlink_to("/dev/zero")
    for key, reason in (("a", "symbolic links"), ("a/c", "symbolic links"), ("zero", "leaves the folder")):
        for use in (folder.size, folder.read, lambda url: folder.write(url, b"", "")):
            with pytest.raises(StorageError, match=reason):
                use(S3Url(BUCKET, key))
