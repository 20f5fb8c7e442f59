"""Orders: how they are called off, and ids that no other id begins with."""

from __future__ import annotations

import re

from rolloutsync.order import Group, Stop, new_rid

from .makers import order


def test_any_stop_calls_an_order_off() -> None:
    """Its job's or another one."""
    job, other = Stop(), Stop()
    one, two = order(stops=(job, other)), order(stops=(job,))
    assert not one.stopped
    other.set()
    assert (one.stopped, two.stopped) == (True, False)
    job.set()
    assert two.stopped


def test_ids_are_of_one_length_and_never_twice() -> None:
    """SGLang aborts every id that begins with the one named: none may be the beginning of another."""
    rids = {new_rid() for _ in range(1000)}
    assert len(rids) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", rid) for rid in rids)


def test_a_group_has_no_home_at_first() -> None:
    """It is where the first member goes."""
    group = Group(8)
    assert (group.size, group.home, group.rank) == (8, None, None)
