"""Weight calls, and who is believed when checksums disagree. No engine."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from rolloutsync import EngineUpdate, UpdateReport, UpdateState
from rolloutsync.clock import Clock
from rolloutsync.config import ClientConfig
from rolloutsync.dialects.base import Call, Facts
from rolloutsync.dialects.sglang import PAUSE_MODES, SGLangDialect
from rolloutsync.engine import Engine
from rolloutsync.weight_member import Member
from rolloutsync.weight_update import _compare

WEIGHTS = SGLangDialect().weights
CALLS = {
    "begin": WEIGHTS.begin,
    "end": WEIGHTS.end,
    "checksum": WEIGHTS.checksum,
    "disk": WEIGHTS.from_disk("a", {}),
    "tensor": WEIGHTS.from_tensor(["QQ=="], {}),
    "distributed": WEIGHTS.from_distributed(["w"], ["bfloat16"], [(2, 3)], "g", {}),
    "version": WEIGHTS.set_version("1"),
    "init": WEIGHTS.init_group("h", 1, 1, 3, "g", "nccl"),
    "destroy": WEIGHTS.destroy_group("g"),
}


def body(call: Call) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(call.body or b"")
    return value


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_an_admin_call_with_a_body(name: str) -> None:
    """And a long one, but for the label."""
    call = CALLS[name]
    assert (call.method, call.admin, call.long) == ("POST", True, name != "version")
    assert isinstance(body(call), dict)


def test_nothing_is_flushed_or_aborted_unasked() -> None:
    """Whatever the user sends through: flushing a busy engine kills some versions, and the label aborts by default."""
    unruly = {"flush_cache": True, "abort_all_requests": True, "load_format": "x"}
    calls = [
        WEIGHTS.from_disk("a", unruly),
        WEIGHTS.from_tensor([b"A"], unruly),
        WEIGHTS.from_distributed(["w"], ["int8"], [[1]], "g", unruly),
    ]
    for call in calls:
        assert body(call)["flush_cache"] is body(call)["abort_all_requests"] is False
        assert body(call)["load_format"] == "x"
        assert "weight_version" not in body(call)
    assert body(WEIGHTS.set_version("1")) == {"new_version": "1", "abort_all_requests": False}


def test_modes() -> None:
    """Each is one of the engine's pauses; after a drain "retract" costs nothing, where "abort" costs a second."""
    assert {mode: WEIGHTS.pause_mode(mode) for mode in WEIGHTS.modes} == {
        "abort": "retract",
        "hold": "in_place",
        "retract": "retract",
    }
    assert {WEIGHTS.pause_mode(mode) for mode in WEIGHTS.modes} < set(PAUSE_MODES)
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'wait'"):
        WEIGHTS.pause_mode("wait")


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ({"success": True, "message": "Success"}, None),
        ({"success": False, "message": "no\nsuch"}, "no such"),
        ({"success": False}, "{'success': False}"),
        ("null", None),
        (None, None),
        ([], None),
    ],
)
def test_refusals_with_200(answer: Any, refusal: str | None) -> None:
    """Only an engine that says so has refused."""
    assert WEIGHTS.refusal(answer) == refusal


def test_words_of_the_engine() -> None:
    """As 0.5.21 to 0.5.23 say them."""
    assert WEIGHTS.applied(400, "POST /x answered 400: Weights were updated, but the cache was not flushed because")
    assert not WEIGHTS.applied(500, "Weights were updated, but")
    assert not WEIGHTS.applied(400, "Failed to update weights")
    assert WEIGHTS.already_open("a weight-update session is already open; call end_weight_update() first")
    assert not WEIGHTS.already_open("no weight-update session is open; call begin_weight_update() first")
    assert WEIGHTS.no_such_group("The group to be destroyed does not exist.")


@pytest.mark.parametrize("answer", [None, {}, {"per_engine_checksum": None}, {"per_engine_checksum": ""}, [], "a"])
def test_no_checksum(answer: Any) -> None:
    """Is not taken for one."""
    assert WEIGHTS.read_checksum(answer) is None


def test_facts_tell_the_tensor_parallel_size() -> None:
    """None where the engine does not."""
    read = SGLangDialect().read_facts
    assert [read(told).tp_size for told in ({"tp_size": 4}, {"tp_size": 0}, {"tp_size": "4"}, {})] == [
        4,
        None,
        None,
        None,
    ]


def member(checksum: str, **facts: Any) -> Member:
    engine = Engine(f"http://{checksum}", None, SGLangDialect(), ClientConfig(), Clock())  # type: ignore[arg-type]
    engine.facts = Facts(**facts)
    made = Member(engine, set())
    made.checksum = checksum
    return made


@pytest.mark.parametrize(
    ("sums", "wrong"),
    [
        ("aaaa", []),
        ("aaab", [3]),
        ("abaa", [1]),
        ("aabb", [0, 1, 2, 3]),
        ("ab", [0, 1]),
        ("abc", [0, 1, 2]),
        ("aabc", [0, 1, 2, 3]),
        ("aaabc", [3, 4]),
        ("a", []),
    ],
)
def test_a_majority_is_believed(sums: str, wrong: list[int]) -> None:
    """More than half; otherwise nobody is."""
    members = [member(checksum, tp_size=1) for checksum in sums]
    _compare(members)
    assert [index for index, made in enumerate(members) if not made.ok] == wrong


def test_only_engines_of_one_make_are_compared() -> None:
    """Another number of ranks cuts the weights another way."""
    members = [member("a", tp_size=1), member("b", tp_size=2), member("c", tp_size=2, dp_size=2)]
    members.append(member("d", tp_size=1))
    members[3].fail("broken before")
    _compare(members)
    assert [made.ok for made in members] == [True, True, True, False]
    assert members[3].reason == "broken before"


def test_a_report() -> None:
    """Pickles, and reads as a table."""
    engines = (
        EngineUpdate("http://a", UpdateState.UPDATED, "12", "0123456789abcdef", flushed=True),
        EngineUpdate("http://b", UpdateState.STALE, detail="no such file"),
        EngineUpdate("http://c", UpdateState.ABSENT),
    )
    report = UpdateReport("12", "abort", engines, 1.25)
    assert pickle.loads(pickle.dumps(report)) == report
    assert [engine.url for engine in report.stale] == ["http://b"]
    assert str(report).splitlines() == [
        "engine    state    version  checksum      detail",
        "http://a  updated  12       0123456789ab",
        "http://b  stale    -        -             no such file",
        "http://c  absent   -        -",
        "1 of 3 engines have weights '12' after 1.25 s (mode abort)",
    ]
