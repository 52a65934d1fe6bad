"""NDList, npz and npy: arrays as bytes.

Bodies are not trusted: arrays of Python objects are refused, since they would be unpickled, and the size that a body
declares is checked before memory is taken for it.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from djl_python.lazy_import import require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC_NUMBER = "NDAR"
VERSION = 3
MAX_NPZ_BYTES = 1 << 30
"""The most bytes that the arrays of an npz body may take once decompressed, unless the environment says otherwise."""
MAX_NPZ_BYTES_VARIABLE = "SLIPWAY_MAX_NPZ_BYTES"
"""Environment variable: another limit in place of `MAX_NPZ_BYTES`, in bytes."""
_ZIP_MAGIC = b"PK"
_NPY_MAGIC = b"\x93NUMPY"
_MAX_RANK = 32
"""What every version of numpy can hold."""
_SHOWN_TEXT = 32
"""Characters of a client's string that an error repeats."""
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_TYPES = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}
_BROKEN_FILE = (
    ValueError,
    EOFError,
    OSError,
    KeyError,
    MemoryError,  # what the header claims, not what was sent
    NotImplementedError,
    OverflowError,
    RuntimeError,  # an encrypted archive
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def to_nd_list(np_list: Any) -> bytearray:
    """NDList bytes of a list of arrays, or of one array, in little-endian order.

    Raises:
        ValueError: an array holds something other than numbers.
    """
    numpy = require("numpy", "NDList")
    arrays = np_list if isinstance(np_list, (list, tuple)) else [np_list]
    encoded = bytearray(struct.pack(">i", len(arrays)))
    for array in arrays:
        encoded += _encode_array(numpy.asarray(array))
    return encoded


def from_nd_list(encoded: bytes | bytearray | memoryview) -> list[NDArray[Any]]:
    """Arrays of NDList bytes, or of an npz or npy file, told apart by how they begin. The arrays are writable.

    Raises:
        ValueError: the bytes are broken, or hold Python objects.
    """
    data = bytes(encoded)
    if data.startswith(_ZIP_MAGIC):
        return from_npz(data)
    if data.startswith(_NPY_MAGIC):
        return [from_npy(data)]
    return list(_read_arrays(_Reader(data)))


def from_npz(data: bytes | bytearray) -> list[NDArray[Any]]:
    """The arrays of an npz file, in the file's order.

    Raises:
        ValueError: the file is broken, holds something other than arrays, or is larger than `MAX_NPZ_BYTES` (or what
            the environment says instead) once decompressed.
    """
    require("numpy", "an npz body")
    limit = _npz_limit()
    try:
        if not data.startswith(_ZIP_MAGIC):
            raise ValueError("it is no zip archive")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_members(members, limit)
            return [_read_member(archive, member) for member in members]
    except _BROKEN_FILE as error:
        raise ValueError(f"The npz body cannot be read: {error}") from error


def _npz_limit() -> int:
    text = os.environ.get(MAX_NPZ_BYTES_VARIABLE)
    if not text:
        return MAX_NPZ_BYTES
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{MAX_NPZ_BYTES_VARIABLE} must be a number of bytes, not {text!r}")
    return int(text)


def _check_members(members: list[zipfile.ZipInfo], limit: int) -> None:
    # Of these two kinds zipfile decompresses only what is read; of others, all that a block expands to.
    if any(member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} for member in members):
        raise ValueError("it is compressed in a way that numpy does not use")
    # zipfile ends a member at the size that it declares, so this bounds what is read.
    size = sum(member.file_size for member in members)
    if size > limit:
        raise ValueError(f"its arrays take {size} bytes, and at most {limit} are allowed ({MAX_NPZ_BYTES_VARIABLE})")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    numpy = require("numpy", "an npz body")
    with archive.open(member) as file:
        if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            raise ValueError("it holds something other than arrays")
        file.seek(0)
        array: NDArray[Any] = numpy.lib.format.read_array(file, allow_pickle=False)
    return array


def from_npy(data: bytes | bytearray) -> NDArray[Any]:
    """The array of an npy file. Raises ValueError."""
    numpy = require("numpy", "an npy body")
    try:
        array: NDArray[Any] = numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except _BROKEN_FILE as error:
        raise ValueError(f"The npy body cannot be read: {error}") from error
    return array


def to_npz(arrays: Any) -> bytes:
    """An npz file of a list of arrays. Raises ValueError for an array of Python objects."""
    numpy = require("numpy", "an npz body")
    values = [numpy.asarray(array) for array in arrays]
    if any(value.dtype.hasobject for value in values):
        raise ValueError("An npz body cannot hold an array of Python objects")
    file = io.BytesIO()
    numpy.savez(file, *values)
    return file.getvalue()


def _encode_array(array: NDArray[Any]) -> bytes:
    if array.dtype.name not in _TYPES:
        raise ValueError(f"NDList cannot hold an array of {array.dtype}")
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes("C")
    rank = array.ndim
    return b"".join(
        (
            _short_string(MAGIC_NUMBER),
            struct.pack(">ib", VERSION, 0),  # no name
            _short_string("default"),
            _short_string(array.dtype.name.upper()),
            struct.pack(f">i{rank}qi", rank, *array.shape, rank),
            struct.pack(">h", ord("?")) * rank,
            b"<",
            struct.pack(">i", len(data)),
            data,
        )
    )


def _short_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack(">h", len(data)) + data


class _Reader:
    """Reads bytes in order. Raises ValueError at their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start = self._at
        self.skip(size)
        return self._data[start : self._at]

    def skip(self, size: int) -> None:
        """Skips the next bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise ValueError(f"NDList ends too early: {size} bytes wanted at {self._at} of {len(self._data)}")
        self._at = end

    def integer(self, code: str) -> int:
        """The next integer, by its `struct` code."""
        return int(struct.unpack(">" + code, self.take(struct.calcsize(">" + code)))[0])

    def string(self) -> str:
        """The next string with a 16-bit length."""
        return self.take(self.integer("h")).decode("utf-8")

    def skip_string(self) -> None:
        """Skips the next string."""
        self.skip(self.integer("h"))


def _read_arrays(reader: _Reader) -> Iterator[NDArray[Any]]:
    count = reader.integer("i")
    if count < 0:
        raise ValueError(f"NDList has a negative number of arrays: {count}")
    for _ in range(count):
        yield _read_array(reader)


def _read_array(reader: _Reader) -> NDArray[Any]:
    numpy = require("numpy", "NDList")
    magic, version = reader.string(), reader.integer("i")
    if (magic, version) != (MAGIC_NUMBER, VERSION):
        raise ValueError(f"NDList array begins with {_shown(magic)} {version} instead of {MAGIC_NUMBER!r} {VERSION}")
    if reader.take(1) == b"\1":
        reader.skip_string()  # the name, which numpy arrays do not have
    reader.skip_string()  # the storage format
    dtype = _numeric_dtype(numpy, reader.string())
    shape = _read_shape(reader)
    order = reader.take(1).decode("latin-1")
    if order not in "<>":
        raise ValueError(f"NDList array has an unknown byte order: {order!r}")
    data = reader.take(reader.integer("i"))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(
            f"NDList array of its shape, rank {len(shape)}, and type {dtype} does not take {len(data)} bytes"
        )
    stored: NDArray[Any] = numpy.frombuffer(data, numpy.dtype(order + dtype.str[1:])).reshape(shape)
    return stored.astype(dtype)


def _numeric_dtype(numpy: Any, name: str) -> np.dtype[Any]:
    plain = "bool" if name == "BOOLEAN" else name.lower()
    if plain not in _TYPES:
        raise ValueError(f"NDList array has an unknown type: {_shown(name)}")
    dtype: np.dtype[Any] = numpy.dtype(plain)
    return dtype


def _read_shape(reader: _Reader) -> tuple[int, ...]:
    rank = reader.integer("i")
    if not 0 <= rank <= _MAX_RANK:
        raise ValueError(f"NDList array has an impossible shape: rank {rank}; 0 to {_MAX_RANK} are possible")
    shape = struct.unpack(f">{rank}q", reader.take(8 * rank))
    if any(size < 0 for size in shape):
        raise ValueError("NDList array has an impossible shape: a dimension is negative")
    reader.skip(2 * reader.integer("i"))  # the layout
    return shape


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + "…")
