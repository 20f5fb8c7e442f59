"""Which engine a request goes to. Pure: decides over slots that the fleet's lock guards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rolloutsync.order import Order
    from rolloutsync.slot import Lease, Slot


def choose(slots: Mapping[str, Slot], order: Order, avoid: str | None, now: float) -> Slot | None:
    """The live engine with room and the fewest in flight; the group's home while that is within n of the fewest.

    A suspect gets an engine on which it is the only one.
    """
    suspect = bool(order.life.died_on)
    free = [slot for slot in slots.values() if slot.has_room and not (suspect and slot.watches_suspect(now))]
    free = [slot for slot in free if slot.engine.url != avoid] or free
    if not free:
        return None
    quietest = min(free, key=_in_flight)
    home = slots.get(order.group.home or "")
    if home in free and home is not None and home.in_flight - quietest.in_flight <= order.group.size:
        return home
    return quietest


def take(slots: Mapping[str, Slot], slot: Slot, order: Order, rid: str, now: float) -> Lease:
    """Count the request there. A group without a live home gets this one; its members share a DP rank there."""
    group, url = order.group, slot.engine.url
    home = slots.get(group.home or "")
    if home is None or not home.is_live:
        group.home, group.rank = url, slot.quietest_rank()
    rank = group.rank if group.home == url else slot.quietest_rank()
    if {"routed_dp_rank", "data_parallel_rank"} & order.prompt.fields.keys():
        rank = None  # the user chose one
    return slot.take(order, rid, rank, now)


def _in_flight(slot: Slot) -> int:
    return slot.in_flight
