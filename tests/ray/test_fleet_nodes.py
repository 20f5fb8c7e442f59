"""A RolloutFleet over two Ray nodes, of which one dies in mid-batch. The cluster is its own driver's, in a process."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import prompts
from tests.processes import await_true
from tests.ray.cluster import QUIET
from tests.ray.conftest import running
from tests.ray.drivers import Driver
from tests.ray.fleets import rids_of

pytestmark = pytest.mark.ray

COUNT, N, TOKENS = 40, 2, 1500
_HELD_S = 0.2  # for each token
SCRIPT = """
import json, os, signal, sys, time

import ray
from ray.cluster_utils import Cluster
from rolloutsync.ray_fleet import RolloutFleet

prompts, params = {prompts!r}, {params!r}
node = dict(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, temp_dir={folder!r})
quick = dict(health_check_initial_delay_ms=0, health_check_period_ms=300, health_check_failure_threshold=5)
cluster = Cluster(True, head_node_args=dict(node, node_ip_address="127.0.0.1", _system_config=quick))
second = cluster.add_node(**node, node_ip_address="127.0.0.2")
ray.init(address=cluster.address, log_to_driver=False, _node_ip_address="127.0.0.1", configure_logging=False)


def until(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, fleet.dump()
        time.sleep(0.02)


def up():
    return sum(" is up, " in line for line in fleet.dump().splitlines())


def told(samples):
    return [(s.index, s.member, s.status, s.rid, s.output_ids.tolist(), s.engine, [span.version for span in
             s.weight_spans], str(s.error)) for s in samples]


def place(actor):
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


fleet = RolloutFleet({urls!r}, actors_per_node=1, share_engines={shared})
fleet.generate([[3]], dict(params, max_new_tokens=1))
until(lambda: up() == 2)
fleet.update_weights_from_disk("new", "w2")
nodes = sorted(place(actor) for actor in fleet.actors)
(there,) = [actor for actor in fleet.actors if place(actor) == second.node_id]
worker = ray.get(there.__ray_call__.remote(lambda _: os.getpid()))
job = fleet.start(prompts, params, n={n})
until(lambda: sum(engine.in_flight for engine in fleet.engines()) == len(job))
begun = time.monotonic()
os.kill(worker, signal.SIGKILL)  # a node takes all with it; by itself it would see that its raylet is gone, some day
if {graceful}:
    cluster.remove_node(second, allow_graceful=False)
else:
    for kind in second.all_processes.values():
        for one in kind:
            os.kill(one.process.pid, signal.SIGKILL)
samples = told(job.result())
seconds = time.monotonic() - begun
audit = fleet.audit()
until(lambda: up() == 2)
after = told(fleet.generate([prompt for prompt in prompts for _ in range(4)], dict(params, max_new_tokens=5)))
fleet.update_weights_from_disk("new", "w3")
last = told(fleet.generate(prompts, dict(params, max_new_tokens=5)))
left = fleet.close()
now = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
json.dump(dict(nodes=nodes, now=now, samples=samples, seconds=seconds, balanced=audit.balanced, after=after, last=last,
               left=left), open("{out}", "w"))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture
def before_the_guard() -> None:
    """Ray runs elsewhere."""


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="rs-ray-", dir="/tmp")  # short: sockets go there
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("shared", [False, True], ids=["parted", "shared"])
def test_a_node_dies_in_mid_batch(shared: bool, engines: SimFleet, folder: str, tmp_path: Path) -> None:
    """Every sample is accounted for, once, and is what it must be; the weights are right before and after."""
    out, lost = tmp_path / "told.json", COUNT * N // 2
    params = {"max_new_tokens": TOKENS, "ignore_eos": True}
    code = SCRIPT.format(
        prompts=prompts(COUNT),
        params=params,
        n=N,
        urls=engines.urls,
        folder=folder,
        shared=shared,
        graceful=shared,
        out=out,
    )
    keys = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_ADDRESS": ""}
    pace(engines, _HELD_S)
    with Driver(code, tmp_path, **QUIET, **keys) as driver:
        await_true(lambda: driver.ended or len(rids_of(engines, "aborted")) == lost, driver.output, 80.0)
        pace(engines, None)  # until then nothing ends by itself
        await_true(lambda: driver.ended, driver.output, 80.0)
        assert driver.wait() == 0, driver.output()
        driver.await_no_process()
    told: dict[str, Any] = json.loads(out.read_text())
    assert len(set(told["nodes"])) == 2
    assert len(told["now"]) == 1
    check(told["samples"], N, TOKENS, "w2")
    assert len({rid for _, _, _, rid, *_ in told["samples"]}) == COUNT * N
    assert told["balanced"]
    check(told["last"], 1, 5, "w3")
    assert {engine for *_, engine, _, _ in told["after"]} == set(engines.urls)
    assert {tuple(versions) for *_, versions, _ in told["after"]} == {("w2",)}
    assert told["left"] == []
    assert {str(rid) for _, _, _, rid, *_ in told["samples"]} <= rids_of(engines, "finished")
    assert len(rids_of(engines, "aborted")) == lost
    assert running(engines) == 0


def pace(engines: SimFleet, step_s: float | None) -> None:
    for engine in engines.engines:
        engine.slow_down(step_s)


def check(samples: list[Any], n: int, tokens: int, version: str) -> None:
    assert [(index, member) for index, member, *_ in samples] == [(i, m) for i in range(COUNT) for m in range(n)]
    for index, _, status, _, output_ids, _, versions, error in samples:
        assert (status, error) == ("TRUNCATED", "None")
        assert output_ids == expected_tokens(prompts(COUNT)[index], tokens, version=version)
        assert versions == [version]
