"""A slot: how much room an engine has, and which of its ranks is the quietest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolloutsync.dialects.base import Facts
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.engine import Engine
from rolloutsync.slot import EngineState, Lease, Slot

from .makers import order


def _slot(limit: int | None = None, **facts: Any) -> Slot:
    engine = SimpleNamespace(url="http://h:1", facts=Facts(**facts), dialect=SGLangDialect(), known=True)
    return Slot(cast("Engine", engine), limit, EngineState.LIVE)


def _take(slot: Slot, rank: int | None = None) -> Lease:
    return slot.take(order(), "r", rank, 0.0)


@pytest.mark.parametrize(
    ("limit", "told", "room"),
    [(None, None, 256), (None, 48, 60), (None, 1, 1), (None, 4, 5), (None, 4096, 512), (7, 48, 7), (2000, None, 2000)],
)
def test_room(limit: int | None, told: int | None, room: int) -> None:
    """1.25 times what the engine runs at once, at most 512, 256 where it does not say; the user's word stands."""
    assert _slot(limit, running_limit=told).room == room


def test_room_is_taken_and_given_back_once() -> None:
    """However often a lease is given back; only live engines have room."""
    slot = _slot(2)
    one = _take(slot)
    assert (slot.has_room, slot.in_flight) == (True, 1)
    two = _take(slot)
    assert (slot.has_room, slot.in_flight) == (False, 2)
    slot.give_back(one)
    slot.give_back(one)
    assert (slot.has_room, slot.in_flight, slot.requests) == (True, 1, 2)
    slot.give_back(two)
    for state in EngineState:
        slot.state = state
        assert slot.has_room == (state is EngineState.LIVE)


def test_the_quietest_rank() -> None:
    """Of an engine with several; a single one is not named."""
    assert _slot().quietest_rank() is None
    assert _slot(dp_size=1).quietest_rank() is None
    slot = _slot(dp_size=3)
    leases = [_take(slot, slot.quietest_rank()) for _ in range(4)]
    assert [lease.dp_rank for lease in leases] == [0, 1, 2, 0]
    slot.give_back(leases[0])
    slot.give_back(leases[3])
    assert slot.quietest_rank() == 0


def test_a_picture_of_a_slot() -> None:
    """What the client shows of an engine."""
    slot = _slot(version="0.5.23", weight_version="1", dp_size=2, model_path="m", running_limit=8)
    _take(slot, 0)
    status = slot.status()
    assert (status.url, str(status.state), status.in_flight, status.limit) == ("http://h:1", "live", 1, 10)
    assert (status.dialect, status.version, status.model_path, status.dp_size) == ("sglang", "0.5.23", "m", 2)
    assert (status.weight_version, status.paused, status.reason) == ("1", False, "")
