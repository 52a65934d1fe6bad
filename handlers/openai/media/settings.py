"""The settings of media in requests: images, videos and audio."""

from __future__ import annotations

from dataclasses import dataclass

from engines.settings.declaration import setting
from engines.settings.parsers import NETWORKS, integer


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits on the media of a request, and the addresses from which media are allowed."""

    max_image_pixels: int = setting(
        "option.max_image_pixels",
        integer(1, 178_956_970),
        "64000000",
        doc="Maximum number of pixels of an [image or video frame](media.md#limits)",
    )
    max_request_pixels: int = setting(
        "option.max_request_pixels",
        integer(1),
        "256000000",
        doc="Maximum number of pixels of all images and video frames in a request",
    )
    max_media_download_mb: int = setting(
        "option.max_media_download_mb",
        integer(1),
        "64",
        doc="Maximum size in MiB of all media that are downloaded for a request",
    )
    max_media_memory_mb: int = setting(
        "option.max_media_memory_mb",
        integer(1),
        "4096",
        doc="Memory for the media of all requests, in MiB. A request's media count until the engine has its prompt. If "
        "the memory is full, a request gets 503",
    )
    # Networks such as "10.0.0.0/8" from which media are allowed, in addition to public addresses.
    allowed_media_networks: tuple[str, ...] = setting(
        "option.allowed_media_networks",
        NETWORKS,
        unset=(),
        doc="Networks from which media may be fetched, in addition to public addresses",
    )
