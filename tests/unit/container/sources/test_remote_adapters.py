"""Adapters on S3, fetched from moto's server, and adapters in the cache of the hub."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from container.sources.remote_adapters import RemoteAdapters
from engines.errors import AdapterFailed, InvalidParameter
from tests.stand_ins.s3 import Gate, held, put, refuse
from tests.waiting import until

FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"weights", "adapter_model.bin": b"again"}
WANTED = {name: body for name, body in FILES.items() if not name.endswith(".bin")}


@pytest.fixture
def url(s3_address: str, prefix: str, gate: Gate) -> str:
    put(s3_address, {f"{prefix}/{name}": body for name, body in FILES.items()})
    return f"s3://models/{prefix}"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def whole_files_in(downloads: Path) -> set[str]:
    """Return the names of files that could be loaded."""
    return {path.name for path in downloads.glob("models/*/model/*/*")}


async def test_a_url_has_one_copy(url: str, tmp_path: Path) -> None:
    adapters = RemoteAdapters(60, offline=False, downloads=tmp_path)
    first, second = await adapters.fetch(url), await adapters.fetch(f"{url}/")
    assert first == second
    assert contents(first) == WANTED
    assert await RemoteAdapters(60, offline=True, downloads=tmp_path).fetch(url) == first


@pytest.mark.parametrize(
    ("src", "reason"),
    [
        ("s3://models/nothing/here", "s3://models/nothing/here/: there are no objects below this prefix"),
        ("s3://no-such-bucket/x", "The specified bucket does not exist"),
        ("s3:///x", "allowed: s3://bucket/prefix/"),
    ],
)
async def test_a_place_that_cannot_be_read_is_a_wrong_parameter(
    url: str, tmp_path: Path, src: str, reason: str
) -> None:
    adapters = RemoteAdapters(60, offline=False, downloads=tmp_path)
    with pytest.raises(InvalidParameter, match="`src`") as caught:
        await adapters.fetch(src)
    assert reason in caught.value.message
    assert not whole_files_in(tmp_path) & {"adapter_model.safetensors"}


async def test_a_download_that_fails_leaves_nothing(
    url: str, prefix: str, s3_address: str, gate: Gate, tmp_path: Path
) -> None:
    adapters = RemoteAdapters(60, offline=False, downloads=tmp_path)
    gate.fault = refuse(403, "AccessDenied")
    with pytest.raises(InvalidParameter, match="AccessDenied"):
        await adapters.fetch(url)
    gate.fault = lambda passing: passing.path.endswith(".safetensors") and refuse(403, "AccessDenied")(passing)
    with pytest.raises(AdapterFailed, match="AccessDenied"):
        await adapters.fetch(url)
    assert not whole_files_in(tmp_path) & {"adapter_model.safetensors"}


async def test_a_download_that_takes_too_long_names_the_setting(url: str, gate: Gate, tmp_path: Path) -> None:
    adapters = RemoteAdapters(0.5, offline=False, downloads=tmp_path)
    gate.fault = held(let_go := threading.Event(), ending=".safetensors")
    with pytest.raises(AdapterFailed, match=r"0\.5 s.*option\.model_loading_timeout"):
        await adapters.fetch(url)
    let_go.set()
    assert not whole_files_in(tmp_path) & {"adapter_model.safetensors"}


async def test_a_download_does_not_hold_up_the_event_loop_and_ends_when_it_is_cancelled(
    url: str, gate: Gate, tmp_path: Path
) -> None:
    adapters = RemoteAdapters(60, offline=False, downloads=tmp_path)
    gate.fault = held(let_go := threading.Event(), ending=".safetensors")
    fetching = asyncio.create_task(adapters.fetch(url))
    await until(lambda: any(path.endswith(".safetensors") for path in gate.gets))
    fetching.cancel()
    await until(fetching.done)
    await until(lambda: not any(tmp_path.glob("models/*/partial.*/*")))
    let_go.set()
    assert not whole_files_in(tmp_path) & {"adapter_model.safetensors"}


async def test_nothing_is_fetched_where_nobody_may_be_asked(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="DJL_OFFLINE"):
        await RemoteAdapters(60, offline=True, downloads=tmp_path).fetch(url)


async def test_an_adapter_on_the_hub_is_that_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    for revision, commit in {"main": "1" * 40, "v2": "2" * 40}.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "adapter_config.json").write_text(revision)
    adapters = RemoteAdapters(60, offline=True, downloads=tmp_path)
    for url, revision in {"hf://org/name": "main", "hf://org/name@v2": "v2"}.items():
        assert contents(await adapters.fetch(url)) == {"adapter_config.json": revision.encode()}
    for url in ("hf://org/other", "hf://org/name@v3", "hf://a/b/c"):
        with pytest.raises(InvalidParameter):
            await adapters.fetch(url)
