"""Bytes to values: what engines send that is not quite JSON, and expert ids in every form that exists."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutsync.payload import (
    check_finite,
    decode_base64,
    decode_experts,
    narrow,
    narrowest,
    parse_json,
    to_json,
)
from rolloutsync.threads import start_thread

_EXPERTS = np.arange(24, dtype=np.int32).reshape(3, 4, 2)


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_not_quite_numbers() -> None:
    """Engines of Python write NaN and infinities as words; they must not be lost on the way to whoever judges them."""
    values = parse_json(b'{"a":[NaN,Infinity,-Infinity,1.5,null]}')["a"]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.5, None]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"a\udc00b"', "a\ufffdb"),
        (rb'"\ud83d\ude00"', "😀"),
        (rb'["\ud83d", "\ud83d\ude00", NaN]', None),
        (rb'{"\ud83d": {"k": ["\udfff", 1]}}', {"\ufffd": {"k": ["\ufffd", 1]}}),
        ('"漢"'.encode(), "漢"),
        (b"7", 7),
        (b"null", None),
        (b'{"a":1,"a":2}', {"a": 2}),
    ],
)
def test_lone_surrogates_are_mended(body: bytes, value: Any) -> None:
    """Whatever comes out can be logged, pickled and written as UTF-8; pairs stay what they are."""
    got = parse_json(body)
    if value is not None:
        assert got == value
    json.dumps(got, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"a":', b"{'a':1}", b"\xff\xfe\x00", b"\x80abc", b"[" * 100_000, b'{"a":1}x', b"nan"]
)
def test_not_json_is_a_value_error(body: bytes) -> None:
    """And never any other error, however deep or broken it is."""
    with pytest.raises(ValueError):  # noqa: PT011 - the words are the parser's
        parse_json(body)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(_json_values)
def test_json_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    """Both ways of writing it."""
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        try:
            expected = json.loads(body)
            json.dumps(expected, ensure_ascii=False).encode()
        except UnicodeError:
            continue
        assert parse_json(body) == expected


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\ud8 0e-NaI', max_size=30).map(str.encode))
def test_any_bytes_parse_or_are_a_value_error(body: bytes) -> None:
    """No other exception may reach a worker."""
    try:
        parse_json(body)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("value", "body"),
    [
        ({"a": np.array([1, 2], np.int32), "b": np.float64(0.5)}, b'{"a":[1,2],"b":0.5}'),
        ({5: 1.0}, b'{"5":1.0}'),
        ((1, [2.5, None, True]), b"[1,[2.5,null,true]]"),
    ],
)
def test_values_are_written_as_json(value: Any, body: bytes) -> None:
    """Numpy values and numbers as keys included."""
    assert to_json(value) == body


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, b"x", [lambda: 0], "\ud83d", 2**70])
def test_what_is_not_json_is_a_type_error(value: Any) -> None:
    """Found before anything is sent."""
    with pytest.raises(TypeError):
        to_json(value)


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, np.float32("nan"), np.array([1.0, math.nan]), np.array(math.inf)]
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"a": (1, {"b": v})}])
def test_nan_is_never_sent_as_null(bad: Any, wrap: Any) -> None:
    """The fast writer would do that without a word."""
    with pytest.raises(ValueError, match="no JSON form"):
        to_json(wrap(bad))
    with pytest.raises(ValueError, match="no JSON form"):
        check_finite(wrap(bad))


# --- expert ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        _b64(_EXPERTS.tobytes()),
        _b64(_npy(_EXPERTS)),
        _b64(_npy(_EXPERTS.astype(np.int64))),
        _b64(_npy(_EXPERTS.astype(">i4"))),
        _b64(_npy(np.asfortranarray(_EXPERTS))),
        _EXPERTS.tolist(),
    ],
    ids=["raw", "npy", "npy int64", "npy big-endian", "npy fortran", "lists"],
)
def test_all_forms_decode_to_the_same_ids(sent: Any) -> None:
    """Bare int32, a numpy file, nested lists."""
    array = narrow(decode_experts(sent).reshape(3, 4, 2), "uint8")
    assert np.array_equal(array, _EXPERTS)
    assert array.dtype == np.uint8
    assert array.flags.owndata
    assert array.flags.writeable


def test_no_rows_decode_to_no_ids() -> None:
    """An answer that starts after its last row."""
    assert decode_experts("").size == 0


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (_b64(_EXPERTS.tobytes())[:-1], "bad base64"),
        ("!!!!", "bad base64"),
        ("AAAA\n", "bad base64"),
        ("漢", "ASCII|base64"),
        (_b64(b"12345"), "5 bytes"),
        (_b64(_npy(np.ones(3, np.float32))), "float32"),
        (_b64(_npy(_EXPERTS))[:80], "base64|expert ids|EOF|header"),
        ([1.5, 2.0], "float64"),
        ([True], "bool"),
        ([], "float64"),
        ([[1, 2], [3]], "inhomogeneous"),
        (["1"], "not integers"),
        ([2**70], "not integers"),
        (7, "int"),
        ({"a": 1}, "dict"),
    ],
)
def test_anything_else_is_a_value_error(sent: Any, words: str) -> None:
    """It says what it was, and never shows the payload itself."""
    with pytest.raises(ValueError, match=words) as caught:
        decode_experts(sent)
    assert len(str(caught.value)) < 400


@settings(max_examples=300)
@given(st.data())
def test_a_broken_numpy_file_is_a_value_error(data: st.DataObject) -> None:
    """Wherever it is cut or changed: no other exception, no pickle, no huge allocation."""
    raw = bytearray(_npy(_EXPERTS))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(6, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(6, len(raw)))]
    try:
        array = decode_experts(_b64(bytes(raw)))
    except ValueError:
        return
    assert array.dtype.kind in "iu"


@pytest.mark.parametrize("shape", ["(9999999999999,)", "(99999999999999999999999,)", "(-1,)", "(3,4,'x')", "(((("])
def test_a_numpy_file_that_lies_about_its_shape(shape: str) -> None:
    """Memory is not asked for on its word."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 16
    with pytest.raises(ValueError):  # noqa: PT011 - the words are numpy's
        decode_experts(_b64(raw))


@given(st.binary(max_size=64))
def test_base64_goes_there_and_back(raw: bytes) -> None:
    """What is valid is exact."""
    assert decode_base64(_b64(raw)) == raw


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("uint8", 255, True),
        ("uint8", 256, False),
        ("uint8", -1, False),
        ("uint16", 65535, True),
        ("uint16", 65536, False),
        ("int32", -1, True),
        ("int32", 2**31 - 1, True),
        ("int32", 2**31, False),
        ("int32", -(2**31) - 1, False),
    ],
)
def test_ids_are_never_wrapped_around(dtype: str, value: int, fits: bool) -> None:
    """What does not fit is an error, not another expert."""
    array = np.array([0, value], np.int64)
    if fits:
        assert narrow(array, dtype).tolist() == [0, value]
        assert narrow(array, dtype).dtype == np.dtype(dtype)
    else:
        with pytest.raises(ValueError, match=f"do not fit {dtype}"):
            narrow(array, dtype)


def test_narrow_copies() -> None:
    """A view would keep a whole body alive."""
    array = np.zeros(4, np.int32)
    assert narrow(array, "int32").base is None
    assert narrow(array[:0], "uint8").shape == (0,)


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(None, "int32"), (1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")],
)
def test_the_narrowest_type_that_holds_all_experts(experts: int | None, dtype: str) -> None:
    """By the model's number of experts, so that all samples have one type."""
    assert narrowest(experts) == dtype


@pytest.mark.parametrize("start", [b"", b'[NaN, "]]\\"]", '])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_json_without_a_bottom_is_refused(start: bytes, bracket: bytes) -> None:
    """In a thread with the small stack of our workers: from 3.12 on the standard library would end the process."""
    found: list[str] = []

    def read() -> None:
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(start + bracket * 200_000)
        found.append("refused")

    start_thread("rolloutsync-test", read).join(30.0)
    assert found == ["refused"]


def test_ordinary_depth_is_read_beside_a_nan() -> None:
    """Brackets in strings do not count."""
    body = b'{"a": NaN, "s": "' + b"[" * 500 + b'", "b": ' + b"[" * 90 + b"]" * 90 + b"}"
    assert parse_json(body)["s"] == "[" * 500


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_ids_in_fortrans_order_keep_their_places(dtype: str) -> None:
    """``numpy.save`` writes an array so that lies so in memory; a copy in our order is made of it."""
    sent = np.arange(6, dtype=dtype).reshape(2, 3, 1).transpose(1, 0, 2)
    loaded = decode_experts(_b64(_npy(np.asfortranarray(sent))))
    kept = narrow(loaded.reshape(sent.shape), dtype)
    assert np.array_equal(kept, sent)
    assert kept.flags.owndata


def test_ids_in_another_byte_order_keep_their_values() -> None:
    """The dtype of a sample is that of this machine."""
    kept = narrow(decode_experts(_b64(_npy(np.arange(6, dtype=">i4")))).reshape(2, 3), "int32")
    assert kept.dtype == np.int32
    assert kept.tolist() == [[0, 1, 2], [3, 4, 5]]
