from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from djl_python import np_util
from djl_python.np_util import from_nd_list, from_npy, from_npz, to_nd_list, to_npz

DTYPES = st.sampled_from(
    ["bool", "int8", "uint8", "int16", "uint16", ">i4", "uint32", "int64", "uint64", "float16", ">f4", "float64"]
)
ARRAYS = st.lists(npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)), max_size=3)


def expected_bytes() -> bytes:
    return (
        struct.pack(">i", 1)
        + b"\x00\x04NDAR"
        + struct.pack(">i", 3)
        + b"\x00"
        + b"\x00\x07default"
        + b"\x00\x07FLOAT32"
        + struct.pack(">iqqi", 2, 1, 2, 2)
        + b"\x00?\x00?"
        + b"<"
        + struct.pack(">i", 8)
        + struct.pack("<ff", 1.5, -2.0)
    )


def test_an_nd_list_has_the_exact_layout_of_the_contract() -> None:
    assert bytes(to_nd_list([np.array([[1.5, -2.0]], dtype="float32")])) == expected_bytes()


@given(ARRAYS)
def test_arrays_come_back_from_an_nd_list(arrays: list[Any]) -> None:
    restored = from_nd_list(to_nd_list(arrays))
    assert len(restored) == len(arrays)
    for before, after in zip(arrays, restored, strict=True):
        assert after.dtype == before.dtype.newbyteorder("=")
        assert after.flags.writeable
        np.testing.assert_array_equal(after, before)


@given(ARRAYS)
def test_arrays_come_back_from_an_npz(arrays: list[Any]) -> None:
    data = to_npz(arrays)
    for restored in (from_npz(data), from_nd_list(data)) if arrays else ():
        for before, after in zip(arrays, restored, strict=True):
            np.testing.assert_array_equal(after, before)


def test_a_transposed_array_is_written_row_by_row() -> None:
    (restored,) = from_nd_list(to_nd_list([np.arange(6).reshape(2, 3).T]))
    assert restored.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_names_big_endian_data_and_the_name_boolean_are_read() -> None:
    data = (
        struct.pack(">i", 2)
        + b"\x00\x04NDAR\x00\x00\x00\x03\x01\x00\x01x\x00\x06sparse\x00\x05INT16"
        + struct.pack(">iqi", 1, 2, 0)
        + b">"
        + struct.pack(">ihh", 4, 1, -2)
        + b"\x00\x04NDAR\x00\x00\x00\x03\x00\x00\x07default\x00\x07BOOLEAN"
        + struct.pack(">iqi", 1, 2, 0)
        + b"<"
        + struct.pack(">i", 2)
        + b"\x01\x00"
    )
    numbers, flags = from_nd_list(data)
    assert numbers.tolist() == [1, -2]
    assert flags.tolist() == [True, False]


@given(st.integers(0, len(expected_bytes()) - 1))
def test_an_nd_list_that_ends_too_early_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="NDList"):
        from_nd_list(expected_bytes()[:length])


@given(st.integers(0, len(expected_bytes()) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_arrays_or_a_value_error_and_nothing_else(position: int, byte: int) -> None:
    data = bytearray(expected_bytes())
    data[position] = byte
    try:
        arrays = from_nd_list(data)
    except ValueError:
        return
    assert all(isinstance(array, np.ndarray) for array in arrays)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"NDAR", b"NDAX", "begins with 'NDAX'"),
        (b"FLOAT32", b"OBJECT_", "unknown type: 'OBJECT_'"),
        (b"?<\x00", b"?!\x00", "byte order: '!'"),
        (struct.pack(">q", 2), struct.pack(">q", 3), "does not take 8 bytes"),
        (struct.pack(">q", 2), struct.pack(">q", -2), "impossible shape"),
        (b"\x00\x00\x00\x01\x00\x04", b"\xff\xff\xff\xff\x00\x04", "negative number of arrays"),
    ],
)
def test_what_is_wrong_with_an_nd_list_is_said(before: bytes, after: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_nd_list(expected_bytes().replace(before, after, 1))


def test_an_array_of_other_things_than_numbers_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="cannot hold an array of"):
        to_nd_list([np.array(["a"])])
    with pytest.raises(ValueError, match="Python objects"):
        to_npz([np.array([{}], dtype=object)])


def npy(array: Any, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


@given(st.binary(max_size=60))
def test_what_is_no_npz_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="npz body"):
        from_npz(b"PK" + data)


def archive_of(member: bytes, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("a.npy", member)
    return file.getvalue()


PICKLED = npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)
HEADER = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n"
CLAIMING = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(HEADER)) + HEADER + b"\x00" * 8


@pytest.mark.parametrize(
    ("read", "body", "message"),
    [
        (from_npy, PICKLED, "npy body cannot be read"),
        (from_npz, archive_of(PICKLED), "npz body cannot be read"),
        (from_npy, CLAIMING, "npy body cannot be read"),
        (from_npz, archive_of(b"no array"), "magic string is not correct"),
        (from_npz, npy(np.arange(2)), "not a zip file"),
    ],
)
def test_a_file_without_plain_arrays_is_refused(read: Callable[[bytes], Any], body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(body)


def nd_list(rank: int, shape: bytes, *, dtype: bytes = b"UINT8", magic: bytes = b"NDAR", layout: bytes = b"") -> bytes:
    strings = [struct.pack(">h", len(each)) + each for each in (magic, b"", dtype)]
    return (
        struct.pack(">i", 1)
        + strings[0]
        + struct.pack(">ib", 3, 0)
        + strings[1]
        + strings[2]
        + struct.pack(">i", rank)
        + shape
        + struct.pack(">i", len(layout) // 2)
        + layout
        + b"<"
        + struct.pack(">i", 0)
    )


def test_a_rank_that_no_array_has_is_refused_before_its_shape_is_read() -> None:
    body = nd_list(100_000, b"")  # the shape is missing
    with pytest.raises(ValueError, match="rank 100000; 0 to 32 are possible") as refused:
        from_nd_list(body)
    assert len(str(refused.value)) < 200


def test_the_largest_rank_is_read() -> None:
    (array,) = from_nd_list(to_nd_list([np.zeros((1,) * 32)]))
    assert array.shape == (1,) * 32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (nd_list(32, b""), "ends too early: 256 bytes wanted"),
        (nd_list(0, b"")[:-9] + struct.pack(">i", 2**31 - 1) + b"<", "ends too early: 4294967294 bytes wanted"),
        (nd_list(0, b"")[:-4] + struct.pack(">i", 2**31 - 1), "ends too early: 2147483647 bytes wanted"),
        (nd_list(32, b"\x7f" * 256), "does not take 0 bytes"),
        (nd_list(32, b"\xff" * 256), "impossible shape"),
        (nd_list(0, b"", dtype=b"\x01" * 30_000), "unknown type"),
        (nd_list(0, b"", magic=b"\x01" * 30_000), "begins with"),
    ],
)
def test_what_an_nd_list_claims_costs_no_memory_and_is_not_repeated_at_length(body: bytes, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=message) as refused:
        from_nd_list(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(str(refused.value)) < 300


def claiming(archive: bytes, size: int) -> bytes:
    """Return the archive with a false size in both headers of its only member."""
    changed = bytearray(archive)
    struct.pack_into("<I", changed, 22, size)
    struct.pack_into("<I", changed, archive.index(b"PK\x01\x02") + 24, size)
    return bytes(changed)


def test_an_archive_that_becomes_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = archive_of(npy(np.zeros(1 << 24, "uint8")))
    assert len(bomb) < 1 << 15
    with pytest.raises(ValueError, match=r"take 4294967295 bytes, and at most 1073741824"):
        from_npz(claiming(bomb, 2**32 - 1))
    assert from_npz(bomb)[0].shape == (1 << 24,)
    monkeypatch.setattr(np_util, "MAX_NPZ_BYTES", 1 << 24)
    assert peak_of_refused(bomb, r"take 16777344 bytes, and at most 16777216 are allowed") < 1 << 20


def test_the_sizes_of_all_arrays_of_an_archive_count(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.zeros(1000, "uint8")] * 3
    monkeypatch.setattr(np_util, "MAX_NPZ_BYTES", 2500)
    assert len(from_npz(to_npz(arrays[:2]))) == 2
    with pytest.raises(ValueError, match="at most 2500 are allowed"):
        from_npz(to_npz(arrays))


def peak_of_refused(archive: bytes, message: str) -> int:
    """Return the peak of the bytes that were allocated before the archive was refused."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        from_npz(archive)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("member", [npy(np.zeros(1 << 26, "uint8")), b"no array" + bytes(1 << 26)])
def test_an_archive_that_lies_about_its_size_is_not_expanded_beyond_it(member: bytes) -> None:
    assert peak_of_refused(claiming(archive_of(member), 200), "npz body cannot be read") < 1 << 21


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_cannot_be_bounded_is_refused(compression: int) -> None:
    bomb = claiming(archive_of(npy(np.zeros(1 << 26, "uint8")), compression), 200)
    assert peak_of_refused(bomb, "compressed in a way that numpy does not use") < 1 << 20
