"""The driver of a fleet, with scripted actors and engines: what it proves, tells and counts."""

from __future__ import annotations

from rolloutsync.sample import Status
from tests.background import in_thread
from tests.client.kit import ScriptedEngine
from tests.fleet.conftest import MakeFleet
from tests.fleet.driver import MakeLink
from tests.fleet.links import ScriptedLink
from tests.fleet.scripted import at, made
from tests.wire import eventually


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
