"""The driver of a fleet, with scripted actors and engines: what it proves, tells and counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync.remote import Standing
from rolloutsync.sample import Status
from rolloutsync.slot import EngineState
from tests.background import in_thread
from tests.client.kit import ScriptedEngine
from tests.client.weightkit import WeightEngine
from tests.fleet.conftest import MakeFleet
from tests.fleet.driver import MakeLink
from tests.fleet.script import ScriptedLink
from tests.fleet.scripted import at, made
from tests.wire import answer, eventually

pytestmark = pytest.mark.slow


def scripted_links(room: int = 8) -> MakeLink:
    return lambda number, urls, sharers: ScriptedLink(f"actor-{number}", room=room)


def test_an_engine_that_is_removed_is_a_member_until_its_last_request_has_ended(make_fleet: MakeFleet) -> None:
    """A drain that comes meanwhile ends those, too; what is sent after the removal is not there."""
    with ScriptedEngine() as one, ScriptedEngine() as two:
        fleet = make_fleet([one.url, two.url], make=scripted_links(), actors=1)
        job = fleet.start([[5]])
        fleet.engines()
        (link,) = fleet.links
        (task,) = link.await_tasks(1)
        link.say(placed=[at(task, one.url)])
        eventually(lambda: fleet.crew.rids(two.url) == [], "it is at the first")
        fleet.remove_engine(one.url)
        assert [str(status.state) for status in fleet.engines()] == ["leaving", "live"]
        later = fleet.start([[6]])
        link.await_tasks(2)
        drain = in_thread(lambda: fleet.abort_until_idle(0.3, raise_on_timeout=False))
        report = drain.result(5.0)
        assert {each.url: bool(each.rids) for each in report.engines} == {one.url: True, two.url: True}
        assert one.url in link.cuts
        link.say([made(each, Status.ABORTED) for each in link.tasks])
        assert [sample.status for sample in [*job.result(), *later.result()]] == [Status.ABORTED] * 2
        assert [status.url for status in fleet.engines()] == [two.url]
        assert fleet.abort_until_idle(5.0).idle


def test_a_verb_tells_actors_only_what_is_new(make_fleet: MakeFleet) -> None:
    """A thousand submits are no thousand round trips to every actor."""
    with ScriptedEngine() as one:
        fleet = make_fleet([one.url], make=scripted_links(), actors=1)
        fleet.engines()
        fleet.start([[5]])
        (link,) = fleet.links
        link.await_tasks(1)
        told = len(link.standings)
        link.stall()
        for number in range(20):
            fleet.submit([6 + number])
        assert len(link.standings) == told
        link.acknowledge()
        fleet.engine_fleet.set_paused(one.url, True)
        eventually(lambda: link.standings[-1].paused == {one.url}, "it is told")


def test_weights_are_told_before_anything_goes_on(make_fleet: MakeFleet) -> None:
    """An actor that learned them later would take the first answer with them for that of a stale engine."""
    order: list[str] = []
    told = {"/continue_generation": [lambda _: order.append("continue"), answer(b"{}")]}
    with WeightEngine(others=told) as one:
        fleet = make_fleet([one.url], make=scripted_links(), actors=1)
        fleet.start([[5]])
        (link,) = fleet.links
        link.await_tasks(1)
        stand = link.stand

        def noted(standing: Standing) -> Callable[[float], None]:
            order.append(f"{standing.mode} {standing.expected}")
            held: Callable[[float], None] = stand(standing)
            return held

        link.stand = noted
        fleet.update_weights_from_disk("/w", version="7", mode="hold")
        assert order[: order.index("continue")][-1] == "hold 7"
        assert order[-1] == "open 7"


def test_an_engine_that_is_back_is_not_swept_under_the_actors(make_fleet: MakeFleet) -> None:
    """1. It was stale. 2. It has the weights. 3. An actor proves it idle and uses it. 4. The driver must not abort."""
    with WeightEngine() as one:
        fleet = make_fleet([one.url], make=scripted_links(), actors=1)
        fleet.update_weights_from_disk("/w", version="7")
        (link,) = fleet.links
        fleet.start([[5]])
        (task,) = link.await_tasks(1)
        link.say(placed=[at(task, one.url)])
        fleet.engine_fleet.set_state(one.url, EngineState.QUARANTINED, "stale: it failed")
        eventually(lambda: fleet.engines()[0].state == "live", "it is back")
        assert one.bodies("/abort_request") == []


def test_an_orphan_is_told_to_end_before_its_engine_is_live_again(make_fleet: MakeFleet) -> None:
    with ScriptedEngine() as one:
        fleet = make_fleet([one.url], make=scripted_links(), actors=1)
        fleet.engine_fleet.add(fleet.core.fleet.engines()[0])
        fleet.core.ready()
        fleet.engine_fleet.note_orphan(one.url, "a" * 32)
        fleet.engine_fleet.set_state(one.url, EngineState.DOWN, "it was away")
        eventually(lambda: fleet.engines()[0].state == "live", "it is back")
        assert one.aborted() == ["a" * 32]
        assert fleet.audit().orphans == ()
