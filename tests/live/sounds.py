"""Sounds for tests, as WAV files."""

from __future__ import annotations

import io
import math
import wave
from array import array


def tone(hertz: int, seconds: float = 1.0, rate: int = 16000) -> bytes:
    """A sine wave."""
    samples = array("h", (int(20000 * math.sin(2 * math.pi * hertz * i / rate)) for i in range(int(rate * seconds))))
    return _file(samples.tobytes(), rate)


def silence(seconds: int, rate: int = 8000) -> bytes:
    return _file(bytes(2 * seconds * rate), rate)


def _file(samples: bytes, rate: int) -> bytes:
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(rate)
            writer.writeframes(samples)
        return file.getvalue()
