"""JSON and arrays: response bytes → values, values → request bytes."""

from __future__ import annotations

import binascii
import io
import json
import math
import random
import re
from array import array
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    Body: TypeAlias = bytes | bytearray
    JsonPath: TypeAlias = tuple[Any, ...]  # keys and positions, the last a key

FEW = 512  # numbers, for which Python's own loops are faster than a call into numpy's more distant parts
_FEWER = 64  # the same for what numpy has near
_TO_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPENING = np.frombuffer(b"[{", np.uint8)
_CLOSING = np.frombuffer(b"]}", np.uint8)
_DEEPEST = 100
_WORTH_IT = 1 << 14  # bytes of base64, below which it may as well become a Python string
# Of base64: few, as each lets other threads run. A multiple of 16, which is 12 bytes, which is three ids.
_PIECE = 1 << 19
_MOST_SPACE = 64  # around the colon
_OPENS_TEXT = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
_BEFORE_KEY = b"{, \t\r\n"
_random = random.Random()  # noqa: S311 - no secret: whoever guessed it would only be parsed twice
_NPY_MAGIC = b"\x93NUMPY"
_NARROW = {"uint8": 1 << 8, "uint16": 1 << 16}
_INT32 = np.iinfo(np.int32)


def parse_json(body: Body) -> Any:
    """The JSON value in ``body``.

    orjson reads it; what orjson refuses but engines send (NaN, Infinity, lone surrogates) goes to the standard
    library, and lone surrogates become U+FFFD so that the text can be logged, pickled and written as UTF-8.

    Raises:
        ValueError: Not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    if _depth(body) > _DEEPEST:  # from 3.12 on the standard library recurses in C, and ends the process
        raise ValueError("JSON that is nested too deeply")
    return _mend(json.loads(body))


class LargeField(NamedTuple):
    """What may be large, and where.

    Attributes:
        path: To it.
        kind: ``BYTES`` and ``ROWS``, or the dtype in which ids are wanted that are sent as base64 of raw int32.
    """

    path: JsonPath
    kind: str


BYTES = "bytes"  # base64 of anything
ROWS = "rows"  # [[number, number, null], ...]: thousands of lists, for which the garbage collector would run many times


class Rows(NamedTuple):
    """The first and the second of each row of three; the third of each was null."""

    first: list[Any]
    second: list[Any]


def parse_answer(body: Body, large: Sequence[LargeField] = ()) -> Any:
    """The JSON value in ``body``, in which the ``large`` fields may be decoded, straight from the body.

    It is where that is worth it; everywhere else the value is the one that ``parse_json`` gives. A search for the key
    alone would be fooled (by the key within a text, in another object, twice, with escapes), so what was found is
    replaced by a random text, and must be at its path in the parsed value; else the whole body is parsed as it is.

    Raises:
        ValueError: Not JSON.
    """
    rest, cuts = body, []
    for field in large if len(body) >= _WORTH_IT else ():
        if (found := _cut_out(rest, field)) is not None:
            rest, cut = found
            cuts.append(cut)
    if not cuts:
        return parse_json(body)
    try:
        value = parse_json(rest)
    except ValueError:  # a cut was none
        return parse_json(body)
    return value if all(_put_back(value, *cut) for cut in cuts) else parse_json(body)


def _cut_out(body: Body, field: LargeField) -> tuple[bytes, tuple[JsonPath, str, Any]] | None:
    """The body with a large value replaced, and (path, replacement, what it stood for)."""
    key = b'"%b"' % field.path[-1].encode()
    start, end = _find_rows(body, key) if field.kind == ROWS else _find_text(body, key)
    if end - start < _WORTH_IT:
        return None
    with memoryview(body) as view, view[start:end] as text:
        try:
            value = _decode_large(text, field.kind)
        except ValueError:  # of which those of base64 and JSON are some
            return None
        token = f"{_random.getrandbits(128):032x}"
        quoted = b'"%b"' % token.encode() if field.kind == ROWS else token.encode()
        return b"".join((view[:start], quoted, view[end:])), (field.path, token, value)


def _decode_large(text: memoryview, kind: str) -> Any:
    if kind == ROWS:
        return _decode_rows(bytes(text))
    return pybase64.b64decode(text, validate=True) if kind == BYTES else _decode_ids(text, kind)


def _find_rows(body: Body, key: bytes) -> tuple[int, int]:
    """Where the first list of lists after such a key begins and, if they hold no text, ends; else (0, 0)."""
    at = body.find(key + b":[[")
    while at > 0 and body[at - 1] not in _BEFORE_KEY:
        at = body.find(key + b":[[", at + 1)
    start = at + len(key) + 1
    end = body.find(b"]]", start) + 2 if at > 0 else 0
    return (start, end) if end > start and body.find(b'"', start, end) < 0 else (0, 0)


def _decode_rows(text: bytes) -> Rows:
    """``[[number, number, null], ...]``, without white space, as one flat list.

    Without the characters of numbers, all rows are alike.

    Raises:
        ValueError: It is anything else.
    """
    flat = orjson.loads(b"[%b]" % text.translate(None, b"[]"))
    form = text.translate(None, b"0123456789+-.eE")
    if form != b"[" + b"[,,null]," * (len(flat) // 3 - 1) + b"[,,null]]":
        raise ValueError("not rows of two numbers and null")
    return Rows(flat[0::3], flat[1::3])


def _decode_ids(text: memoryview, dtype: str) -> npt.NDArray[Any]:
    """Base64 of raw int32 as ``dtype``, in pieces small enough for the processor's cache: no copy in int32 is made.

    Raises:
        ValueError: It is not, or an id does not fit.
    """
    padding = bytes(text[-2:]).count(b"=")
    size, odd = divmod(len(text) // 4 * 3 - padding, 4)
    if len(text) % 4 or odd:
        raise ValueError("not a whole number of int32")
    ids = np.empty(size, dtype)
    foreign = np.int32(~(_NARROW[dtype] - 1)) if dtype in _NARROW else np.int32(0)  # bits that no id may have
    done = 0
    for start in range(0, len(text), _PIECE):
        piece = pybase64.b64decode(text[start : start + _PIECE], validate=True)
        if start == 0 and piece.startswith(_NPY_MAGIC):
            raise ValueError("an .npy file")
        some = np.frombuffer(piece, "<i4")
        if foreign and np.bitwise_or.reduce(some) & foreign:
            raise ValueError(f"an id does not fit {dtype}")
        ids[done : done + len(some)] = some  # a piece that is short, by padding within the text, leaves some missing
        done += len(some)
    if done != size:
        raise ValueError("padding within the text")
    return ids


def _find_text(body: Body, key: bytes) -> tuple[int, int]:
    """Where the first large text after such a key begins and ends; (0, 0) if there is none."""
    at = body.find(key)
    while at > 0:
        after = at + len(key)
        opening = _OPENS_TEXT.match(body, after, after + _MOST_SPACE)
        if opening is not None and body[at - 1] in _BEFORE_KEY:
            end = body.find(b'"', opening.end())
            if end - opening.end() >= _WORTH_IT:
                return opening.end(), end
        at = body.find(key, after)
    return 0, 0


def _put_back(value: Any, path: JsonPath, token: str, meant: Any) -> bool:
    """Put what was meant in its place; False if the token is not there."""
    for key in path[:-1]:
        try:
            value = value[key]
        except (TypeError, LookupError):
            return False
    if not isinstance(value, dict) or value.get(path[-1]) != token:
        return False
    value[path[-1]] = meant
    return True


def _depth(body: Body) -> int:
    """How many lists and objects are open at once at most."""
    outside = np.frombuffer(_STRINGS.sub(b"", body), np.uint8)
    steps = np.isin(outside, _OPENING).astype(np.int32) - np.isin(outside, _CLOSING)
    return int(steps.cumsum().max(initial=0))


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _without_surrogates(value)
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value


def _without_surrogates(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def to_json(value: Any) -> bytes:
    """``value`` as JSON; numpy arrays become lists and numbers as keys become strings.

    Raises:
        TypeError: Something in it has no JSON form.
        ValueError: A number in it is NaN or infinite, which JSON cannot say.
    """
    check_finite(value)
    return orjson.dumps(value, option=_TO_JSON)


def check_finite(value: Any) -> None:
    """Raise ValueError if ``value`` holds NaN or an infinity anywhere: JSON would turn it into null without a word."""
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} has no JSON form")
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("an array with NaN or an infinity has no JSON form")
    elif isinstance(value, dict):
        for item in value.values():
            check_finite(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_finite(item)


def int32_array(values: list[Any], least: int = int(_INT32.min)) -> npt.NDArray[np.int32]:
    """Integers as int32. Strict; of all ways that are, the fastest for a few as well as for thousands.

    Raises:
        OverflowError: One is below ``least``, or beyond int32.
        TypeError: One is no integer; true and false are none.
        ValueError: There is none at all.
    """
    numbers = np.array(array("i", values))
    smallest = min(values) if len(values) <= _FEWER else int(numbers.min())
    if smallest < least:
        raise OverflowError(f"{smallest} is below {least}")
    if smallest <= 1 and bool in set(map(type, values)):
        raise TypeError("true and false are no integers")  # but 1 and 0 to whoever made the array
    return numbers


def decode_base64(text: str) -> bytes:
    """The bytes behind base64 ``text``.

    Raises:
        ValueError: A character or the padding is wrong.
    """
    try:
        return pybase64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bad base64 ({len(text)} characters): {error}") from None


def decode_experts(value: Any) -> npt.NDArray[Any]:
    """Expert ids as any engine sends them: base64 of raw int32, base64 of an ``.npy`` file, or nested lists.

    Bytes and arrays are base64 that ``parse_answer`` has decoded already.

    Raises:
        ValueError: None of these.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list):
        return _integers(np.array(value))
    if not isinstance(value, (str, bytes)):
        raise ValueError(f"expert ids are a {type(value).__name__}, not base64 or a list")
    raw = value if isinstance(value, bytes) else decode_base64(value)
    if raw.startswith(_NPY_MAGIC):
        return _integers(_load_npy(raw))
    if len(raw) % 4:
        raise ValueError(f"expert ids are {len(raw)} bytes, not a whole number of int32")
    return np.frombuffer(raw, "<i4")


def _load_npy(raw: bytes) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    except (EOFError, MemoryError, OverflowError, SyntaxError, TypeError, TokenError) as error:
        raise ValueError(f"expert ids are a broken .npy file: {error}") from None
    return array


def _integers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu":
        raise ValueError(f"expert ids are {array.dtype}, not integers")
    return array


def narrow(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """``array`` in ``dtype`` (uint8, uint16 or int32), owning its memory: a copy, or what it is a view of, reshaped.

    Raises:
        ValueError: A value does not fit.
    """
    whole = array.base
    if (
        isinstance(whole, np.ndarray)
        and whole.flags.owndata
        and whole.flags.c_contiguous
        and array.flags.c_contiguous  # an .npy file may be in Fortran's order
        and whole.dtype == dtype
        and whole.size == array.size
    ):
        whole.resize(array.shape, refcheck=False)
        return whole
    least, limit = (0, _NARROW[dtype]) if dtype in _NARROW else (int(_INT32.min), int(_INT32.max) + 1)
    if array.size and (int(array.min()) < least or int(array.max()) >= limit):
        raise ValueError(f"expert ids from {array.min()} to {array.max()} do not fit {dtype}")
    return array.astype(dtype, copy=True)


def narrowest(values: int | None) -> str:
    """The narrowest dtype for ids below ``values``; int32 where that is not known."""
    if values is None:
        return "int32"
    return next((name for name, limit in _NARROW.items() if values <= limit), "int32")
