from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import InvalidRequest, Overloaded
from handlers.model_config import ModelConfig
from handlers.openai.media.limits import MediaMemory, RequestMedia
from tests.settings import configured
from tests.waiting import until

CONFIG = ModelConfig(name="model", model_dir=Path("."), model_id="m")
MIB = 1 << 20


def test_photographs_of_phones_pass() -> None:
    memory = MediaMemory(CONFIG)
    media = RequestMedia(memory)
    media.add_image(8064, 6048)  # 48 megapixels
    media.add_image(8160, 6144)  # 50 megapixels
    for _ in range(12):
        media.add_image(4032, 3024)
    assert memory.used == 4 * (8064 * 6048 + 8160 * 6144 + 12 * 4032 * 3024)


def test_an_image_is_refused_by_its_pixels() -> None:
    media = RequestMedia(MediaMemory(configured(CONFIG, max_image_pixels=100)))
    media.add_image(10, 10)
    with pytest.raises(InvalidRequest, match=r"101x1 .*100 .*option\.max_image_pixels"):
        media.add_image(101, 1)
    with pytest.raises(InvalidRequest, match="101x1"):
        media.add_frames(101, 1, 1)


def test_the_images_and_frames_of_a_request_are_refused_by_all_their_pixels() -> None:
    memory = MediaMemory(configured(CONFIG, max_request_pixels=300))
    media = RequestMedia(memory)
    media.add_image(10, 10)
    media.add_frames(10, 10, 2)
    with pytest.raises(InvalidRequest, match=r"300 .*option\.max_request_pixels"):
        media.add_image(1, 1)
    RequestMedia(memory).add_image(10, 10)


def test_downloads_of_a_request_are_counted_together() -> None:
    media = RequestMedia(MediaMemory(configured(CONFIG, max_media_download_mb=2)))
    media.add_download(MIB)
    media.add_download(MIB)
    with pytest.raises(InvalidRequest, match="2 MiB"):
        media.add_download(1)


def test_a_video_has_a_time_to_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    media = RequestMedia(MediaMemory(replace(CONFIG, predict_timeout=30.0)))
    media.check_decoding()
    now = 130.0
    media.check_decoding()
    now = 130.5
    with pytest.raises(InvalidRequest, match=r"30 s .*option\.predict_timeout"):
        media.check_decoding()


async def test_a_request_takes_only_some_of_the_places_for_downloads() -> None:
    memory = MediaMemory(CONFIG)
    first, second = RequestMedia(memory), RequestMedia(memory)
    held: list[RequestMedia] = []

    async def hold(media: RequestMedia) -> None:
        async with media.download():
            held.append(media)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold(media)) for media in (*[first] * 20, second)]
    await until(lambda: second in held)
    assert held.count(first) == 10
    for task in tasks:
        task.cancel()


def test_requests_share_the_memory_until_the_engine_has_their_prompts() -> None:
    memory = MediaMemory(configured(CONFIG, max_media_memory_mb=3))
    first, second = RequestMedia(memory), RequestMedia(memory)
    first.add_decoded(2 * MIB)
    with pytest.raises(Overloaded):
        second.add_decoded(2 * MIB)
    first.release()
    second.add_decoded(2 * MIB)
    with pytest.raises(Overloaded):
        first.add_decoded(2 * MIB)
    second.close()
    second.close()
    assert memory.used == 0
    first.add_decoded(2 * MIB)


def test_a_request_that_could_never_be_held_is_the_clients_fault() -> None:
    media = RequestMedia(MediaMemory(configured(CONFIG, max_media_memory_mb=1)))
    with pytest.raises(InvalidRequest, match=r"\(option\.max_media_memory_mb\)"):
        media.add_decoded(MIB + 1)


def test_a_thread_that_outlives_its_request_holds_nothing() -> None:
    memory = MediaMemory(CONFIG)
    media = RequestMedia(memory)
    media.close()
    with pytest.raises(InvalidRequest):
        media.add_image(10, 10)
    assert memory.used == 0
