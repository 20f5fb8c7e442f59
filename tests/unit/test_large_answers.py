"""Large base64 goes from the body's bytes to its place, and no document whatever fools the search for it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutsync import payload
from rolloutsync.payload import BYTES, ROWS, LargeField, Rows, decode_experts, narrow, parse_answer, parse_json

KEY = "routed_experts"
LOGPROBS = "output_token_logprobs"
FIELDS = (
    LargeField(("meta_info", KEY), "uint8"),
    LargeField(("meta_info", "indexer_topk"), BYTES),
    LargeField(("meta_info", LOGPROBS), ROWS),
)
_EXPERTS = np.arange(8192, dtype=np.int32) % 256
_TEXT = base64.b64encode(_EXPERTS.tobytes()).decode()


@pytest.fixture(autouse=True)
def small_is_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes are worth it in the tests of properties."""
    if "small" in request.fixturenames:
        monkeypatch.setattr(payload, "_WORTH_IT", 8)


@pytest.fixture
def small() -> None:
    """See ``small_is_large``."""


def _as_texts(value: Any) -> Any:
    """Bytes and ids as the base64 that they came from, rows as lists."""
    if isinstance(value, Rows):
        return [[*row, None] for row in zip(*value, strict=True)]
    if isinstance(value, np.ndarray):
        value = value.astype("<i4").tobytes()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _as_texts(item) for key, item in value.items()}
    return [_as_texts(item) for item in value] if isinstance(value, list) else value


def _read(body: bytes) -> Any:
    """What the plain parse says, or that it refuses; the fast one must agree on either."""
    plain, fast = _try(lambda: parse_json(body)), _try(lambda: parse_answer(body, FIELDS))
    assert _as_texts(fast) == plain
    return fast


def _try(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError:
        return "refused"


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_experts_come_as_bytes(kind: Any) -> None:
    """Without a Python string of them, from either kind of body, and the rest is as sent."""
    sent = {"text": "a", "meta_info": {"id": "r", KEY: _TEXT, "indexer_topk": _TEXT, "z": [1]}}
    answer = parse_answer(kind(orjson.dumps(sent)), FIELDS)
    assert answer["meta_info"][KEY].dtype == np.uint8
    assert np.array_equal(decode_experts(answer["meta_info"][KEY]), _EXPERTS)
    assert np.array_equal(decode_experts(answer["meta_info"]["indexer_topk"]), _EXPERTS)
    assert _as_texts(answer) == sent


def test_a_place_in_a_list() -> None:
    """As vLLM has it."""
    answer = parse_answer(orjson.dumps({"choices": [{KEY: _TEXT}]}), [LargeField(("choices", 0, KEY), BYTES)])
    assert isinstance(answer["choices"][0][KEY], bytes)


@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_spaces_around_the_colon(space: str) -> None:
    """Written by another JSON library."""
    body = f'{{"meta_info":{space}{{{space}"{KEY}"{space}:{space}"{_TEXT}"{space}}}}}'.encode()
    assert isinstance(parse_answer(body, FIELDS)["meta_info"][KEY], np.ndarray)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"meta_info":{{"x":"{KEY}\\":\\"{_TEXT}","{KEY}":null}}}}',
        f'{{"text":"{{\\"{KEY}\\":\\"{_TEXT}\\"","meta_info":{{}}}}',
        f'{{"x\\",\\"{KEY}":"{_TEXT}","meta_info":{{"{KEY}":"AAAA"}}}}',
        f'{{"{KEY}":"{_TEXT}","meta_info":{{"{KEY}":[1,2]}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT}","{KEY}":"AAAA"}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT}"}},"meta_info":{{"{KEY}":"BBBB"}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT}!"}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT[:-1]}"}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT[:99]}\\n{_TEXT[99:]}"}}}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT[:99]}\\u0041{_TEXT[99:]}"}}}}',
        f'{{"meta_info":[{{"{KEY}":"{_TEXT}"}}]}}',
        f'[{{"meta_info":{{"{KEY}":"{_TEXT}"}}}}]',
        f'{{"meta_info":"{KEY}","{KEY}":"{_TEXT}"}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT}"}}',
        f'{{"meta_info":{{"{KEY}":"{_TEXT}',
    ],
    ids=range(15),
)
def test_what_only_looks_like_it(body: str) -> None:
    """The key in a text, elsewhere, twice, with escapes; base64 that is none; JSON that is none."""
    _read(body.encode())


_rows = st.lists(st.tuples(st.one_of(st.none(), st.integers(-9, 9)), st.integers(0, 9), st.none()), max_size=4)
_keys = st.sampled_from(
    ["meta_info", LOGPROBS, KEY, "indexer_topk", "choices", f'x","{KEY}', f'"{KEY}":"', "text", "é"]
)
_codes = st.binary(min_size=6, max_size=24).map(lambda raw: base64.b64encode(raw).decode())
_texts = st.one_of(
    _codes,
    st.text(max_size=12),
    _codes.map(lambda code: f'{{"{KEY}":"{code}"}}'),
    _codes.map(lambda code: f'\\","{KEY}":"{code}\\'),
)
_values = st.recursive(
    st.one_of(_texts, _rows, st.none(), st.booleans(), st.integers(-9, 9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=4)),
    max_leaves=12,
)
_answers = st.fixed_dictionaries(
    {"meta_info": st.dictionaries(_keys, st.one_of(_texts, _rows, _values), max_size=4)},
    optional={
        "text": _texts,
        "choices": st.lists(st.dictionaries(_keys, _values, max_size=3), max_size=2),
        KEY: _texts,
    },
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.one_of(_answers, _values), spaced=st.booleans(), ascii_only=st.booleans())
def test_any_document_reads_alike(small: None, value: Any, spaced: bool, ascii_only: bool) -> None:
    """Hostile texts included."""
    separators = (", ", " : ") if spaced else (",", ":")
    _read(json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=_answers, at=st.integers(0, 400), dirt=st.sampled_from([b"", b'"', b"\\", b",", b"{", b"NaN", b"\xff", b"A"])
)
def test_any_damaged_document_reads_alike(small: None, value: Any, at: int, dirt: bytes) -> None:
    """One byte lost, or something put in: refused by both, or read alike."""
    whole = json.dumps(value).encode()
    at %= len(whole)
    _read(whole[:at] + dirt + whole[at + 1 :])


def _with_twins(pairs: list[tuple[str, Any]]) -> bytes:
    return b"{" + b",".join(orjson.dumps(key) + b":" + orjson.dumps(value) for key, value in pairs) + b"}"


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inner=st.lists(st.tuples(_keys, _texts), max_size=5), outer=st.lists(st.tuples(_keys, _texts), max_size=3))
def test_any_document_with_twins_reads_alike(small: None, inner: list[tuple[str, str]], outer: list[Any]) -> None:
    """The same key twice in an object: the last one counts."""
    _read(b'{"meta_info":' + _with_twins(inner) + b"," + _with_twins(outer)[1:].replace(b"}", b',"z":1}', 1))
    _read(b'{"meta_info":' + _with_twins(inner) + b"}")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 95, 96, 97, 300])
def test_ids_in_pieces(monkeypatch: pytest.MonkeyPatch, dtype: str, count: int) -> None:
    """Whatever the number of pieces and the padding; the array owns its memory."""
    monkeypatch.setattr(payload, "_PIECE", 128)
    monkeypatch.setattr(payload, "_WORTH_IT", 1)
    sent = np.arange(count, dtype=np.int32) % 251
    text = base64.b64encode(sent.tobytes()).decode()
    ids = parse_answer(orjson.dumps({"meta_info": {KEY: text}}), [LargeField(("meta_info", KEY), dtype)])["meta_info"][
        KEY
    ]
    assert (ids.dtype, ids.tolist()) == (dtype, sent.tolist())
    shaped = narrow(ids.reshape(1, count), dtype)
    assert shaped.flags.owndata
    assert shaped.shape == (1, count)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [([256], "uint8"), ([-1], "uint8"), ([65536], "uint16"), ([-1], "uint16"), ([0, 0, 2**31 - 1], "uint16")],
)
def test_ids_that_do_not_fit_are_left_to_those_who_say_so(small: None, ids: list[int], dtype: str) -> None:
    """The text stays, and is refused where the error can be named."""
    text = base64.b64encode(np.array(ids * 8, np.int32).tobytes()).decode()
    answer = parse_answer(orjson.dumps({"meta_info": {KEY: text}}), [LargeField(("meta_info", KEY), dtype)])
    assert answer == {"meta_info": {KEY: text}}
    with pytest.raises(ValueError, match=f"do not fit {dtype}"):
        narrow(decode_experts(text), dtype)


def test_padding_within_a_text_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece happens to end with it."""
    monkeypatch.setattr(payload, "_PIECE", 16)
    monkeypatch.setattr(payload, "_WORTH_IT", 1)
    text = "AAAAAAAAAAAAAA==" * 3
    answer = parse_answer(orjson.dumps({"meta_info": {KEY: text}}), FIELDS)
    assert answer == {"meta_info": {KEY: text}}


def _logprobs(text: str) -> Any:
    return parse_answer(f'{{"meta_info":{{"{LOGPROBS}":{text}}}}}'.encode(), FIELDS)["meta_info"][LOGPROBS]


def test_rows_come_as_two_columns(small: None) -> None:
    """Not as thousands of lists."""
    assert _logprobs("[[-0.5,7,null],[-1e-3,8,null]]") == Rows([-0.5, -0.001], [7, 8])


@pytest.mark.parametrize(
    "text",
    [
        "[[-0.5,7],[null,-0.1,8,null]]",
        "[[-0.5,7,null,null],[-0.1,8]]",
        "[[null,7,null],[-0.1,8,null]]",
        "[[-0.5,null,7],[-0.1,null,8]]",
        "[[-0.5,7,null],[-0.1,8,null],null]",
        "[[-0.5,7,null],[-0.1,[8],null]]",
        "[[[-0.5,7,null]],[[-0.1,8,null]]]",
        '[[-0.5,7,"a"],[-0.1,8,null]]',
        "[[-0.5,7,null], [-0.1,8,null]]",
        "[[-0.5,7,null],[-0.1,8,false]]",
        "[[-0.5,7,null],[NaN,8,null]]",
        "[[-0.5,7,null],{},[-0.1,8,null]]",
        "[[-0.5,7,null,0.1,8,null],[-0.1,8,null]]",
        "[[],[],[]]",
        "[[]]",
    ],
)
def test_what_only_looks_like_rows(small: None, text: str) -> None:
    """Rows of other lengths, other nulls, deeper lists, texts, spaces: left to the plain parse."""
    body = f'{{"meta_info":{{"{LOGPROBS}":{text}}}}}'.encode()
    plain = parse_json(body)["meta_info"][LOGPROBS]
    assert repr(_logprobs(text)) == repr(plain)


def test_rows_that_begin_within_a_text(small: None) -> None:
    """The key and the brackets as a text says them."""
    _read(f'{{"text":"{{\\"{LOGPROBS}\\":[[1,2,null],[3,4,null]]","meta_info":{{"{LOGPROBS}":[]}}}}'.encode())
    _read(f'{{"x":{{"{LOGPROBS}":[[1,2,null],[3,4,null]]}},"meta_info":{{"{LOGPROBS}":[]}}}}'.encode())
