"""The crew: who gets which order, and that each is delivered exactly once, whatever happens to actors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync.gate import GateMode
from rolloutsync.lane import Lane, choose_lane
from rolloutsync.order import Group, Stop
from rolloutsync.sample import Status
from tests.fleet.script import ScriptedLink
from tests.fleet.scripted import ScriptedCrew, made
from tests.wire import eventually

MakeCrew = Callable[..., ScriptedCrew]


# --- who gets what ---


def test_orders_go_where_the_load_is_lowest(make_crew: MakeCrew) -> None:
    """For each that its engines take at once: an actor with four times the room gets four times as much."""
    small, large = ScriptedLink("actor-0", room=10), ScriptedLink("actor-1", room=40)
    kit = make_crew(links=[small, large])
    kit.orders(50)
    eventually(lambda: len(small.tasks) + len(large.tasks) == 50, "all are handed out")
    assert (len(small.tasks), len(large.tasks)) == (10, 40)


def test_members_of_a_group_stay_together(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink("actor-0", room=16), ScriptedLink("actor-1", room=16)])
    for index in range(6):
        kit.group(4, index=index)
    eventually(lambda: sum(len(link.tasks) for link in kit.links) == 24, "all are handed out")
    homes = [{task.group for task in link.tasks} for link in kit.links]
    assert not homes[0] & homes[1]
    assert [len(home) for home in homes] == [3, 3]
    numbers = {task.group: task.size for link in kit.links for task in link.tasks}
    assert set(numbers.values()) == {4}


def test_a_group_moves_if_its_home_is_full(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink("actor-0", room=1), ScriptedLink("actor-1", room=1)])
    kit.group(18)  # nine each: one, and eight ahead
    eventually(lambda: [len(link.tasks) for link in kit.links] == [9, 9], "both are full")


def test_what_is_sticky_stays_at_its_home(make_crew: MakeCrew) -> None:
    """Even where that has no room, while it is up; it moves when its home is lost."""
    kit = make_crew(links=[ScriptedLink("actor-0", room=1), ScriptedLink("actor-1", room=40)])
    home = Group(1, sticky=True)
    home.home = "actor-0"
    kit.admit(*[kit.order(group=home) for _ in range(12)])
    assert {task.sticky for task in kit.links[0].await_tasks(12)} == {True}
    kit.lose(kit.links[0])
    kit.links[1].await_tasks(12)
    assert home.home == "actor-1"


def test_priority_first_then_jobs_in_turn(make_crew: MakeCrew) -> None:
    link = ScriptedLink(room=64, up=False)
    kit = make_crew(links=[link])
    kit.orders(3, job=1)
    kit.orders(3, job=2)
    kit.orders(2, job=3, priority=5)
    link.rise()
    assert [task.job for task in link.await_tasks(8)] == [3, 3, 1, 2, 1, 2, 1, 2]


def test_room_is_respected(make_crew: MakeCrew) -> None:
    """An actor has its room and a few more; the next comes when one has ended, or there is more room."""
    link = ScriptedLink(room=80)
    kit = make_crew(links=[link])
    kit.orders(200)
    link.await_tasks(90)
    link.say([made(link.tasks[0])])
    link.await_tasks(91)
    link.say(room=160)
    link.await_tasks(181)
    kit.await_done(1)
    assert len(link.tasks) == 181
    link.say([made(task) for task in link.tasks[1:181]], room=0)
    kit.await_done(181)
    assert len(link.tasks) == 181


def test_a_lane_without_room_gets_nothing() -> None:
    lanes = [Lane(ScriptedLink("a")), Lane(ScriptedLink("b"))]
    assert choose_lane(lanes, Group(1)) is None
    assert lanes[0].free == 0
    assert "a is joining, 0 tasks, room for 0" in str(lanes[0])


# --- what is called off ---


def test_what_is_called_off_is_never_sent(make_crew: MakeCrew) -> None:
    link = ScriptedLink(up=False)
    kit = make_crew(links=[link])
    stop = Stop()
    kit.orders(2, stops=(stop,))
    stop.set()
    kit.orders(1)
    link.rise()
    link.await_tasks(1)
    assert [sample.status for sample in kit.await_done(2)] == [Status.ABORTED, Status.ABORTED]
    assert len(link.tasks) == 1


def test_a_drain_ends_what_waits_and_a_hold_keeps_it(make_crew: MakeCrew) -> None:
    link = ScriptedLink()
    kit = make_crew(links=[link])
    token = object()
    kit.fleet.close_gate(token, GateMode.HOLD)
    kit.orders(2)
    kit.fleet.open_gate(token)
    link.await_tasks(2)
    kit.fleet.close_gate(token, GateMode.ABORT)
    kit.orders(2)
    assert [sample.status for sample in kit.await_done(2)] == [Status.ABORTED, Status.ABORTED]
    kit.fleet.open_gate(token)
    assert [s.mode for s in link.standings] == ["open", "hold", "open", "abort", "open"]
    assert [s.closings for s in link.standings] == [0, 0, 0, 1, 1]
    kit.orders(1)
    assert {task.closings for task in link.await_tasks(3)[:2]} == {0}
    assert link.tasks[2].closings == 1


@pytest.mark.parametrize("shared", [True, False])
def test_what_another_actor_has_aborted_is_made_anew(make_crew: MakeCrew, shared: bool) -> None:
    """By one that shares the engine, to prove it idle. What this fleet has aborted is a result."""
    kit = make_crew(links=[ScriptedLink()], shared=shared)
    link = kit.links[0]
    kit.orders(1)
    link.say([made(task, Status.ABORTED) for task in link.await_tasks(1)])
    if shared:
        (_, again) = link.await_tasks(2)
        token = object()
        kit.fleet.close_gate(token, GateMode.HOLD, cuts=True)
        link.say([made(again, Status.ABORTED)])
        kit.await_done(1)
        kit.fleet.open_gate(token)
    assert [sample.status for sample in kit.await_done(1)] == [Status.ABORTED]
