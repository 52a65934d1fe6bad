"""Images for tests, as files and as parts of a chat."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from typing import Any


def encoded(width: int, height: int, kind: str = "PNG", **options: Any) -> bytes:
    """A blank image."""
    from PIL import Image

    with BytesIO() as file:
        Image.new("RGB", (width, height)).save(file, kind, **options)
        return file.getvalue()


def drawn(shade: int) -> bytes:
    """A picture. Each shade gives a different picture."""
    from PIL import Image

    with BytesIO() as file:
        Image.radial_gradient("L").point(lambda value: (value * shade) % 256).convert("RGB").save(file, "PNG")
        return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG with this size in its header, but without a picture."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


def chat(*urls: str, text: str = "What is this?") -> dict[str, Any]:
    """A request with images."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": text})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
