"""Engines in Ray actors: they come back, are admitted with current weights alone, and end with the actor."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rolloutsync import EngineLaunchError, EngineState, RolloutClient, Status
from tests.processes import alive, await_true
from tests.ray.conftest import OPTIONS

pytestmark = pytest.mark.ray

SIM = ["--config-json", json.dumps({"health_poll_s": 0.01, "tokens_per_second": 500.0})]
CLIENT: dict[str, Any] = {name: OPTIONS[name] for name in ("retry", "timeouts")}

MakeEngine = Callable[..., Any]


@pytest.fixture
def make_engine(cluster: ModuleType, tmp_path: Path) -> Iterator[MakeEngine]:
    """Starts engine actors with simulated engines; after the test they are killed, and their engines awaited."""
    from rolloutsync.ray_engine import EngineActor

    made: list[Any] = []

    def make(kind: str = "sim", options: dict[str, Any] | None = None, **arguments: Any) -> Any:
        arguments = {"args": SIM, "model": "ckpt/0", "backoff_s": 0.05, **arguments}
        arguments.setdefault("log", str(tmp_path / f"engine-{len(made)}.log"))
        made.append(EngineActor.options(num_cpus=0, **(options or {})).remote(kind, **arguments))
        return made[-1]

    yield make
    for actor in made:
        cluster.kill(actor)
    await_true(lambda: not _of(tmp_path), lambda: f"the end of {_of(tmp_path)}")


def _of(folder: Path) -> list[int]:
    """Engines and guards that write to a log in this folder."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if each.name.isdigit() and str(folder) in str((each / "fd" / "1").readlink()):
                found.append(int(each.name))
        except OSError:
            continue
    return found


def state(client: RolloutClient) -> dict[str, EngineState]:
    return {status.url: status.state for status in client.engines()}


def await_live(client: RolloutClient, url: str) -> None:
    await_true(lambda: state(client).get(url) is EngineState.LIVE, lambda: f"{url} to be live: {client.engines()}")


def kill_engine(ray: ModuleType, actor: Any) -> None:
    """Kills the engine process and waits until the actor has it back."""
    before = ray.get(actor.state.remote())
    os.kill(before.pid, signal.SIGKILL)

    def back() -> bool:
        now = ray.get(actor.state.remote())
        return bool(now.state == "serving" and now.pid != before.pid)

    await_true(back, "the restart")


def generate(client: RolloutClient) -> list[str]:
    """The weights that produced each sample."""
    samples = client.generate([[1, 2, 3]] * 4, {"max_new_tokens": 4, "ignore_eos": True}, timeout=30.0)
    assert [sample.status for sample in samples] == [Status.TRUNCATED] * 4, samples
    return [str(sample.weight_spans[0].version) for sample in samples]


def test_an_engine_in_an_actor(cluster: ModuleType, make_engine: MakeEngine, tmp_path: Path) -> None:
    """It serves, says where and how, and ends when told to."""
    actor = make_engine(weight_version="0")
    url = cluster.get(actor.url.remote(), timeout=30)
    look = cluster.get(actor.state.remote())
    assert (look.url, look.state, look.model, look.version, look.error) == (url, "serving", "ckpt/0", "0", "")
    assert cluster.get(actor.pid.remote()) == look.pid
    assert f'"pid": {look.pid}' in cluster.get(actor.log_tail.remote(5))
    with RolloutClient(url, **CLIENT) as client:
        assert generate(client) == ["0"] * 4
    cluster.get(actor.stop.remote(), timeout=30)
    assert not alive(look.pid)
    assert cluster.get(actor.state.remote()).state == "stopped"
    with pytest.raises(EngineLaunchError, match="sim was stopped"):
        cluster.get(actor.url.remote())


def test_one_that_does_not_start(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """The driver sees the end of the engine's log."""
    actor = make_engine(args=["--nonsense"])
    with pytest.raises(EngineLaunchError, match="unrecognized arguments: --nonsense"):
        cluster.get(actor.url.remote(), timeout=30)
    assert cluster.get(actor.state.remote()).state == "failed"


def test_a_wrong_argument(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """Ray's error has our words in it."""
    with pytest.raises(cluster.exceptions.ActorDiedError, match="kind must be one of sglang, vllm, sim, got 'nothing'"):
        cluster.get(make_engine("nothing").url.remote(), timeout=30)


def test_killed_and_back_with_current_weights(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """On the same URL, and the client takes it back, since it was told what to serve."""
    from rolloutsync.ray_engine import RayEngines

    actor = make_engine(weight_version="0")
    engines = RayEngines([actor])
    (url,) = engines.urls(30)
    with RolloutClient(url, **CLIENT) as client:
        client.update_weights_from_disk("ckpt/1", version="1")
        engines.serve("ckpt/1", "1")
        assert generate(client) == ["1"] * 4
        kill_engine(cluster, actor)
        assert generate(client) == ["1"] * 4
        assert cluster.get(actor.url.remote()) == url
        await_live(client, url)
        assert client.weight_versions() == {url: "1"}


def test_killed_and_back_with_old_weights(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """Nobody said what to serve: it stays out, and the next update takes it along."""
    from rolloutsync.ray_engine import RayEngines

    first, second = make_engine(weight_version="0"), make_engine(weight_version="0")
    engines = RayEngines([first, second])
    urls = engines.urls(30)
    with RolloutClient(urls, **CLIENT) as client:
        client.update_weights_from_disk("ckpt/1", version="1")
        assert not engines.sync(client)
        kill_engine(cluster, first)
        changes = engines.sync(client)  # it came and went unseen: the client is to ask it again
        assert (changes.added, changes.removed) == ((urls[0],), (urls[0],))
        assert generate(client) == ["1"] * 4
        await_true(
            lambda: any(each.url == urls[0] and "stale" in each.reason for each in client.engines()),
            lambda: f"{urls[0]} to be stale: {client.engines()}",
        )
        assert generate(client) == ["1"] * 4
        client.update_weights_from_disk("ckpt/2", version="2")
        await_live(client, urls[0])
        assert client.weight_versions() == dict.fromkeys(urls, "2")


def test_one_that_takes_its_time(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """While it is not back it is no member; afterwards it is one again."""
    from rolloutsync.ray_engine import RayEngines

    actor, other = make_engine(backoff_s=2.0), make_engine()
    engines = RayEngines([actor, other])
    url, kept = engines.urls(30)
    with RolloutClient([url, kept], **CLIENT) as client:
        kill_engine(cluster, actor)  # the first time it is back at once
        engines.sync(client)
        os.kill(cluster.get(actor.pid.remote()), signal.SIGKILL)
        await_true(lambda: engines.sync(client).removed == (url,), lambda: str(engines.states()))
        assert set(state(client)) == {kept}
        await_true(lambda: engines.sync(client).added == (url,), lambda: str(engines.states()))
        await_live(client, url)


def test_it_ends_with_its_actor(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """``ray.kill`` gives nobody time to clean up."""
    actor = make_engine()
    cluster.get(actor.url.remote(), timeout=30)
    pid = cluster.get(actor.pid.remote())
    cluster.kill(actor)
    await_true(lambda: not alive(pid), f"the end of the engine {pid}")


def test_an_actor_that_ray_starts_again(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """It has another URL; the client hears of it, and admits the engine once it serves the fleet's weights."""
    from rolloutsync.ray_engine import RayEngines

    actor, other = make_engine(options={"max_restarts": -1}, weight_version="0"), make_engine(weight_version="0")
    engines = RayEngines([actor, other])
    old, kept = engines.urls(30)
    with RolloutClient([old, kept], **CLIENT) as client, engines.watch(client, interval_s=0.2):
        client.update_weights_from_disk("ckpt/1", version="1")
        engines.serve("ckpt/1", "1")
        before = cluster.get(actor.state.remote())
        cluster.kill(actor, no_restart=False)
        await_true(lambda: not alive(before.pid), "the end of the first engine")
        await_true(lambda: old not in state(client) and len(state(client)) == 2, lambda: f"{client.engines()}", 40.0)
        (new,) = set(state(client)) - {kept}
        await_live(client, new)
        assert client.weight_versions() == {new: "1", kept: "1"}
        assert set(generate(client)) == {"1"}


def test_an_actor_that_is_gone(cluster: ModuleType, make_engine: MakeEngine) -> None:
    """Its URL leaves the client; an engine that is nobody's stays."""
    from rolloutsync.ray_engine import RayEngines

    actor, other, stranger = make_engine(), make_engine(), make_engine()
    engines = RayEngines([actor, other])
    first, second = engines.urls(30)
    (foreign,) = RayEngines([stranger]).urls(30)
    with RolloutClient([first, foreign], **CLIENT) as client:
        assert engines.sync(client).added == (second,)
        assert not engines.sync(client)
        cluster.kill(actor)
        cluster.kill(stranger)
        await_true(lambda: engines.sync(client).removed == (first,), lambda: f"{engines.states()}")
        assert set(state(client)) == {second, foreign}


def test_no_actors() -> None:
    from rolloutsync.ray_engine import RayEngines

    with pytest.raises(ValueError, match="actors is empty: give at least one EngineActor"):
        RayEngines([])
