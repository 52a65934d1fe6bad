"""Converts arrays to bytes and back, in the formats NDList, npz and npy.

Bodies are not trusted. Arrays of Python objects are refused, because reading them would unpickle data. The declared
sizes of NDList arrays and of npz members are checked before memory is allocated. The size in an npy header, of an npy
body or of an npz member, is not checked: numpy allocates this size, but writes only the bytes that the body contains.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import IO, TYPE_CHECKING, Any

from djl_python.lazy_import import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC_NUMBER = "NDAR"
VERSION = 3
MAX_NPZ_BYTES = 1 << 30  # The maximum size of the decompressed arrays of an npz body.
_MAX_RANK = 32  # The highest rank that every version of numpy supports.
_SHOWN_TEXT = 32  # The maximum number of characters of a client's string to quote in an error.
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_TYPES = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}


def to_nd_list(np_list: Any) -> bytearray:
    """Return a list of arrays, or one array, as NDList in little-endian order.

    Raises:
        ValueError: An array contains values other than numbers.
    """
    numpy = require("numpy", "NDList")
    arrays = np_list if isinstance(np_list, (list, tuple)) else [np_list]
    encoded = bytearray(struct.pack(">i", len(arrays)))
    for array in arrays:
        encoded += _encode_array(numpy.asarray(array))
    return encoded


def from_nd_list(encoded: bytes | bytearray | memoryview) -> list[NDArray[Any]]:
    """Return the arrays in NDList bytes, or in an npz or npy file. The arrays are writable.

    The first bytes determine the format.

    Raises:
        ValueError: The bytes are malformed, or contain Python objects.
    """
    data = bytes(encoded)
    if data.startswith(b"PK"):
        return from_npz(data)
    if data.startswith(b"\x93NUMPY"):
        return [from_npy(data)]
    reader = _Reader(data)
    count = reader.integer("i")
    if count < 0:
        raise ValueError(f"NDList has a negative number of arrays: {count}")
    return [_read_array(reader) for _ in range(count)]


def from_npz(data: bytes | bytearray) -> list[NDArray[Any]]:
    """Return the arrays in an npz file, in the file's order.

    Raises:
        ValueError: The file is malformed, contains values other than arrays, or is larger than `MAX_NPZ_BYTES` when
            decompressed.
    """
    numpy = require("numpy", "an npz body")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_sizes(archive.infolist())
            return [_read_npy(numpy, archive.open(member)) for member in archive.infolist()]
    except Exception as error:  # zipfile, zlib and numpy raise many types of exceptions.
        raise ValueError(f"The npz body cannot be read: {error}") from error


def _check_sizes(members: list[zipfile.ZipInfo]) -> None:
    # Of stored and deflated members, zipfile decompresses only the bytes that are read. With other compression methods,
    # it decompresses whole blocks.
    if any(member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} for member in members):
        raise ValueError("it is compressed in a way that numpy does not use")
    # zipfile reads at most the declared size of a member, so this limits the bytes that are read.
    size = sum(member.file_size for member in members)
    if size > MAX_NPZ_BYTES:
        raise ValueError(f"its arrays take {size} bytes, and at most {MAX_NPZ_BYTES} are allowed")


def from_npy(data: bytes | bytearray) -> NDArray[Any]:
    """Return the array in an npy file.

    Raises:
        ValueError: The file is malformed, or contains Python objects.
    """
    numpy = require("numpy", "an npy body")
    try:
        return _read_npy(numpy, io.BytesIO(data))
    except Exception as error:  # The error may be a MemoryError, if the header declares a huge array.
        raise ValueError(f"The npy body cannot be read: {error}") from error


def _read_npy(numpy: Any, file: IO[bytes]) -> NDArray[Any]:
    array: NDArray[Any] = numpy.lib.format.read_array(file, allow_pickle=False)
    return array


def to_npz(arrays: Any) -> bytes:
    """Return a list of arrays as an npz file.

    Raises:
        ValueError: An array contains Python objects.
    """
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
            struct.pack(">ib", VERSION, 0),  # 0: the array has no name.
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
    """Reads bytes in order. All methods raise ValueError if too few bytes are left."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        start, end = self._at, self._at + size
        if size < 0 or end > len(self._data):
            raise ValueError(f"NDList ends too early: {size} bytes wanted at {start} of {len(self._data)}")
        self._at = end
        return self._data[start:end]

    def integer(self, code: str) -> int:
        return int(struct.unpack(">" + code, self.take(struct.calcsize(">" + code)))[0])

    def string(self) -> str:
        """Read the next string. Its 16-bit length precedes it."""
        return bytes(self.take(self.integer("h"))).decode("utf-8")


def _read_array(reader: _Reader) -> NDArray[Any]:
    numpy = require("numpy", "NDList")
    magic, version = reader.string(), reader.integer("i")
    if (magic, version) != (MAGIC_NUMBER, VERSION):
        shown = f"{magic[:_SHOWN_TEXT]!r} {version}"
        raise ValueError(f"NDList array begins with {shown} instead of {MAGIC_NUMBER!r} {VERSION}")
    if reader.take(1)[0] == 1:
        reader.string()  # Skip the name, because numpy's arrays have no names.
    reader.string()  # The storage format.
    name = reader.string()
    plain = "bool" if name == "BOOLEAN" else name.lower()
    if plain not in _TYPES:
        raise ValueError(f"NDList array has an unknown type: {name[:_SHOWN_TEXT]!r}")
    dtype = numpy.dtype(plain)
    shape = _read_shape(reader)
    order = bytes(reader.take(1)).decode("latin-1")
    if order not in "<>":
        raise ValueError(f"NDList array has an unknown byte order: {order!r}")
    data = reader.take(reader.integer("i"))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(
            f"NDList array of its shape, rank {len(shape)}, and type {dtype} does not take {len(data)} bytes"
        )
    stored: NDArray[Any] = numpy.frombuffer(data, numpy.dtype(order + dtype.str[1:])).reshape(shape)
    return stored.astype(dtype)


def _read_shape(reader: _Reader) -> tuple[int, ...]:
    rank = reader.integer("i")
    if not 0 <= rank <= _MAX_RANK:
        raise ValueError(f"NDList array has an impossible shape: rank {rank}; 0 to {_MAX_RANK} are possible")
    shape = struct.unpack(f">{rank}q", reader.take(8 * rank))
    if any(size < 0 for size in shape):
        raise ValueError("NDList array has an impossible shape: a dimension is negative")
    reader.take(2 * reader.integer("i"))  # The layout.
    return shape
