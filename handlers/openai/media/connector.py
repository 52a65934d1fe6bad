"""Loads the images, audio and videos of chats for vLLM, within limits. Only this file changes how vLLM loads media.

`engines.vllm.internals` has the names of vLLM on which this file relies. The file relies on these facts about them:
- `MEDIA_CONNECTOR_REGISTRY` makes the connector called "http" for each message with media, in the task of the call;
- `MediaConnector.load_from_url_async(url, media_io, fetch_timeout=)` loads each image, audio clip and video, fetches
  http URLs with `connection.async_get_bytes`, and passes on the errors of this module;
- `VideoMediaIO.video_loader` decodes videos: its `compute_frames_index_to_sample` gets the metadata of a file, and its
  `read_frames` gets OpenCV's capture and the indices of the frames to decode;
- `VideoMediaIO.image_io` decodes the frames of a video that comes as JPEG images;
- in the task of the call, vLLM collects the ids that clients give to media. Its caches look media up by these ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import cv2
import pybase64
import vllm.envs as envs
from PIL import UnidentifiedImageError
from PIL.Image import DecompressionBombError
from PIL.TiffImagePlugin import TiffImageFile
from vllm.connections import HTTPConnection
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from engines.errors import InvalidRequest, Overloaded, RequestError, UnusableImage
from engines.vllm.patches.media import drop_two_frames, free_loaded_media, patch_media_ids
from handlers.openai.current_call import current_call
from handlers.openai.media.download import FORBIDDEN_HOST, Downloader, DownloadFailed, TooLarge
from handlers.openai.media.limits import MOST_FRAMES, MediaMemory, RequestMedia

# Formats whose header states the dimensions of the decoded image. Icons are left out, because an icon may hold a larger
# image than its header states.
FORMATS = frozenset({"PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF"})  # MPO: a JPEG with further images.
_SHOWN = 500  # The maximum number of characters of vLLM's message about a URL. The message may repeat the URL.
_SHOWN_FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF"
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # Tags of TIFF.
_FIELDS: dict[type[Any], str] = {ImageMediaIO: "image_url", VideoMediaIO: "video_url", AudioMediaIO: "audio_url"}
SOUND_MIB: int = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB  # The size limit of an audio file.
_SOUND_TOO_LARGE = f"may have {SOUND_MIB} MiB (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)"


def bound_media() -> None:
    """Make vLLM load media with `BoundedConnector`."""
    MEDIA_CONNECTOR_REGISTRY.register("http")(BoundedConnector)
    patch_media_ids(_salted)
    free_loaded_media()


def _salted(uuid: str) -> str:
    """Return a `uuid` that differs for each API key, because vLLM's media caches have no salt."""
    call = current_call.get(None)
    if call is None or not call.cache_salt:
        return uuid
    return hashlib.sha256(f"{call.cache_salt}\0{uuid}".encode("utf-8", "surrogatepass")).hexdigest()


def counted_speech(
    decode: Callable[[bytes], Awaitable[tuple[list[Any], float]]],
) -> Callable[[bytes], Awaitable[tuple[list[Any], float]]]:
    """Return a function that decodes the file of a transcription or translation, and counts the decoded audio."""

    async def counting(data: bytes) -> tuple[list[Any], float]:
        media = current_call.get().media
        assert media is not None
        with _vllms_errors("file"), _decoding():
            chunks, seconds = await decode(data)
            media.add_decoded(sum(chunk.nbytes for chunk in chunks))
        return chunks, seconds

    return counting


class BoundedConnector(MediaConnector):  # type: ignore[misc]
    """Loads media within the limits of their request. vLLM makes a connector for each message of the running call."""

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        media: RequestMedia | None = None,
        **budgets: Any,
    ) -> None:
        """Create the connector. vLLM 0.33 also passes its own limits: `decoded_budget` and `download_budget`."""
        media = media or current_call.get().media
        assert media is not None
        self._media = media
        super().__init__(
            media_io_kwargs,
            _Connection(self._media, allowed_media_domains or []),
            allowed_local_media_path=allowed_local_media_path,
            allowed_media_domains=allowed_media_domains,
            **budgets,
        )

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        field = _FIELDS[type(media_io)]
        with _vllms_errors(field):
            return await self._load(url, media_io, fetch_timeout)

    async def _load(self, url: str, media_io: Any, fetch_timeout: int | None) -> Any:
        """Load an image, an audio clip or a video.

        Raises:
            InvalidRequest: The media cannot be used.
            DownloadFailed: Nothing could be fetched from the URL.
            Overloaded: The media of other requests fill the memory.
        """
        with _own_errors():
            bounded = _BoundedIO(media_io, self._media)
            try:
                return await super().load_from_url_async(url, bounded, fetch_timeout=fetch_timeout)
            except Exception as error:
                drop_two_frames(error)
                raise

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        # vLLM calls this for the media of scores. It would block the event loop.
        field = _FIELDS[type(media_io)]
        raise VLLMValidationError(f"`{field}` is not taken on this route", parameter=field)

    def _assert_url_in_allowed_media_domains(self, url_spec: Any) -> None:
        # vLLM's message would list the allowed hosts.
        if self.allowed_media_domains and url_spec.hostname not in self.allowed_media_domains:
            raise DownloadFailed(FORBIDDEN_HOST)

    async def fetch_video_async(self, video_url: str, **options: Any) -> Any:
        try:
            return await super().fetch_video_async(video_url, **options)
        except AssertionError:  # The registry has no video loader of this name.
            raise VLLMValidationError("there is no such video_backend", parameter="media_io_kwargs") from None


class _ImageConnector(BoundedConnector):
    """Loads the images of one request to a contract other than OpenAI's."""

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        try:
            return await self._load(url, media_io, fetch_timeout)
        except DownloadFailed as error:
            raise UnusableImage("fetch", str(error)) from None
        except VLLMClientError:  # The URL's host is not valid.
            raise UnusableImage("content", "must be an http, https or data URL") from None
        except InvalidRequest as error:
            raise UnusableImage("base64" if isinstance(error, _NoBase64) else "content", error.message) from None


class VllmImages:
    """Loads the images of other contracts as vLLM loads the images of chats. Implements `ImageLoader`."""

    def __init__(self, llm: Any, memory: MediaMemory) -> None:
        self._llm, self._memory = llm, memory

    @contextlib.asynccontextmanager
    async def load(self, urls: Sequence[str]) -> AsyncIterator[Sequence[Any]]:
        """See `ImageLoader`."""
        config = self._llm.model_config
        try:
            self._llm.renderer.get_mm_processor().info.validate_num_items("image", len(urls))
        except VLLMClientError as error:
            raise InvalidRequest(str(error)) from None
        media = RequestMedia(self._memory)
        images: list[Any] = []
        try:
            connector = _ImageConnector(
                config.multimodal_config.media_io_kwargs,
                allowed_media_domains=config.allowed_media_domains,
                media=media,
            )
            loads = [asyncio.ensure_future(connector.fetch_image_async(url)) for url in urls]
            try:
                images += await asyncio.gather(*loads)
            finally:
                for load in loads:
                    load.cancel()
            yield images
        finally:
            images.clear()  # the running call refers to this list until its answer is complete
            media.close()


class _NoBase64(InvalidRequest):
    """The data of a URL are not base64."""


@contextlib.contextmanager
def _vllms_errors(field: str) -> Iterator[None]:
    """Turn errors of this package into errors that vLLM's front end answers. The messages begin with the field."""
    try:
        yield
    except InvalidRequest as error:
        raise VLLMValidationError(f"`{field}` {error.message}", parameter=field) from None
    except Overloaded as error:
        raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from None
    except DownloadFailed as error:
        raise VLLMUnprocessableEntityError(f"`{field}` {error}", parameter=field) from None


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Turn errors of vLLM's loader into InvalidRequest."""
    try:
        yield
    except OSError:  # from a file
        raise InvalidRequest("cannot be read") from None
    except NotImplementedError:  # A data URL is not in base64. vLLM would answer 501.
        raise _NoBase64("must be base64: data:<type>;base64,<data>") from None
    except (RuntimeError, ValueError) as error:  # vLLM does not accept the URL, or needs an option for it
        raise InvalidRequest(f"cannot be loaded: {str(error)[:_SHOWN]}") from None


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Turn every error of a decoder into InvalidRequest. A broken file may cause any error."""
    try:
        yield
    except VLLMValidationError as error:
        if error.parameter == "audio_filesize_mb":
            raise InvalidRequest(_SOUND_TOO_LARGE) from None
        raise
    except (RequestError, VLLMClientError, MemoryError):
        raise
    except ImportError:
        raise InvalidRequest("cannot be decoded: the server lacks the library for it") from None
    except ValueError as error:  # vLLM raises it, with the reason.
        raise InvalidRequest(f"cannot be decoded: {error}") from None
    except Exception as error:
        raise InvalidRequest(f"cannot be decoded ({type(error).__name__})") from None


class _BoundedIO(MediaIO):  # type: ignore[misc]
    """Wraps a reader of vLLM, and counts images and frames before they are decoded."""

    def __init__(self, media_io: Any, media: RequestMedia) -> None:
        super().__init__()
        self._io, self._media = media_io, media
        # In vLLM 0.33, the frames of a video count against the budget of the video reader's `image_io`.
        self.decoded_budget = getattr(media_io, "decoded_budget", None)
        if isinstance(media_io, VideoMediaIO):
            media_io.image_io = _BoundedIO(media_io.image_io, media)
            loader = type(media_io.video_loader)
            bounded = type(loader.__name__, (_BoundedLoader, loader), {"media": media, "counted": False})
            media_io.video_loader = bounded()

    def get_max_bytes(self) -> int | None:
        most: int | None = self._io.get_max_bytes()
        return most

    def load_bytes(self, data: bytes) -> Any:
        with _decoding():
            if isinstance(self._io, ImageMediaIO):
                self._count_image(data)
            return self._counted(self._io.load_bytes(data))

    def load_base64(self, media_type: str, data: str) -> Any:
        with _decoding():
            if isinstance(self._io, ImageMediaIO):
                try:
                    image = pybase64.b64decode(data, validate=True)
                except ValueError as error:
                    raise _NoBase64(f"cannot be decoded: {error}") from None
                return self.load_bytes(image)
            return self._counted(self._io.load_base64(media_type, data))

    def load_file(self, filepath: Path) -> Any:
        return self.load_bytes(filepath.read_bytes())

    def _count_image(self, data: bytes) -> None:
        try:
            image = open_image(BytesIO(data))
        except DecompressionBombError:
            most = self._media.config.media.max_image_pixels
            raise InvalidRequest(f"is an image of more than {most} pixels (option.max_image_pixels)") from None
        except UnidentifiedImageError:
            raise InvalidRequest(f"is no image; taken are {_SHOWN_FORMATS}") from None
        with image:
            if image.format not in FORMATS:
                raise InvalidRequest(f"is an image in {image.format}; taken are {_SHOWN_FORMATS}")
            width, height = image.size
            if isinstance(image, TiffImageFile):  # tiles are decoded whole, and may be larger than the image
                width, height = max(width, *_numbers(image, _TILE_WIDTH)), max(height, *_numbers(image, _TILE_HEIGHT))
        self._media.add_image(width, height)

    def _counted(self, loaded: Any) -> Any:
        if isinstance(self._io, AudioMediaIO):
            self._media.add_decoded(loaded[0].nbytes)
        return loaded


def _numbers(image: TiffImageFile, tag: int) -> list[int]:
    value = image.tag_v2.get(tag, 0)
    return [value] if isinstance(value, int) else [int(number) for number in value]


class _BoundedLoader:
    """Base class that counts frames. The next class in the MRO is a video loader of vLLM."""

    media: ClassVar[RequestMedia]
    counted: ClassVar[bool]

    @classmethod
    def load_bytes(cls, data: bytes, **options: Any) -> Any:
        loader: Any = super()
        frames, metadata = loader.load_bytes(data, **options)
        if not cls.counted:  # the operator chose a decoder that does not check the limits first
            count, height, width = frames.shape[:3]
            cls.media.add_frames(width, height, count)
        return frames, metadata

    @classmethod
    def compute_frames_index_to_sample(cls, source: Any, target: Any, **options: Any) -> Any:
        if source.total_frames_num > MOST_FRAMES:
            raise InvalidRequest(f"is a video of {source.total_frames_num} frames; at most {MOST_FRAMES} are taken")
        loader: Any = super()
        return loader.compute_frames_index_to_sample(source=source, target=target, **options)

    @classmethod
    def read_frames(cls, cap: Any, frame_idx: list[int], total_frames_num: int, **options: Any) -> Any:
        capture = _Capture(cap, cls.media)
        cls.media.add_frames(capture.width, capture.height, len(frame_idx))
        cls.counted = True
        loader: Any = super()
        return loader.read_frames(capture, frame_idx, total_frames_num, **options)


class _Capture:
    """OpenCV's capture of a video. Its frames must not be larger than the size in the video's header.

    The capture decodes each frame up to the last frame that is needed.
    """

    def __init__(self, capture: Any, media: RequestMedia) -> None:
        self._capture, self._media = capture, media
        self.width, self.height = (
            int(capture.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def grab(self) -> bool:
        self._media.check_decoding()
        grabbed: bool = self._capture.grab()
        return grabbed

    def read(self) -> tuple[bool, Any]:
        return self.retrieve() if self.grab() else (False, None)

    def retrieve(self) -> tuple[bool, Any]:
        done, frame = self._capture.retrieve()
        if done and frame.shape[0] * frame.shape[1] > self.width * self.height:
            raise InvalidRequest(f"is a video with frames larger than its {self.width}x{self.height}")
        return done, frame


class _Connection(HTTPConnection):  # type: ignore[misc]
    """Fetches the media of a request from allowed addresses."""

    def __init__(self, media: RequestMedia, domains: Sequence[str]) -> None:
        super().__init__()
        self._media = media
        networks = [ipaddress.ip_network(network) for network in media.config.media.allowed_media_networks]
        # vLLM follows redirects unless this variable is 0. Slipway follows them only if the variable is set and not 0,
        # and if all hosts are allowed (see `Downloader`).
        redirects = os.environ.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0") != "0"
        self._downloader = Downloader(
            networks, domains, redirects=redirects, attempts=max(envs.VLLM_MEDIA_FETCH_MAX_RETRIES, 1)
        )

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        most = options.get("max_bytes")  # vLLM limits only audio.
        budget = options.get("request_budget")  # vLLM 0.33's limit on all downloads of a request.

        def count(size: int) -> None:
            self._media.add_download(size)
            if budget is not None:
                try:
                    budget.charge(size)
                except ValueError as error:
                    raise InvalidRequest(f"cannot be loaded: {error}") from None

        async with self._media.download():
            try:
                return await self._downloader.fetch(url, options["timeout"], count, most)
            except TooLarge:
                raise InvalidRequest(_SOUND_TOO_LARGE) from None
