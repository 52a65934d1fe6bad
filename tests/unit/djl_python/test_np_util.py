from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

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
@settings(deadline=None)
def test_arrays_come_back_from_an_npz(arrays: list[Any]) -> None:
    data = to_npz(arrays)
    for restored in (from_npz(data), from_nd_list(data)) if arrays else ():
        for before, after in zip(arrays, restored, strict=True):
            np.testing.assert_array_equal(after, before)


def test_one_array_makes_a_list_of_one() -> None:
    (restored,) = from_nd_list(to_nd_list(np.arange(3)))
    assert restored.tolist() == [0, 1, 2]


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


def test_a_real_npy_file_is_one_array() -> None:
    (restored,) = from_nd_list(npy(np.arange(4).reshape(2, 2)))
    assert restored.tolist() == [[0, 1], [2, 3]]


def test_pickled_arrays_are_refused() -> None:
    pickled = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="npy body cannot be read"):
        from_npy(npy(pickled, allow_pickle=True))
    file = io.BytesIO()
    np.savez(file, pickled)
    with pytest.raises(ValueError, match="npz body cannot be read"):
        from_npz(file.getvalue())


def test_a_header_that_claims_more_than_was_sent_is_refused() -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + b"\x00" * 8
    with pytest.raises(ValueError, match="npy body cannot be read"):
        from_npy(data)


@given(st.binary(max_size=60))
def test_what_is_no_npz_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="npz body"):
        from_npz(b"PK" + data)


def test_an_archive_of_something_other_than_arrays_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "no array")
    with pytest.raises(ValueError, match="other than arrays"):
        from_npz(file.getvalue())


def test_an_npy_file_is_not_taken_for_an_npz() -> None:
    with pytest.raises(ValueError, match="no zip archive"):
        from_npz(npy(np.arange(2)))
