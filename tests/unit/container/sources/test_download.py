"""Downloads of models from S3, with boto3 and moto's server, and the ways in which a download can fail."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from container.sources import s3
from container.sources.download import LocalCopy, open_model
from container.sources.location import FetchTimeout, S3Url, SourceError
from tests.stand_ins.s3 import Fault, Gate, alter, cut_short, delete, held, put, refuse, slow
from tests.waiting import wait_until

WEIGHTS = bytes(range(256)) * 4096 * 3  # 3 MiB
FILES = {
    "config.json": b'{"architectures": []}',
    "serving.properties": b"option.dtype=fp32\n",
    "tokenizer/tokenizer.json": b"{}",
    "empty.txt": b"",
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],
    "pytorch_model.bin": b"the same once more",
    "original/consolidated.00.pth": b"and once more",
}
WANTED = {name: body for name, body in FILES.items() if not name.endswith((".bin", ".pth"))}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranges so small that a file of a test has several ranges."""
    monkeypatch.setattr(s3, "RANGE", 1 << 20)


@pytest.fixture
def model(s3_address: str, prefix: str, gate: Gate) -> Gate:
    put(s3_address, {f"{prefix}/{name}": body for name, body in FILES.items()})
    put(s3_address, {f"{prefix}/folder/": b"", f"{prefix}-2/config.json": b"of another model"})
    return gate


def fetch(url: str, downloads: Path) -> Path:
    model = open_model(url, downloads)
    model.fetch_weights(60)
    return model.directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refusal(url: str, downloads: Path) -> str:
    with pytest.raises(SourceError) as caught:
        fetch(url, downloads)
    return str(caught.value)


def test_a_folder_is_fetched_whole_but_for_second_forms_of_its_weights(model: Gate, url: str, downloads: Path) -> None:
    directory = fetch(url, downloads)
    assert directory.name == "tiny-model"
    assert contents(directory) == WANTED


def test_settings_are_there_before_the_weights(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    assert contents(opened.directory) == {
        name: body for name, body in WANTED.items() if not name.endswith(".safetensors")
    }
    assert (opened.bytes_here, opened.total_bytes) == (0, 2 * len(WEIGHTS))
    opened.fetch_weights(60)
    assert opened.bytes_here == 2 * len(WEIGHTS)


def test_what_is_there_unchanged_is_not_fetched_again(model: Gate, url: str, downloads: Path) -> None:
    fetch(url, downloads)
    model.gets.clear()
    assert contents(fetch(url, downloads)) == WANTED
    assert model.gets == []


def test_what_has_changed_is_fetched_again_and_what_is_gone_is_removed(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str
) -> None:
    fetch(url, downloads)
    model.gets.clear()
    put(s3_address, {f"{prefix}/model-1.safetensors": b"new", f"{prefix}/config.json": b"{}"})
    delete(s3_address, f"{prefix}/serving.properties")
    delete(s3_address, f"{prefix}/model-2.safetensors")
    directory = fetch(url, downloads)
    expected = WANTED | {"model-1.safetensors": b"new", "config.json": b"{}"}
    assert contents(directory) == {
        name: body for name, body in expected.items() if name not in ("serving.properties", "model-2.safetensors")
    }
    assert {Path(path).name for path in model.gets} == {"model-1.safetensors", "config.json"}


def test_what_is_gone_is_removed_if_nothing_else_has_changed(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str
) -> None:
    fetch(url, downloads)
    delete(s3_address, f"{prefix}/serving.properties")
    assert "serving.properties" not in contents(fetch(url, downloads))


def test_a_folder_that_has_become_a_file_is_replaced(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str
) -> None:
    put(s3_address, {f"{prefix}/parts/inner/1": b"1"})
    fetch(url, downloads)
    delete(s3_address, f"{prefix}/parts/inner/1")
    put(s3_address, {f"{prefix}/parts": b"whole"})
    assert contents(fetch(url, downloads)) == WANTED | {"parts": b"whole"}


def test_a_file_that_was_damaged_here_is_fetched_again(model: Gate, url: str, downloads: Path) -> None:
    directory = fetch(url, downloads)
    (directory / "model-1.safetensors").write_bytes(b"half")
    (directory / "config.json").unlink()
    assert contents(fetch(url, downloads)) == WANTED


@pytest.mark.parametrize("fault", [lambda: refuse(503, "SlowDown", times=6), lambda: cut_short(times=3)])
def test_errors_of_s3_and_bodies_that_end_too_early_are_tried_again(
    model: Gate, url: str, downloads: Path, fault: Callable[[], Fault]
) -> None:
    opened = open_model(url, downloads)
    model.fault = fault()
    opened.fetch_weights(60)
    assert contents(opened.directory) == WANTED
    assert opened.bytes_here == opened.total_bytes


def test_a_file_that_was_altered_on_its_way_is_never_kept(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    model.fault = alter(times=1)
    with pytest.raises(SourceError, match=r"model-\d.safetensors .*CRC32"):
        opened.fetch_weights(60)
    with pytest.raises(SourceError):
        open_model(url, downloads, offline=True)
    model.fault = None
    assert contents(fetch(url, downloads)) == WANTED


def test_an_object_that_is_replaced_in_the_middle_is_never_mixed_of_both(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "THREADS", 1)
    opened = open_model(url, downloads)

    def replace(_: object) -> bool:
        model.fault = None
        put(s3_address, {f"{prefix}/model-1.safetensors": WEIGHTS[::-1]})
        return False

    model.fault = replace
    with pytest.raises(SourceError) as refused:
        opened.fetch_weights(60)
    assert str(refused.value).startswith(f"{url}: ")
    assert "model-1.safetensors" in str(refused.value)
    assert "model-1.safetensors" not in contents(opened.directory)
    assert contents(fetch(url, downloads)) == WANTED | {"model-1.safetensors": WEIGHTS[::-1]}


def test_what_never_succeeds_ends_with_the_reason(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    model.fault = cut_short(times=1_000_000)
    with pytest.raises(SourceError, match=r"s3://models/.*IncompleteRead|bytes"):
        opened.fetch_weights(60)
    assert not [name for name in contents(opened.directory) if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "AccessDenied) when calling the GetObject operation"),
        (403, "ExpiredToken", "ExpiredToken"),
        (412, "PreconditionFailed", "replaced while it was read"),
    ],
)
def test_a_refusal_is_said_in_words(model: Gate, url: str, downloads: Path, status: int, code: str, words: str) -> None:
    model.fault = refuse(status, code)
    message = refusal(url, downloads)
    assert message.startswith(url)
    assert words in message


@pytest.mark.parametrize("name", ["model", "listing", "lock", "partial.1", "weights"])
def test_a_model_may_be_called_like_the_records_of_a_download(
    gate: Gate, url: str, prefix: str, downloads: Path, s3_address: str, name: str
) -> None:
    put(s3_address, {f"{prefix}/{name}/{file}": body for file, body in WANTED.items()})
    for _ in range(2):
        directory = fetch(f"{url}{name}", downloads)
        assert (directory.name, contents(directory)) == (name, WANTED)
    assert [Path(path).name for path in gate.gets].count("config.json") == 1


def test_empty_objects_that_stand_for_folders_are_left_out(
    gate: Gate, url: str, prefix: str, downloads: Path, s3_address: str
) -> None:
    marks = ("", "sub", "sub/", "sub/more", "sub/more/")
    put(s3_address, {f"{prefix}/{mark}": b"" for mark in marks} | {f"{prefix}/sub/more/x.json": b"{}"})
    assert contents(fetch(url, downloads)) == {"sub/more/x.json": b"{}"}
    put(s3_address, {f"{prefix}/sub": b"something"})
    assert "'sub' is an object, and the folder of others" in refusal(url, downloads)


ODD = (
    *("a b.txt", "a+b.txt", "100%.txt", "%41.txt", "ä/日本.txt"),
    *(" lead.txt", "trail .txt", "q?x=1&y#z.txt", "it's.txt", '".txt'),
)


def test_keys_with_odd_characters_are_fetched_under_their_own_names(
    gate: Gate, prefix: str, downloads: Path, s3_address: str
) -> None:
    for place in (f"{prefix}/my model+v1%20ü", f"{prefix}/my model+v1%20ü2"):
        put(s3_address, {f"{place}/{name}": f"{place} {name}".encode() for name in ODD})
    place = f"{prefix}/my model+v1%20ü"
    for end in ("", "/", "//"):
        directory = fetch(f"s3://models/{place}{end}", downloads)
        assert directory.name == "my model+v1%20ü"
        assert contents(directory) == {name: f"{place} {name}".encode() for name in ODD}


def test_a_folder_of_more_objects_than_one_listing_shows_is_fetched_whole(
    gate: Gate, url: str, prefix: str, downloads: Path, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    wanted = {f"{number:04}.json": str(number).encode() for number in range(23)}
    put(s3_address, {f"{prefix}/{name}": body for name, body in wanted.items()})
    assert contents(fetch(url, downloads)) == wanted


def test_no_bucket_no_objects_no_server_and_no_credentials_are_told_apart(
    gate: Gate, url: str, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal("s3://there-is-none/x", downloads)
    assert message.startswith("s3://there-is-none/x/: ")
    assert "The specified bucket does not exist" in message
    assert "no objects below this prefix" in refusal(url, downloads)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "Could not connect to the endpoint URL" in refusal(url, downloads)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "Unable to locate credentials" in refusal(url, downloads)


@pytest.mark.parametrize("key", ["../outside.txt", "a//b.txt", "./c.txt", "a\\b"])
def test_no_object_leaves_the_directory(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str, key: str
) -> None:
    put(s3_address, {f"{prefix}/{key}": b"x"})
    assert "cannot be the path of a file" in refusal(url, downloads)
    assert not (downloads.parent / "outside.txt").exists()


def test_an_object_that_is_a_folder_too_is_refused(
    model: Gate, url: str, prefix: str, downloads: Path, s3_address: str
) -> None:
    put(s3_address, {f"{prefix}/tokenizer": b"x"})
    assert "no directory can hold both" in refusal(url, downloads)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    model: Gate, url: str, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1 << 20))
    assert "SERVING_DOWNLOAD_DIR names another place" in refusal(url, downloads)
    assert not list(downloads.rglob("*.safetensors"))


def test_a_disk_that_fills_up_is_said(model: Gate, url: str, downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(url, downloads)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("s3transfer.download.IOWriteTask._main", full)
    with pytest.raises(SourceError, match="SERVING_DOWNLOAD_DIR"):
        opened.fetch_weights(60)


def test_a_file_that_cannot_be_put_in_its_place_is_said(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    (opened.directory / "model-1.safetensors").mkdir()
    with pytest.raises(SourceError, match=r"Is a directory.*model-1\.safetensors"):
        opened.fetch_weights(60)


def test_a_place_that_cannot_be_written_is_said(model: Gate, url: str) -> None:
    assert "/proc/slipway" in refusal(url, Path("/proc/slipway"))


def test_a_file_in_the_place_of_the_directory_is_said(model: Gate, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for offline in (False, True):
        with pytest.raises(SourceError, match=r"Not a directory.*SERVING_DOWNLOAD_DIR"):
            open_model(url, tmp_path / "file", offline=offline)


def test_the_time_is_limited(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    model.fault = held(let_go := threading.Event())
    with pytest.raises(FetchTimeout, match=r"0\.5 s; 0\.00 of 0\.01 GiB"):
        opened.fetch_weights(0.5)
    let_go.set()


def test_a_stop_ends_it(model: Gate, url: str, downloads: Path) -> None:
    opened = open_model(url, downloads)
    model.fault = held(let_go := threading.Event())
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(SourceError):
        opened.fetch_weights(60, stop)
    let_go.set()


SCRIPT = """
import sys
from pathlib import Path
from container.sources import s3
from container.sources.download import open_model
s3.RANGE = 1 << 20
model = open_model(sys.argv[1], Path(sys.argv[2]))
model.fetch_weights(60)
print(model.directory, flush=True)
"""


def start_fetch(url: str, downloads: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, str(downloads)], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )


def test_a_download_that_was_killed_goes_on_with_what_is_missing(model: Gate, url: str, downloads: Path) -> None:
    model.fault = slow(30.0, ending="model-2.safetensors")
    with start_fetch(url, downloads) as process:

        def first_is_complete() -> bool:
            assert process.poll() is None
            try:
                return bool(list(downloads.rglob("model-1.safetensors")))
            except FileNotFoundError:  # the process has just removed a folder of parts
                return False

        wait_until(first_is_complete)
        process.send_signal(signal.SIGKILL)
    opened = open_model(url, downloads, offline=False)
    with pytest.raises(SourceError):
        open_model(url, downloads, offline=True)
    model.fault = None
    model.gets.clear()
    opened.fetch_weights(60)
    assert {Path(path).name for path in model.gets} == {"model-2.safetensors"}
    assert contents(opened.directory) == WANTED
    assert not list(downloads.rglob("partial.*"))


def test_several_processes_share_one_download(model: Gate, url: str, downloads: Path) -> None:
    model.fault = slow(0.2)
    processes = [start_fetch(url, downloads) for _ in range(3)]
    for process in processes:
        with process:
            (line,) = process.stdout.readlines()  # type: ignore[union-attr]
        assert process.returncode == 0
        assert contents(Path(line.strip())) == WANTED
    names = [Path(path).name for path in model.gets]
    assert names.count("config.json") == 1
    assert names.count("model-1.safetensors") == 3  # ranges


def test_offline_a_whole_copy_is_enough(model: Gate, url: str, downloads: Path) -> None:
    fetch(url, downloads)
    model.fault = refuse(403, "AccessDenied")
    model.gets.clear()
    opened = open_model(url, downloads, offline=True)
    opened.fetch_weights(1)
    assert contents(opened.directory) == WANTED
    assert model.gets == []
    assert opened.bytes_here == opened.total_bytes > 0


@pytest.mark.parametrize("listing", [b"", b'[{"path": "model-1.safetens'])
def test_without_a_listing_all_is_fetched_again(model: Gate, url: str, downloads: Path, listing: bytes) -> None:
    directory = fetch(url, downloads)
    (LocalCopy(S3Url.parse(url), downloads).root / "listing").write_bytes(listing)
    (directory / "model-1.safetensors").write_bytes(WEIGHTS[::-1])
    assert contents(fetch(url, downloads)) == WANTED


def test_progress_is_logged(
    model: Gate, url: str, downloads: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("container.sources.download._LOG_SECONDS", 0.1)
    model.fault = slow(0.5, ending="model-2.safetensors")
    with caplog.at_level(logging.INFO):
        fetch(url, downloads)
    assert "of 0.01 GiB" in caplog.text
    assert "GiB/s" in caplog.text
