"""Limits on the images, audio and videos of one request, and on the memory for the media of all requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

from engines.errors import InvalidRequest, Overloaded
from handlers.model_config import ModelConfig

_MIB = 1 << 20
_IMAGE_BYTES = 4  # Pillow stores a pixel in four bytes.
_FRAME_BYTES = 3  # A video is an array of RGB bytes.
# The maximum number of frames of a video: nine hours at 30 frames a second. All indices are listed before decoding.
MOST_FRAMES = 1_000_000
_MOST_DOWNLOADS = 100  # The maximum number of simultaneous downloads, as in vLLM.
_MOST_OWN_DOWNLOADS = 10  # The maximum for one request, so that slow hosts cannot block all downloads.


class MediaMemory:
    """The memory for the media of all requests to a model. It has a lock, because threads decode media."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.used = 0  # Bytes.
        self.downloads = asyncio.Semaphore(_MOST_DOWNLOADS)


class RequestMedia:
    """The media of one request.

    The media stay in memory until the engine has the prompt.

    The methods that count raise InvalidRequest if this request exceeds a limit. They raise Overloaded if all requests
    together exceed a limit. The message of InvalidRequest is the rest of a sentence that begins with the name of the
    field.
    """

    def __init__(self, memory: MediaMemory) -> None:
        self._memory, self.config, self._downloads = memory, memory.config, memory.downloads
        self._own_downloads = asyncio.Semaphore(_MOST_OWN_DOWNLOADS)
        # The time at which decoding must end, on the monotonic clock. 0 before the first video.
        self._decode_until = 0.0
        self._pixels = self._downloaded = self._held = 0
        self._closed = False

    def add_image(self, width: int, height: int) -> None:
        """Count an image, before it is decoded."""
        self._add_pixels(width * height, 1, f"an image of {width}x{height}", _IMAGE_BYTES)

    def add_frames(self, width: int, height: int, count: int) -> None:
        """Count frames of a video, before they are decoded."""
        self._add_pixels(width * height, count, f"a video of {width}x{height}", _FRAME_BYTES)

    @contextlib.asynccontextmanager
    async def download(self) -> AsyncIterator[None]:
        """Limit the number of simultaneous downloads: wait for a free place, and hold it in the `with` block."""
        async with self._own_downloads, self._downloads:
            yield

    def check_decoding(self) -> None:
        """Check that a video may still be decoded. Call this before each frame, in the video's thread.

        Raises:
            InvalidRequest: The request has ended, or its videos take too long.
        """
        limit, now = self.config.predict_timeout, time.monotonic()
        self._decode_until = self._decode_until or now + limit
        if self._closed:
            raise InvalidRequest("the request has ended")
        if now > self._decode_until:
            raise InvalidRequest(f"takes longer than {limit:g} s to decode (option.predict_timeout)")

    def add_download(self, size: int) -> None:
        """Count bytes that a URL has sent."""
        most = self.config.media.max_media_download_mb
        with self._memory.lock:
            self._downloaded += size
            if self._downloaded > most * _MIB:
                raise InvalidRequest(
                    f"is too large: at most {most} MiB are fetched for a request (option.max_media_download_mb)"
                )
            self._hold(size)

    def add_decoded(self, size: int) -> None:
        """Count the bytes of decoded audio or video."""
        with self._memory.lock:
            self._hold(size)

    def release(self) -> None:
        """Release the memory when the engine has the prompt. The request may still load other media."""
        with self._memory.lock:
            self._memory.used -= self._held
            self._held = 0

    def close(self) -> None:
        """Release the memory for good. A thread that still decodes for the request gets an error."""
        with self._memory.lock:
            self._closed = True
        self.release()

    def _add_pixels(self, pixels: int, count: int, found: str, item_bytes: int) -> None:
        one, most = self.config.media.max_image_pixels, self.config.media.max_request_pixels
        if pixels > one:
            raise InvalidRequest(f"is {found} pixels; at most {one} pixels are taken (option.max_image_pixels)")
        with self._memory.lock:
            self._pixels += pixels * count
            if self._pixels > most:
                raise InvalidRequest(
                    f"is one too many: the images and video frames of a request may have {most} pixels together "
                    "(option.max_request_pixels)"
                )
            self._hold(pixels * count * item_bytes)

    def _hold(self, size: int) -> None:
        most = self.config.media.max_media_memory_mb
        limit = most * _MIB
        if self._closed:
            raise InvalidRequest("the request has ended")
        if self._held + size > limit:
            raise InvalidRequest(
                f"is one too many: the media of a request may take {most} MiB of memory (option.max_media_memory_mb)"
            )
        if self._memory.used + size > limit:
            raise Overloaded("the media of other requests fill the memory for media; try again")
        self._held += size
        self._memory.used += size
