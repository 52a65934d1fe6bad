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


def bomb() -> bytes:
    """Return a small FLAC file with a minute of silence, which takes 350 MiB once it is decoded."""
    import numpy as np
    import soundfile

    second = np.zeros((192_000, 8), np.int16)
    with io.BytesIO() as file:
        with soundfile.SoundFile(file, "w", 192_000, 8, format="FLAC", subtype="PCM_16") as writer:
            for _ in range(60):
                writer.write(second)
        return file.getvalue()


def _file(samples: bytes, rate: int) -> bytes:
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(rate)
            writer.writeframes(samples)
        return file.getvalue()
