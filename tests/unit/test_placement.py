"""Placement: where a request goes, and who may take the next free place."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

from rolloutsync.dialects.base import Facts
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.engine import Engine
from rolloutsync.order import Group, Order
from rolloutsync.placement import choose, leave_line, line_up, take
from rolloutsync.slot import EngineState, Lease, Slot

from .makers import order

_LOCK = threading.RLock()


def _slots(count: int = 2, limit: int = 2, **facts: Any) -> dict[str, Slot]:
    engines = [SimpleNamespace(url=f"http://{n}", facts=Facts(**facts), dialect=SGLangDialect()) for n in range(count)]
    return {engine.url: Slot(cast("Engine", engine), limit, EngineState.LIVE) for engine in engines}


def _turn(group: Group | None = None) -> Order:
    return order(group=group or Group(1, sticky=True))


def _place(slots: dict[str, Slot], one: Order, avoid: str | None = None) -> Lease | None:
    """As the fleet does: a lease, or a place in the line."""
    slot = choose(slots, one, avoid, 0.0)
    if slot is None:
        line_up(slots, one, _LOCK)
        return None
    lease = take(slots, slot, one, "r", 0.0)
    leave_line(slots, one)
    return lease


def _home(slots: dict[str, Slot], one: Order) -> str | None:
    _place(slots, one)
    return one.group.home


def test_homes_are_spread_by_size() -> None:
    """An engine with three times the room gets three times the homes, however busy either is."""
    slots = _slots()
    slots["http://1"].limit = 6
    turns = [_turn() for _ in range(8)]
    homes = [_home(slots, one) for one in turns]
    assert (homes.count("http://0"), homes.count("http://1")) == (2, 6)


def test_a_home_is_given_up_with_its_group() -> None:
    """An episode that has ended does not count."""
    slots = _slots()
    lease = _place(slots, _turn())
    assert lease is not None
    assert len(lease.slot.homes) == 1
    lease.slot.give_back(lease)
    del lease
    gc.collect()
    assert [len(slot.homes) for slot in slots.values()] == [0, 0]


def test_a_full_home_is_waited_for() -> None:
    """Though the other engine is free; who came first goes first, also before one that comes just now."""
    slots = _slots(limit=1)
    home, group = slots["http://0"], Group(1, sticky=True)
    lease = _place(slots, _turn(group))
    first, second = _turn(group), _turn(group)
    assert _place(slots, first) is _place(slots, second) is None
    assert lease is not None
    home.give_back(lease)
    assert _place(slots, _turn(group)) is None
    assert _place(slots, second) is None
    assert _place(slots, first) is not None
    assert next(iter(home.line)) is second


def test_places_are_taken_by_turns() -> None:
    """Line and others: neither waits for more than one of the other kind."""
    slots = _slots(count=1, limit=1)
    (slot,) = slots.values()
    lease = _place(slots, order())
    waiting = [_turn() for _ in range(3)]
    assert [_place(slots, one) for one in waiting] == [None] * 3
    kinds = []
    for _ in range(5):
        assert lease is not None
        slot.give_back(lease)
        lease = _place(slots, order()) or _place(slots, next(iter(slot.line)))
        assert lease is not None
        kinds.append(lease.order.group.sticky)
    assert kinds == [True, False, True, False, True]


def test_others_get_what_the_line_cannot_use() -> None:
    """Three free places, one in the line: two are left for others, even right after one of them."""
    slots = _slots(count=1, limit=4)
    (slot,) = slots.values()
    assert _place(slots, order()) is not None
    line_up(slots, held := _turn(), _LOCK)  # it has no home yet, so it is in no line
    assert not slot.line
    assert choose(slots, held, None, 0.0) is slot
    line_up(slots, held, _LOCK)
    assert [_place(slots, order()) is not None for _ in range(3)] == [True, True, False]
    assert _place(slots, held) is not None


def test_a_home_that_is_gone_or_refused_is_left() -> None:
    """And the line there; the new home is kept."""
    slots = _slots(limit=1)
    group = Group(1, sticky=True)
    first = _place(slots, _turn(group))
    waiting = _turn(group)
    assert _place(slots, waiting) is None
    slots["http://0"].state = EngineState.DOWN
    moved = _place(slots, waiting)
    assert first is not None
    assert moved is not None
    assert (moved.engine.url, group.home) == ("http://1", "http://1")
    assert (len(first.slot.line), len(first.slot.homes)) == (0, 0)
    slots["http://0"].state = EngineState.LIVE
    first.slot.give_back(first)
    moved.slot.give_back(moved)
    assert _home(slots, _turn(group)) == "http://1"
    refused = _place(slots, _turn(group), avoid="http://1")
    assert refused is not None
    assert (refused.engine.url, group.home) == ("http://0", "http://0")


def test_a_suspect_goes_where_it_is_the_only_one() -> None:
    """Sticky or not; its group lives there from then on."""
    slots = _slots()
    group = Group(1, sticky=True)
    suspect, other = _turn(group), order()
    suspect.life.died_on = other.life.died_on = ("http://9",)
    assert _place(slots, other) is not None
    lease = _place(slots, suspect)
    assert lease is not None
    assert (lease.engine.url, group.home) == ("http://1", "http://1")


def test_ranks_are_homes_too() -> None:
    """Episodes are spread over the ranks by number, though none has a request there at the moment."""
    slots = _slots(count=1, limit=8, dp_size=4)
    turns = [_turn() for _ in range(8)]
    for one in turns:
        lease = _place(slots, one)
        assert lease is not None
        lease.slot.give_back(lease)
        assert lease.dp_rank == one.group.rank
    assert sorted(one.group.rank or 0 for one in turns) == [0, 0, 1, 1, 2, 2, 3, 3]
