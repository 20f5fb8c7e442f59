"""What is not certainly zero is never zero."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.dialects.base import LoadKind, LoadReading, unknown_load
from rolloutsync.dialects.sglang import SGLangDialect

from .golden import recorded

_DIALECT = SGLangDialect()
_LOADS, _GET_LOAD = _DIALECT.load_calls()
_COUNTS = ["num_running_reqs", "num_waiting_reqs"]
_MORE = ["num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens"]


def _read(answer: Any, dp_size: int = 1) -> LoadReading:
    return _DIALECT.read_load(_LOADS, answer, dp_size)


def _zero() -> dict[str, Any]:
    answer: dict[str, Any] = copy.deepcopy(recorded("loads_idle").answer)
    return answer


def _with(**changes: Any) -> dict[str, Any]:
    answer = _zero()
    answer["loads"][0].update(changes)
    return answer


def _without(*keys: str) -> dict[str, Any]:
    answer = _zero()
    for key in keys:
        del answer["loads"][0][key]
    return answer


def test_the_recorded_zero_is_zero() -> None:
    """What the rest of this file starts from; without the optional sections too."""
    assert _read(_zero()).kind is LoadKind.ZERO
    optional = ["num_waiting_uncached_tokens", "num_total_tokens", "queues", "disaggregation", "memory"]
    assert _read(_without(*optional)).kind is LoadKind.ZERO


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"error": "busy"},
        {"error": {"message": "x"}},
        {"object": "error", "message": "x", "code": 500},
        None,
        "7",
        "",
        0,
        -1,
        7,
        True,
        [],
        [{}],
        [[]],
        {"loads": []},
        {"loads": None},
        {"loads": {}},
        {"loads": "0"},
        {"loads": [None]},
        {"loads": [[]]},
        {"loads": [{}]},
        {"loads": [0]},
        {"num_reqs": "7"},
        {"num_running_reqs": 0, "num_waiting_reqs": 0},
        {"aggregate": {"total_reqs": 0}},
        [{"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
    ],
)
def test_unknown_shapes_are_unknown(answer: Any) -> None:
    """An error that comes as 200, another endpoint's answer, nonsense."""
    reading = _read(answer)
    assert reading.kind is LoadKind.UNKNOWN
    assert reading.why
    assert len(reading.why) < 400


@pytest.mark.parametrize(
    "answer",
    [
        {},
        None,
        [],
        [{}],
        "7",
        -1,
        {"loads": []},
        [{"num_reqs": "7"}],
        [{"num_reqs": 0}],
        [{"num_waiting_reqs": 0}],
        [{"num_reqs": None, "num_waiting_reqs": 0}],
        [{"num_reqs": True, "num_waiting_reqs": 0}],
        [{"num_reqs": -1, "num_waiting_reqs": 0}],
        [{"num_reqs": 0.0, "num_waiting_reqs": 0}],
    ],
)
def test_unknown_shapes_of_the_old_endpoint(answer: Any) -> None:
    """The same for ``/get_load``."""
    assert _DIALECT.read_load(_GET_LOAD, answer, 1).kind is LoadKind.UNKNOWN


@pytest.mark.parametrize(
    ("counts", "kind", "parts"),
    [
        ((0, 0, 0), LoadKind.ZERO, (0, 0, 0)),
        ((1, 0, 0), LoadKind.BUSY, (1, 0, 0)),
        ((3, 1, 9), LoadKind.BUSY, (2, 1, 9)),
        ((0, 1, 0), LoadKind.BUSY, (0, 1, 0)),
        ((0, 0, 9), LoadKind.BUSY, (0, 0, 9)),
    ],
)
def test_counts_of_the_old_endpoint(counts: tuple[int, ...], kind: LoadKind, parts: tuple[int, ...]) -> None:
    """Requests there include the waiting ones; tokens count too."""
    rank = dict(zip(("num_reqs", "num_waiting_reqs", "num_tokens"), counts, strict=True))
    reading = _DIALECT.read_load(_GET_LOAD, [rank], 1)
    assert reading.kind is kind
    assert (reading.running, reading.waiting, reading.tokens) == parts
    assert reading.stamps is None


@pytest.mark.parametrize("value", [None, "0", "", True, False, -1, 0.0, 0.5, math.nan, [], {}])
@pytest.mark.parametrize("key", [*_COUNTS, *_MORE])
def test_what_is_not_a_count_is_unknown(key: str, value: Any) -> None:
    """Null, text, bool, negative or a fraction: not a number that could be zero."""
    assert _read(_with(**{key: value})).kind is LoadKind.UNKNOWN


@pytest.mark.parametrize("key", _COUNTS)
def test_running_and_waiting_must_be_there(key: str) -> None:
    """The least that a load says."""
    assert _read(_without(key)).kind is LoadKind.UNKNOWN


@pytest.mark.parametrize("key", [*_COUNTS, *_MORE])
def test_any_count_is_busy(key: str) -> None:
    """A request in prefill is in no queue: only its tokens show."""
    assert _read(_with(**{key: 1})).kind is LoadKind.BUSY


def test_tokens_alone_are_neither_running_nor_waiting() -> None:
    """So that whoever judges can tell a session's tokens from work."""
    reading = _read(_with(num_used_tokens=5, num_total_tokens=7))
    assert (reading.kind, reading.running, reading.waiting, reading.tokens) == (LoadKind.BUSY, 0, 0, 7)


@pytest.mark.parametrize("queue", ["waiting", "grammar", "paused", "retracted", "prealloc_ready", "one of tomorrow"])
def test_any_queue_is_busy(queue: str) -> None:
    """Also one that this version does not know."""
    reading = _read(_with(queues={queue: 2}))
    assert (reading.kind, reading.waiting) == (LoadKind.BUSY, 2)
    assert _read(_with(queues={queue: "2"})).kind is LoadKind.UNKNOWN
    assert _read(_with(queues={queue: None})).kind is LoadKind.UNKNOWN


@pytest.mark.parametrize("key", ["prefill_bootstrap_queue_reqs", "decode_transfer_queue_reqs", "some_new_reqs"])
def test_any_disaggregation_queue_is_busy(key: str) -> None:
    """Requests in them are in no other; speeds and modes are no requests."""
    assert _read(_with(disaggregation={key: 1})).kind is LoadKind.BUSY
    assert _read(_with(disaggregation={key: -1})).kind is LoadKind.UNKNOWN
    harmless = {key: 0, "mode": "null", "kv_transfer_speed_gb_s": 5.0}
    assert _read(_with(disaggregation=harmless)).kind is LoadKind.ZERO


@pytest.mark.parametrize("section", ["queues", "disaggregation"])
@pytest.mark.parametrize("value", [[], [1], "x", 5, True])
def test_sections_of_another_shape_are_unknown(section: str, value: Any) -> None:
    """They may hide something."""
    assert _read(_with(**{section: value})).kind is LoadKind.UNKNOWN


@pytest.mark.parametrize("stamp", [0.0, 0, -1.0, "1795963781.1", True, math.nan, math.inf, [], {}])
def test_stamps_that_are_none_are_unknown(stamp: Any) -> None:
    """0.0 is a snapshot that was never written."""
    assert _read(_with(timestamp=stamp)).kind is LoadKind.UNKNOWN


def test_live_answers_have_no_stamps() -> None:
    """Up to 0.5.12; the outer timestamp is the web server's and proves nothing."""
    reading = _read(_without("timestamp"))
    assert (reading.kind, reading.stamps) == (LoadKind.ZERO, None)


def _ranks(*stamps: float | None, **changes: Any) -> dict[str, Any]:
    answer = _zero()
    rank = answer["loads"][0]
    answer["loads"] = [{**rank, "dp_rank": number, "timestamp": stamp} for number, stamp in enumerate(stamps)]
    answer["loads"][-1].update(changes)
    return answer


def test_every_rank_counts() -> None:
    """One of them busy is busy; one missing, unstamped or listed twice is unknown."""
    assert _read(_ranks(1.0, 2.0), 2) == _read(_ranks(1.0, 2.0), 1)
    assert _read(_ranks(1.0, 2.0), 2).stamps == (1.0, 2.0)
    assert _read(_ranks(1.0, 2.0), 2).kind is LoadKind.ZERO
    assert _read(_ranks(1.0, 2.0, num_running_reqs=1), 2).kind is LoadKind.BUSY
    assert _read(_ranks(1.0), 2).kind is LoadKind.UNKNOWN
    assert _read(_ranks(1.0, 2.0), 3).kind is LoadKind.UNKNOWN
    assert _read(_ranks(1.0, 0.0), 2).kind is LoadKind.UNKNOWN
    assert _read(_ranks(1.0, None), 2).kind is LoadKind.UNKNOWN
    assert _read(_ranks(1.0, 2.0, dp_rank=0), 2).kind is LoadKind.UNKNOWN


def test_an_old_engine_says_itself_how_many_ranks_it_has() -> None:
    """Also where we could not learn it."""
    answer = copy.deepcopy(recorded("loads_idle", "0.5.9").answer)
    assert _read(answer).kind is LoadKind.ZERO
    assert _read({**answer, "dp_rank_count": 2}).kind is LoadKind.UNKNOWN


def test_old_ranks_all_count() -> None:
    """Two ranks without numbers of their own."""
    rank = {"dp_rank": None, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert _DIALECT.read_load(_GET_LOAD, [rank, rank], 2).kind is LoadKind.ZERO
    assert _DIALECT.read_load(_GET_LOAD, [rank], 2).kind is LoadKind.UNKNOWN
    assert _DIALECT.read_load(_GET_LOAD, [rank, {**rank, "num_reqs": 1}], 2).kind is LoadKind.BUSY


_SPOTS: list[tuple[str, ...]] = [(key,) for key in (*_COUNTS, *_MORE)]
_SPOTS += [("queues", key) for key in recorded("loads_idle").answer["loads"][0]["queues"]]
_SPOTS += [
    ("disaggregation", key) for key in recorded("loads_idle").answer["loads"][0]["disaggregation"] if "_reqs" in key
]
_junk: st.SearchStrategy[Any] = st.sampled_from([None, "0", "", True, -1, 0.5, [], {}]) | st.integers(1, 2**40)


@given(st.lists(st.tuples(st.sampled_from(_SPOTS), _junk), min_size=1), st.integers(1, 3), st.data())
def test_no_mutation_of_a_zero_is_zero(
    changes: list[tuple[tuple[str, ...], Any]], ranks: int, data: st.DataObject
) -> None:
    """Anything but a plain zero, anywhere that matters, on any rank."""
    answer = _ranks(*[float(number + 1) for number in range(ranks)])
    answer["loads"] = copy.deepcopy(answer["loads"])
    rank = answer["loads"][data.draw(st.integers(0, ranks - 1))]
    for spot, value in dict(changes).items():
        holder = rank
        for key in spot[:-1]:
            holder = holder[key]
        holder[spot[-1]] = value
    reading = _read(answer, ranks)
    assert reading.kind is not LoadKind.ZERO
    if all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in dict(changes).values()):
        assert reading.kind is LoadKind.BUSY


def test_readings_have_words() -> None:
    """For reports and logs."""
    assert str(unknown_load("it is null")) == "unknown (it is null)"
    assert str(_read(_with(num_running_reqs=2, num_used_tokens=5))) == "2 running, 0 waiting, 5 tokens"


# --- facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, [], "x", 5, {}, {"dp_size": "2", "version": 5, "internal_states": "x"}])
def test_facts_that_are_not_told_are_unknown(answer: Any) -> None:
    """None each, no error."""
    facts = _DIALECT.read_facts(answer)
    told = (facts.version, facts.dp_size, facts.running_limit, facts.model_path, facts.weight_version, facts.vocab_size)
    assert told == (None,) * 6


@pytest.mark.parametrize(
    ("answer", "limit"),
    [
        ({"max_running_requests": 48}, 48),
        ({"max_running_requests": None}, None),
        ({"max_running_requests": 0}, None),
        ({"max_running_requests": True}, None),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 16}] * 2, "dp_size": 2}, 32),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 16}, {}], "max_running_requests": 8}, 8),
        ({"internal_states": [None, 5], "max_running_requests": 8}, 8),
    ],
)
def test_the_running_limit_is_over_all_ranks(answer: dict[str, Any], limit: int | None) -> None:
    """The effective one of each rank where all tell it, else the server's argument."""
    assert _DIALECT.read_facts(answer).running_limit == limit
