"""Which engine a request goes to. Decides over slots and groups that the fleet's lock guards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rolloutsync.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rolloutsync.order import Order
    from rolloutsync.slot import Lease, Slot


def choose(slots: Mapping[str, Slot], order: Order, avoid: str | None, now: float, suspects: int = 0) -> Slot | None:
    """The live engine with room and the fewest in flight; the group's home while that is within n of the fewest.

    What is sticky goes home, and gets None while there is no room. A suspect gets an engine on which it is the only
    one. What has just failed on ``avoid`` goes there again only where no other engine is live: one that fails at once
    always has room, so that full ones are waited for.
    """
    suspect = bool(order.life.died_on)
    if order.group.sticky and not suspect:
        home = _settle(slots, order, avoid)
        return home if home is not None and home.has_room_for(order) else None
    avoided = slots.get(avoid) if avoid is not None else None
    quietest: Slot | None = None
    fewest = others = 0
    for slot in slots.values():  # for each request: one loop over the engines, and as little as possible in it
        if slot is avoided or not slot.is_live:
            continue
        others += 1
        held = len(slot.leases)
        if (quietest is None or held < fewest) and _is_free(slot, held, suspect, now, suspects):
            quietest, fewest = slot, held
    if avoided is not None and not others and _is_free(avoided, len(avoided.leases), suspect, now, suspects):
        return avoided if avoided.is_live else None
    home = slots.get(order.group.home or "")
    if quietest is None or home is quietest or home is None or not home.is_live or home is avoided:
        return quietest
    near = home.in_flight - fewest <= order.group.size
    return home if near and _is_free(home, home.in_flight, suspect, now, suspects) else quietest


def _is_free(slot: Slot, held: int, suspect: bool, now: float, suspects: int) -> bool:
    """Whether a live slot that has so many requests takes one more that is not of its line.

    Line and others take places by turns where there are too few, so that neither starves.
    """
    room = held + len(slot.line) < slot.room if slot.debt else held < slot.room
    return room and not (suspect and slot.watches_suspect(now, suspects))


def take(slots: Mapping[str, Slot], slot: Slot, order: Order, rid: str, now: float) -> Lease:
    """Count the request there. A group without a live home gets this one; its members share a DP rank there."""
    group, url = order.group, slot.engine.url
    home = slots.get(group.home or "")
    if group.sticky:
        _move(order, home, slot)
    elif home is None or not home.is_live:
        group.home, group.rank = url, slot.quietest_rank()
    rank = group.rank if group.home == url else slot.quietest_rank()
    if rank is not None and {"routed_dp_rank", "data_parallel_rank"} & order.prompt.fields.keys():
        rank = None  # the user chose one
    return slot.take(order, rid, rank, now)


def none_live(slots: Mapping[str, Slot], waited_s: float) -> EngineUnavailableError:
    """The error that names each engine and why it is not live."""
    known = [f"{url}: {slot.state}, {slot.reason or 'no answer yet'}" for url, slot in slots.items()]
    reasons = "; ".join(known) or "the client has no engines"
    return EngineUnavailableError(f"no live engine within {waited_s:g} s: {reasons}")


# --- what is sticky ---------------------------------------------------------------------------------------------------


def _settle(slots: Mapping[str, Slot], order: Order, avoid: str | None) -> Slot | None:
    """The order's home, while it is live and has not just refused it; else the live engine with the fewest homes.

    That is for its size. Homes are counted, not requests: episodes that are busy with their tools will be back.
    """
    home = slots.get(order.group.home or "")
    if home is not None and home.is_live and home.engine.url != avoid:
        return home
    live = [slot for slot in slots.values() if slot.is_live]
    live = [slot for slot in live if slot.engine.url != avoid] or live
    best = min(live, key=lambda slot: (len(slot.homes) / slot.room, slot.in_flight), default=None)
    if best is not None:
        _move(order, home, best)
    return best


def _move(order: Order, before: Slot | None, slot: Slot) -> None:
    """Make a slot the home of a sticky order's group, with the rank that has the fewest homes there."""
    group = order.group
    if before is slot:
        return
    if before is not None:
        before.homes.discard(group)
        before.line.pop(order, None)
    group.home, group.rank = slot.engine.url, slot.home_rank()
    slot.homes.add(group)


def line_up(slots: Mapping[str, Slot], order: Order, lock: threading.RLock) -> threading.Condition | None:
    """What a sticky order waits on for room at its home, where it joins the line; None for any other order."""
    home = slots.get(order.group.home or "") if order.group.sticky and not order.life.died_on else None
    if home is None:
        return None
    if order not in home.line:
        leave_line(slots, order)
    return home.line.setdefault(order, threading.Condition(lock))


def leave_line(slots: Mapping[str, Slot], order: Order) -> None:
    """The order waits no more, for whatever reason."""
    for slot in slots.values() if order.group.sticky else ():
        if slot.line.pop(order, None) is not None and slot.has_room:
            call_next(slot)


def call_next(slot: Slot) -> None:
    """Wake whoever has waited longest in a slot's line."""
    for called in slot.line.values():
        called.notify()
        return


def call_all(slots: Mapping[str, Slot]) -> None:
    """Wake everybody in every line."""
    for slot in slots.values():
        for called in slot.line.values():
            called.notify()
