"""Actors that are lost, refuse or end: nothing is, and each sample is delivered once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from rolloutsync.clock import Clock, Deadline
from rolloutsync.crew import Crew
from rolloutsync.errors import ClientClosedError, DeadlineExceededError, EngineUnavailableError, RolloutError
from rolloutsync.gate import GateMode
from rolloutsync.remote import LinkDead, LinkLost
from rolloutsync.sample import Status
from tests.background import in_thread
from tests.fakes import FakeClock
from tests.fleet.script import ScriptedLink
from tests.fleet.scripted import URLS, ScriptedCrew, at, made
from tests.unit.makers import prompt
from tests.wire import eventually

MakeCrew = Callable[..., ScriptedCrew]


# --- losses ---


def test_so_many_actors_may_die_with_a_sample(make_crew: MakeCrew) -> None:
    link = ScriptedLink()
    kit = make_crew(links=[link], max_attempts=3)
    kit.orders(1)
    for life in range(1, 4):
        link.await_tasks(life)
        kit.lose(link)
        if life < 3:
            kit.rise(link)
    (sample,) = kit.await_done(1)
    assert sample.status is Status.FAILED
    assert "3 actors were lost with this sample, the last actor-0: actor-0 cannot be reached" in str(sample.error)


def test_an_actor_that_is_gone_for_good(make_crew: MakeCrew) -> None:
    """Its tasks and its engines go to the other."""
    kit = make_crew()
    kit.orders(8)
    eventually(lambda: [len(link.tasks) for link in kit.links] == [4, 4], "both have some")
    kit.lose(kit.links[0], LinkDead)
    kit.links[1].await_tasks(8)
    assert kit.links[1].changes == [([URLS[0]], [])]
    assert kit.lanes[1].urls == [URLS[1], URLS[0]]
    assert kit.links[0].kills == [False]
    assert "actor-0 on a script is gone" in kit.crew.lanes[0]


def test_an_actor_that_stays_away_is_given_up(make_crew: MakeCrew) -> None:
    kit = make_crew(actor_wait_s=50.0)
    kit.lose(kit.links[0])
    kit.tick(49.0)
    assert kit.lanes[0].state == "joining"
    kit.tick(2.0)
    eventually(lambda: kit.rested() or kit.lanes[0].state == "gone", "it is given up")


# --- bounces, and nobody there ---


def bounced() -> EngineUnavailableError:
    return EngineUnavailableError("no live engine within 5 s")


def test_an_actor_without_an_engine_is_not_the_last_word(make_crew: MakeCrew) -> None:
    """Another may have one; but not for ever."""
    kit = make_crew(max_attempts=3)
    (order,) = kit.orders(1)
    for number in range(3):
        eventually(lambda: any(link.tasks for link in kit.links), "somebody has it")
        link = next(link for link in kit.links if link.tasks)
        task = link.tasks.pop()
        other = kit.links[1 - kit.links.index(link)]
        link.say([made(task, Status.FAILED, error=bounced())], room=0)
        other.say(room=4)
        if number < 2:
            other.await_tasks(1)
            eventually(lambda: order.life.doing.value == "is at an actor", "it is sent on")
    (sample,) = kit.await_done(1)
    assert sample.status is Status.FAILED
    assert isinstance(sample.error, EngineUnavailableError)


# --- once each ---


def test_unknown_keys_and_second_reports_are_dropped(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink()])
    link = kit.links[0]
    kit.orders(2)
    one, two = link.await_tasks(2)
    link.say([made(one), made(one), (99, made(one)[1])], [at(two, URLS[0]), at(one, URLS[1])])
    link.say([made(one), made(two)])
    kit.await_done(2)
    assert [sample.status for sample in kit.await_done(2)] == [Status.COMPLETED] * 2
    assert kit.ledger.book()[:3] == (2, 2, 0)


def test_a_late_report_of_a_task_that_was_sent_anew(make_crew: MakeCrew) -> None:
    """The actor was only out of reach; what it says of the old key is nobody's."""
    kit = make_crew(links=[ScriptedLink()])
    link = kit.links[0]
    kit.orders(1)
    (old,) = link.await_tasks(1)
    kit.lose(link)
    kit.rise(link, link.incarnation)
    new = link.await_tasks(2)[1]
    assert new.key != old.key
    link.say([made(old, Status.FAILED)])
    link.say([made(new)])
    assert kit.await_done(1)[0].status is Status.COMPLETED


def test_tasks_that_did_not_arrive_go_elsewhere(make_crew: MakeCrew) -> None:
    kit = make_crew(max_attempts=3)
    kit.group(2)
    first = next(link for link in kit.links if link.tasks or link.await_tasks(2))
    first.await_tasks(2)
    first.failures[0](LinkLost("another incarnation"))
    eventually(lambda: sum(len(link.tasks) for link in kit.links) == 4, "they are sent again")
    assert not kit.done


# --- the end ---


def test_close_with_tasks_out(make_crew: MakeCrew) -> None:
    """What waits ends unsent, what an actor ends in time is delivered as it says, the rest ABORTED."""
    kit = make_crew(links=[ScriptedLink(room=1)])
    kit.orders(12)
    tasks = kit.links[0].await_tasks(9)
    kit.fleet.close()
    kit.crew.close()
    assert len(kit.await_done(3)) == 3
    kit.links[0].say([made(tasks[0])])
    assert kit.crew.join(Deadline.after(FakeClock(), None)) == []
    assert Counter(sample.status for sample in kit.await_done(12)) == {Status.ABORTED: 11, Status.COMPLETED: 1}
    assert kit.links[0].kills == [False]
    with pytest.raises(ClientClosedError):
        kit.orders(1)


def test_lend_blocks_until_the_sample_has_ended(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink()])
    lent = in_thread(lambda: kit.crew.lend(kit.order()))
    (task,) = kit.links[0].await_tasks(1)
    assert not lent.done()
    kit.links[0].say([made(task)])
    assert lent.result(5.0).status is Status.COMPLETED
    again = in_thread(lambda: kit.crew.lend(kit.order()))
    kit.links[0].await_tasks(2)
    kit.fleet.close()
    kit.crew.close()
    kit.crew.join(Deadline.after(FakeClock(), None))
    assert again.result(5.0).status is Status.ABORTED
    with pytest.raises(ClientClosedError):
        kit.crew.lend(kit.order())


# --- what is where ---


def test_a_task_may_be_anywhere_until_the_actor_says_where(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink()], shared=True)
    kit.orders(2)
    one, two = kit.links[0].await_tasks(2)
    assert [len(kit.crew.rids(url)) for url in URLS] == [2, 2]
    assert kit.fleet.rids(URLS[0]) == ["not known yet"] * 2
    kit.links[0].say(placed=[at(one, URLS[0], "a" * 32), at(two, URLS[1])])
    eventually(lambda: kit.crew.rids(URLS[0]) == ["a" * 32], "it is heard")
    assert kit.crew.in_flight() == {URLS[0]: 1, URLS[1]: 1}
    assert not kit.crew.await_none(URLS[0], 0.0)
    kit.links[0].say([made(one), made(two)])
    kit.await_done(2)
    assert kit.crew.await_none(URLS[0], 0.0)
    assert kit.crew.rids(URLS[1]) == []


def test_an_actor_that_does_not_follow_is_killed(make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutsync.actors._STAND_S", 0.05)
    kit = make_crew(clock=Clock())
    kit.links[0].stall()
    kit.fleet.close_gate(object(), GateMode.ABORT)
    assert kit.links[0].kills == [True]
    assert kit.links[1].kills == []


def test_jobs_are_aborted_where_they_are(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink(room=40), ScriptedLink("actor-1", room=40)])
    kit.group(2, job=1)
    kit.group(2, job=2)
    eventually(lambda: [len(link.tasks) for link in kit.links] == [2, 2], "each has a job")
    kit.crew.abort(lambda order: order.job == 1, 1.0)
    assert [link.aborted for link in kit.links if link.tasks[0].job == 1] == [[[1]]]
    assert [link.aborted for link in kit.links if link.tasks[0].job == 2] == [[]]


def test_sockets_are_cut_where_an_engine_is_used(make_crew: MakeCrew) -> None:
    kit = make_crew()
    kit.crew.cut(URLS[1])
    assert [link.cuts for link in kit.links] == [[], [URLS[1]]]


def test_errors_of_samples_are_delivered(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink()])
    kit.orders(1)
    (task,) = kit.links[0].await_tasks(1)
    kit.links[0].say([made(task, Status.FAILED, error=RolloutError("no"))])
    assert str(kit.await_done(1)[0].error) == "no"


def test_an_order_that_is_put_back_while_the_gate_reopens_drops_nobody_elses(
    make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A sees that the gate is closed. 2. It opens, B is admitted. 3. A drops what waits: not B."""
    link = ScriptedLink(up=False)
    kit = make_crew(links=[link])
    token = object()
    kit.fleet.close_gate(token, GateMode.ABORT)
    drop = kit.crew.drop

    def late(job: int | None = None) -> None:
        kit.fleet.open_gate(token)
        kit.orders(1, job=2)
        drop(job)

    monkeypatch.setattr(kit.crew, "drop", late)
    kit.orders(1, job=1)
    monkeypatch.undo()
    kit.fleet.open_gate(token)
    assert [sample.status for sample in kit.await_done(1)] == [Status.ABORTED]
    assert [each.job for each in kit.open()] in ([], [2])


def test_what_an_actor_is_lost_with_goes_first(make_crew: MakeCrew) -> None:
    """In its old order, before what has waited."""
    link = ScriptedLink(room=4)
    kit = make_crew(links=[link])
    orders = kit.orders(20)
    assert [task.index for task in link.await_tasks(12)] == [each.index for each in orders[:12]]
    link.say(placed=[at(link.tasks[0], URLS[0])])
    eventually(lambda: orders[0].life.engine == URLS[0], "it is heard")
    kit.lose(link)
    assert link.spoken_to[1] == link.incarnation
    link.tasks.clear()
    kit.rise(link)
    assert [task.index for task in link.await_tasks(12)] == [each.index for each in orders[:12]]


def test_close_while_actors_are_still_starting(make_crew: MakeCrew) -> None:
    """Nobody waits for them."""
    kit = make_crew(links=[ScriptedLink(up=False), ScriptedLink("actor-1")])
    kit.orders(1)
    kit.fleet.close()
    kit.crew.close()
    assert kit.crew.join(Deadline.after(FakeClock(), None)) == []
    assert set(kit.links[0].kills) == {False}


def test_a_gate_that_opens_after_the_end_asks_nobody(make_crew: MakeCrew) -> None:
    kit = make_crew(links=[ScriptedLink()])
    token = object()
    kit.fleet.close_gate(token, GateMode.HOLD)
    kit.fleet.close()
    kit.crew.close()
    count = len(kit.links[0].standings)
    kit.fleet.open_gate(token)
    assert len(kit.links[0].standings) == count


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("it holds a lock")


def test_what_does_not_pickle_fails_alone(make_crew: MakeCrew) -> None:
    """Metadata do not travel, so they may be anything."""
    link = ScriptedLink(up=False, room=16)
    kit = make_crew(links=[link])
    bad = kit.order(prompt=prompt(fields={"x": Unpicklable()}))
    kit.admit(kit.order(), bad, kit.order(), kit.order())
    link.rise()
    assert len(link.await_tasks(3)) == 3
    (sample,) = kit.await_done(1)
    assert kit.done[0][0] is bad
    assert "could not be sent to actor actor-0: TypeError: it holds a lock" in str(sample.error)


def test_what_does_not_unpickle_fails_alone(make_crew: MakeCrew) -> None:
    """The actor says so later, of all that were in the message; the others are sent alone."""
    link = ScriptedLink(up=False, room=16)
    kit = make_crew(links=[link])
    bad = kit.order()
    kit.admit(kit.order(), bad, kit.order())
    link.rise()
    link.await_tasks(3)
    link.failures[0](ImportError("no module named mine"))
    link.await_tasks(6)
    assert link.parcels == [3, 1, 1, 1]
    link.failures[2](ImportError("no module named mine"))
    (sample,) = kit.await_done(1)
    assert kit.done[0][0] is bad
    assert "ImportError: no module named mine" in str(sample.error)
    link.say([made(task) for task in link.tasks[3:]])
    assert len(kit.await_done(3)) == 3


def test_a_gate_that_closed_twice_at_once_holds_when_either_call_returns(make_crew: MakeCrew) -> None:
    """1. A makes a standing. 2. B makes and sends a newer one. 3. A sees that it is old: it must still hold."""
    link = ScriptedLink()
    kit = make_crew(links=[link])
    link.stall()
    with kit.fleet._lock:
        kit.fleet._gate.close(object(), GateMode.HOLD)
    older = kit.fleet.standing()
    newer = kit.fleet.standing()
    kit.crew.stand(newer, wait=False)
    late = in_thread(lambda: kit.crew.stand(older, wait=True))
    eventually(lambda: len(link.standings) == 3, "it is asked again")
    assert not late.done()
    assert link.standings[-1].number == newer.number
    link.acknowledge()
    late.result(5.0)


def test_nobody_gets_a_task_before_it_knows_that_the_gate_is_open(make_crew: MakeCrew) -> None:
    """1. The gate opens here. 2. An order comes. 3. An actor whose gate is still closed would end it ABORTED."""
    link = ScriptedLink()
    kit = make_crew(links=[link])
    token = object()
    kit.fleet.close_gate(token, GateMode.ABORT)
    link.stall()
    opening = in_thread(lambda: kit.fleet.open_gate(token))
    eventually(lambda: link.standings[-1].mode == "open", "it is told")
    kit.orders(1)
    kit.look()
    assert not link.tasks
    link.acknowledge()
    opening.result(5.0)
    link.await_tasks(1)


def test_an_actor_that_is_out_of_reach_when_the_gate_closes_is_killed(make_crew: MakeCrew) -> None:
    """Its process may live on and send what it has been given: nobody can tell it to stop."""
    kit = make_crew()
    kit.lose(kit.links[0])
    kit.fleet.close_gate(object(), GateMode.ABORT)
    assert kit.links[0].kills == [True]
    kit.fleet.close_gate(object(), GateMode.ABORT)
    assert kit.links[0].kills == [True]
    assert kit.links[1].kills == []


def test_a_new_process_learns_its_engines_again(make_crew: MakeCrew) -> None:
    """It begins with what its constructor was told: engines that it was given since are named again."""
    kit = make_crew()
    kit.crew.join_engine("http://127.0.0.1:3", "")
    kit.crew.leave_engine(URLS[0])
    link = kit.links[0]
    assert link.changes == [(["http://127.0.0.1:3"], []), ([], [URLS[0]])]
    kit.lose(link)
    link.changes.clear()
    kit.rise(link)
    assert link.changes == [(["http://127.0.0.1:3"], [URLS[0]])]
    assert kit.links[1].changes == []


def test_where_a_task_was_is_not_where_it_is(make_crew: MakeCrew) -> None:
    """1. It is at one engine. 2. It moves to another. 3. The gate closes. 4. Only then the driver hears of the move."""
    kit = make_crew(links=[ScriptedLink()], shared=True)
    link, token = kit.links[0], object()
    kit.orders(1)
    (task,) = link.await_tasks(1)
    link.say(placed=[at(task, URLS[0])])
    eventually(lambda: kit.crew.rids(URLS[1]) == [], "it is at the first")
    kit.fleet.close_gate(token, GateMode.ABORT)
    assert len(kit.crew.rids(URLS[1])) == 1
    link.say(placed=[at(task, URLS[1])])
    eventually(lambda: kit.crew.rids(URLS[0]) == [], "it is at the second")
    assert len(kit.crew.rids(URLS[1])) == 1
    kit.fleet.open_gate(token)


def test_time_is_up_for_what_nobody_can_take(make_crew: MakeCrew) -> None:
    """A call's timeout holds while all actors are away, too."""
    kit = make_crew(links=[ScriptedLink(up=False)], engine_wait_s=60.0)
    kit.orders(1, deadline=Deadline.after(kit.active, 5.0))
    kit.orders(1)
    kit.look()
    kit.look(4.0)
    assert not kit.done
    kit.look(2.0)
    (sample,) = kit.await_done(1)
    assert isinstance(sample.error, DeadlineExceededError)
    assert len(kit.open()) == 1


def test_nobody_has_an_engine(make_crew: MakeCrew) -> None:
    """Not at once: after ``engine_wait_s`` of active time; the error names the actors."""
    kit = make_crew(links=[ScriptedLink("actor-0", room=0), ScriptedLink("actor-1", room=0)], engine_wait_s=10.0)
    assert isinstance(kit.clock, FakeClock)
    kit.lose(kit.links[1])
    kit.orders(2)
    kit.look()
    kit.look(9.0)
    assert not kit.done
    token = object()
    kit.fleet.close_gate(token, GateMode.HOLD)
    kit.look(100.0)
    assert not kit.done
    kit.fleet.open_gate(token)
    kit.look(2.0)
    for sample in kit.await_done(2):
        assert isinstance(sample.error, EngineUnavailableError)
        assert "no actor with a live engine within 10 s" in str(sample.error)
        assert "actor-0 on a script is up, 0 tasks, room for 0; actor-1 on a script is" in str(sample.error)


def test_an_actor_that_starts_may_have_an_engine(make_crew: MakeCrew) -> None:
    """It is waited for as long as it may take to start."""
    kit = make_crew(links=[ScriptedLink("actor-0", room=0), ScriptedLink("actor-1", up=False)], engine_wait_s=10.0)
    kit.orders(2)
    kit.look()
    kit.look(60.0)
    assert not kit.done
    kit.links[1].rise()
    kit.links[1].say([made(task) for task in kit.links[1].await_tasks(2)])
    kit.await_done(2)


def test_engines_that_died_with_a_sample_are_not_forgotten(make_crew: MakeCrew) -> None:
    """1. An actor loses its last engine with a task on it. 2. Another actor gets the task, and is told."""
    kit = make_crew(links=[ScriptedLink()])
    (link,) = kit.links
    kit.orders(1)
    (task,) = link.await_tasks(1)
    assert task.died_on == ()
    gone = made(task, Status.FAILED, error=EngineUnavailableError("none"))
    link.say([gone], died_on={task.key: (URLS[0],)})
    (_, again) = link.await_tasks(2)
    assert again.died_on == (URLS[0],)


def test_an_actor_that_does_not_take_is_lost_once(make_crew: MakeCrew) -> None:
    """1. It is gone. 2. Tasks come back at once. 3. Only then its reports end: that was one loss, not dozens."""
    link = ScriptedLink()
    kit = make_crew(links=[link], max_attempts=2)
    kit.orders(1)
    for number in range(5):
        link.await_tasks(number + 1)
        link.failures[number](LinkLost("unreachable"))
        kit.look()
        assert len(link.tasks) == number + 1
        kit.look(1.0)
    link.await_tasks(6)
    kit.lose(link)
    kit.rise(link)
    assert not kit.done
    link.await_tasks(7)
    kit.lose(link)
    (sample,) = kit.await_done(1)
    assert "2 actors were lost with this sample" in str(sample.error)


def test_an_end_between_the_dispatchers_looks(make_crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. It sees that nothing is closed. 2. The crew closes and wakes it. 3. It must not go to sleep."""
    kit = make_crew(links=[ScriptedLink()])
    armed = threading.Event()

    def seen(crew: Crew) -> bool:
        closed = crew._closed
        if armed.is_set() and threading.current_thread() is crew._dispatcher:
            crew.close()
        return closed

    monkeypatch.setattr(Crew, "is_closed", property(seen))
    kit.orders(1)
    kit.links[0].await_tasks(1)
    armed.set()
    kit.crew.grow()
    eventually(lambda: kit.crew._closed, "it is closed")
    kit.fleet.close()
    assert kit.crew.join(Deadline.after(Clock(), 2.0)) == []
