"""The limits of media on vLLM's own loaders, without an engine."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import InvalidRequest
from engines.statistics import EngineStatistics
from handlers.model_config import ModelConfig
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.media.limits import MediaMemory, RequestMedia
from handlers.queue import EngineQueue
from tests.live.media_host import hosting
from tests.live.pictures import bomb, data_url, encoded
from tests.settings import configured

CONFIG = ModelConfig(name="model", model_dir=Path("."), model_id="m")


class Loading:
    """Loads media as vLLM loads the media of a call's message."""

    def __init__(self, **limits: Any) -> None:
        from handlers.openai.media.connector import bound_media

        bound_media()
        self.memory = MediaMemory(configured(CONFIG, **limits))
        queue = EngineQueue(SimpleNamespace(statistics=EngineStatistics()), 4)  # type: ignore[arg-type]
        self.call = OpenAICall(queue, media=self.memory)

    def load(self, kind: str, *urls: str, media_io_kwargs: Any = None, **options: Any) -> list[Any]:
        """Load the media of all URLs at the same time, as vLLM's parser of chats does."""
        import vllm.envs as envs
        from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

        async def load() -> list[Any]:
            current_call.set(self.call)
            connector = MEDIA_CONNECTOR_REGISTRY.load(
                envs.VLLM_MEDIA_CONNECTOR,
                media_io_kwargs=media_io_kwargs,
                allowed_local_media_path=options.get("path", ""),
                allowed_media_domains=options.get("domains"),
                **options.get("budgets", {}),
            )
            return list(await asyncio.gather(*(getattr(connector, f"fetch_{kind}_async")(url) for url in urls)))

        return asyncio.run(load())

    def refusal(self, kind: str, *urls: str, **options: Any) -> str:
        """The message of the 400 that the client gets."""
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
        from vllm.exceptions import VLLMClientError

        with pytest.raises(VLLMClientError) as caught:
            self.load(kind, *urls, **options)
        info = create_error_response(caught.value).error
        assert (info.code, info.param) == (HTTPStatus.BAD_REQUEST, f"{kind}_url")
        return str(info.message)


@pytest.fixture(scope="module", autouse=True)
def vllms_connector() -> Iterator[None]:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    before = dict(MEDIA_CONNECTOR_REGISTRY.name2class)
    yield
    MEDIA_CONNECTOR_REGISTRY.name2class = before


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF"])
def test_images_are_loaded_and_counted(kind: str) -> None:
    loading = Loading()
    (image,) = loading.load("image", data_url(encoded(40, 30, kind)))
    assert (image.media.size, image.media.mode) == ((40, 30), "RGB")
    assert loading.memory.used == 4 * 40 * 30
    loading.call.close()
    assert loading.memory.used == 0


def test_requests_beyond_the_memory_get_503() -> None:
    from vllm.exceptions import GracefulHTTPError

    first = Loading(max_media_memory_mb=1)
    first.load("image", data_url(encoded(400, 400)))
    second = Loading(max_media_memory_mb=1)
    second.call.media = RequestMedia(first.memory)
    with pytest.raises(GracefulHTTPError) as caught:
        second.load("image", data_url(encoded(400, 400)))
    assert caught.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE


def icon() -> bytes:
    """An icon of 16 x 16 that holds a larger image."""
    image = encoded(4000, 4000)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(image), 22) + image


def tiled() -> bytes:
    """A TIFF of one pixel, with a tile of 20000 x 20000."""
    tags = [
        *((256, 4, 1, 1), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1), (277, 3, 1, 1)),
        *((322, 4, 1, 20000), (323, 4, 1, 20000), (324, 4, 1, 4), (325, 4, 1, 4)),
    ]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_images_that_are_larger_than_they_say_are_refused() -> None:
    assert "is an image in ICO; taken are PNG, JPEG" in Loading().refusal("image", data_url(icon()))
    assert "is an image of 20000x20000 pixels" in Loading().refusal("image", data_url(tiled()))
    pillows = Loading().refusal("image", data_url(bomb(60000, 60000)))
    assert "more than 64000000 pixels (option.max_image_pixels)" in pillows


def test_an_animation_is_its_first_frame() -> None:
    from PIL import Image

    with BytesIO() as file:
        frames = [Image.new("RGB", (50, 50), (shade, 0, 0)) for shade in range(100)]
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
        animation = file.getvalue()
    loading = Loading(max_request_pixels=2500)
    (image,) = loading.load("image", data_url(animation))
    assert image.media.size == (50, 50)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,A*", "`image_url` cannot be decoded: "),
        ("data:image/png,abc", "`image_url` must be base64: data:<type>;base64,<data>"),
        ("data:x", "`image_url` cannot be loaded: Invalid data URL"),
        ("http://h:99999" + "/a" * 8000, "`image_url` "),
        ("ftp://a/b", "`image_url` cannot be loaded: The URL must be either"),
    ],
)
def test_what_cannot_be_loaded_is_the_clients_fault(url: str, message: str) -> None:
    refusal = Loading().refusal("image", url)
    assert refusal.startswith(message)
    assert len(refusal) < 1000


def test_a_local_file_has_the_same_limits(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(40, 30))
    (tmp_path / "b.png").write_bytes(bomb(13000, 13000))
    path = str(tmp_path)
    (image,) = Loading().load("image", f"file://{path}/a.png", path=path)
    assert image.media.size == (40, 30)
    assert "13000x13000" in Loading().refusal("image", f"file://{path}/b.png", path=path)
    assert "cannot be read" in Loading().refusal("image", f"file://{path}/none.png", path=path)
    assert "must be a subpath" in Loading().refusal("image", "file:///etc/passwd", path=path)


def test_urls_are_fetched_from_allowed_networks_only() -> None:
    from vllm.exceptions import VLLMUnprocessableEntityError

    with hosting(encoded(40, 30)) as url:
        with pytest.raises(VLLMUnprocessableEntityError, match=r"`image_url` cannot be fetched from a public address"):
            Loading().load("image", url)
        loading = Loading(allowed_media_networks=("127.0.0.0/8",))
        (image,) = loading.load("image", url)
        assert image.media.size == (40, 30)
        assert loading.memory.used == 4 * 40 * 30 + len(encoded(40, 30))
        with pytest.raises(
            VLLMUnprocessableEntityError, match=r"must be from one of the hosts of option\.allowed_media"
        ):
            loading.load("image", url, domains=["media.example"])
        with pytest.raises(VLLMUnprocessableEntityError, match="`audio_url` must be an http, https or data URL"):
            loading.load("audio", "http://xn--a/x.wav")


def test_scores_take_no_images() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    async def load() -> None:
        current_call.set(Loading().call)
        MEDIA_CONNECTOR_REGISTRY.load("http").fetch_image(data_url(encoded(40, 30)))

    with pytest.raises(VLLMValidationError, match="`image_url` is not taken on this route"):
        asyncio.run(load())


@pytest.mark.parametrize("salt", ["", "of a key"])
def test_media_that_clients_name_are_kept_apart_by_salts(salt: str) -> None:
    from engines.vllm.internals import module_of

    loading = Loading()
    loading.call.cache_salt = salt

    async def named() -> Any:
        current_call.set(loading.call)
        return module_of("_resolve_items")._resolve_items({"image": [("x", "invoice-17"), ("y", None)]}, object(), {})

    data, uuids = asyncio.run(named())
    assert data == {"image": ["x", "y"]}
    assert (uuids["image"][0] == "invoice-17", uuids["image"][1]) == (not salt, None)
    assert uuids == asyncio.run(named())[1]


def test_the_budgets_of_the_next_vllm_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 passes two more arguments to the connector, and one more to the connector's connection."""
    from vllm.exceptions import VLLMClientError
    from vllm.multimodal.media import MediaConnector

    class Budget:
        def charge(self, size: int) -> None:
            raise ValueError(f"{size} bytes are too many")

    init, budget = MediaConnector.__init__, Budget()

    def next_init(self: Any, *arguments: Any, decoded_budget: Any, download_budget: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        assert decoded_budget is download_budget is budget
        fetch = self.connection.async_get_bytes
        self.connection.async_get_bytes = partial(fetch, request_budget=download_budget)

    monkeypatch.setattr(MediaConnector, "__init__", next_init)
    loading = Loading(allowed_media_networks=("127.0.0.0/8",))
    with (
        hosting(encoded(40, 30)) as url,
        pytest.raises(VLLMClientError, match=r"`image_url` cannot be loaded: .* bytes are too many"),
    ):
        loading.load("image", url, budgets={"decoded_budget": budget, "download_budget": budget})


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Ten frames of 64 x 48."""
    import cv2
    import numpy as np

    path = tmp_path_factory.mktemp("video") / "a.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    for shade in range(10):
        writer.write(np.full((48, 64, 3), shade * 20, np.uint8))
    writer.release()
    return path.read_bytes()


def test_frames_are_counted_before_any_of_vllms_loaders_decodes_them(video: bytes) -> None:
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

    url = data_url(video, "video/avi")
    for name, loader in VIDEO_LOADER_REGISTRY.name2class.items():
        assert issubclass(loader, VideoLoader), "its methods are those that are replaced"
        if name == "pynvvideocodec":  # This loader decodes on a GPU.
            continue
        options = {"video": {"video_backend": name}}
        loading = Loading()
        (loaded,) = loading.load("video", url, media_io_kwargs=options)
        frames = loaded.media[0]
        assert frames.shape[1:] == (48, 64, 3), name
        assert loading.memory.used == frames.nbytes, name
        few = Loading(max_request_pixels=48 * 64 * len(frames) - 1)
        assert "option.max_request_pixels" in few.refusal("video", url, media_io_kwargs=options), name
        small = Loading(max_image_pixels=48 * 63).refusal("video", url, media_io_kwargs=options)
        assert "is a video of 64x48 pixels" in small, name


def test_a_video_that_says_it_has_too_many_frames_is_refused(monkeypatch: pytest.MonkeyPatch, video: bytes) -> None:
    import handlers.openai.media.connector as module

    monkeypatch.setattr(module, "MOST_FRAMES", 9)
    refusal = Loading().refusal("video", data_url(video, "video/avi"), media_io_kwargs={"video": {"num_frames": -1}})
    assert "is a video of 10 frames; at most 9 are taken" in refusal


def test_frames_may_not_grow_and_none_is_decoded_for_a_request_that_has_ended() -> None:
    """A video may change its size in the middle, and the decoder follows."""
    import numpy as np

    from handlers.openai.media.connector import _Capture

    frames = [np.zeros((48, 64, 3), np.uint8), np.zeros((4800, 6400, 3), np.uint8)]
    sides = iter((64, 48))
    capture = SimpleNamespace(get=lambda _: next(sides), grab=lambda: True, retrieve=lambda: (True, frames.pop(0)))
    media = RequestMedia(MediaMemory(CONFIG))
    bounded = _Capture(capture, media)
    assert bounded.read()[1].shape == (48, 64, 3)
    with pytest.raises(InvalidRequest, match="frames larger than its 64x48"):
        bounded.retrieve()
    assert bounded.grab()
    media.close()
    with pytest.raises(InvalidRequest, match="the request has ended"):
        bounded.grab()


def test_frames_that_come_as_images_are_counted() -> None:
    frame = base64.b64encode(encoded(40, 30, "JPEG")).decode()
    url = f"data:video/jpeg;base64,{frame},{frame},{frame}"
    (loaded,) = Loading().load("video", url)
    assert loaded.media[0].shape == (3, 30, 40, 3)
    assert "option.max_request_pixels" in Loading(max_request_pixels=3599).refusal("video", url)


def test_a_decoder_that_there_is_not_is_the_clients_fault(video: bytes) -> None:
    from vllm.exceptions import VLLMValidationError

    url = data_url(video, "video/avi")
    with pytest.raises(VLLMValidationError, match="there is no such video_backend"):
        Loading().load("video", url, media_io_kwargs={"video": {"video_backend": "none"}})
    assert "cannot be decoded" in Loading().refusal("video", url, media_io_kwargs={"video": {"backend": "none"}})
    assert "is no image" not in Loading().refusal("video", data_url(b"no video", "video/avi"))


def test_sounds_are_counted_once_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests in test_speech_live.py would also pass if sounds were not counted."""
    import numpy as np
    from vllm.multimodal.media.audio import AudioMediaIO

    from handlers.openai.media.connector import counted_speech

    monkeypatch.setattr(AudioMediaIO, "load_bytes", lambda *_: (np.zeros(1000, np.float32), 16000))
    loading = Loading()
    loading.load("audio", data_url(b"sound", "audio/wav"))
    assert loading.memory.used == 4000

    async def decode(_: bytes) -> tuple[list[Any], float]:
        return [np.zeros(1000, np.float32)] * 2, 0.1

    async def transcribe() -> None:
        current_call.set(loading.call)
        await counted_speech(decode)(b"")

    asyncio.run(transcribe())
    assert loading.memory.used == 4000 + 8000


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_sounds_of_common_formats_are_decoded(kind: str) -> None:
    import numpy as np
    import soundfile

    with BytesIO() as file:
        soundfile.write(file, np.zeros(22050, np.float32), 22050, format=kind)
        data = file.getvalue()
    ((samples, rate),) = Loading().load("audio", data_url(data, "audio/x"))
    assert rate == 22050
    assert 22050 <= len(samples) <= 25000


@pytest.mark.skipif(find_spec("torchcodec") is not None, reason="torchcodec is installed")
def test_a_missing_torchcodec_is_not_logged_for_each_sound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np
    import soundfile
    from vllm.multimodal.media import audio
    from vllm.multimodal.parse import MultiModalDataParser

    from engines.vllm.patches.media import patch_sounds

    monkeypatch.setattr(MultiModalDataParser.__init__, "__kwdefaults__", {"audio_resample_method": ""})
    monkeypatch.setattr(audio.logger, "filters", [])
    with BytesIO() as file:
        soundfile.write(file, np.zeros(100, np.float32), 22050, format="WAV")
        url = data_url(file.getvalue(), "audio/wav")
    Loading().load("audio", url)
    assert "torchcodec unavailable" in caplog.text
    caplog.clear()
    patch_sounds()
    Loading().load("audio", url)
    audio.logger.error("an error")
    assert [record.message for record in caplog.records] == ["an error"]


def test_the_prompts_images_are_dropped_when_the_engine_has_it() -> None:
    from handlers.openai.vllm.engine_client import EngineClient

    loading = Loading()
    loading.load("image", data_url(encoded(40, 30)))
    config = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
    engine = SimpleNamespace(async_llm=SimpleNamespace(vllm_config=config), sampling=None, tokenizer=None)
    client = EngineClient(engine, CONFIG)  # type: ignore[arg-type]

    async def generate() -> None:
        from vllm import SamplingParams

        import handlers.openai.vllm.engine_client as module

        current_call.set(loading.call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "check_parameters", lambda *_: None)
            client.generate({"prompt_token_ids": [1]}, SamplingParams(), "id")

    asyncio.run(generate())
    assert loading.memory.used == 0


def test_the_data_of_media_are_in_each_prompt_until_the_engine_has_got_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    from engines.vllm.patches import sent_media

    config: Any = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=2e-5))
    cache, engine = LruKeyReplicatedSenderCache(config), LruKeyReplicatedReceiverCache(config)
    sent = sent_media.SentMedia(SimpleNamespace(renderer=SimpleNamespace(mm_processor_cache=cache)))  # type: ignore[arg-type]
    item = MultiModalKwargsItem({"a": MultiModalFieldElem(data=torch.zeros(2000), field=MultiModalBatchedField())})

    def made(media_hash: str) -> Any:
        data, updates = cache.get_and_update_item((item, ["updates"]), media_hash)
        assert updates == ["updates"]
        return data

    def got(media_hash: str, data: Any) -> None:
        engine.get_and_update_item(data, media_hash)
        sent.engine_got({"mm_hashes": {"image": [media_hash]}})

    assert made("x") is item
    assert made("x") is item, "the first prompt may have been refused"
    got("x", item)
    assert made("x") is None
    got("y", made("y"))
    # Both caches are full. Two prompts are prepared before the engine gets the first prompt.
    first, second = made("z"), made("x")
    got("z", first)
    got("x", second)
    monkeypatch.setattr(sent_media, "_MOST_BYTES", 0)
    assert made("w") is item
    assert made("w") is None, "the data are dropped"
