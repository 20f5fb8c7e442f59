"""Drivers of a RolloutFleet in processes of their own: how they end, and that nothing of theirs stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import pytest

from rolloutsync.sim import SimFleet
from tests.processes import await_true
from tests.ray.conftest import await_idle, running
from tests.ray.drivers import Driver

pytestmark = pytest.mark.ray

BEGIN = """
import sys, time
{imports}
ray.init()
fleet = RolloutFleet({urls!r}, actors=2, actor_options=dict(num_cpus=0))
params = dict(max_new_tokens=30_000, ignore_eos=True)
"""
IMPORTS = {
    "ray-first": "import ray\nfrom rolloutsync.ray_fleet import RolloutFleet",
    "ray-last": "from rolloutsync import RolloutClient\nimport ray\nfrom rolloutsync.ray_fleet import RolloutFleet",
}


def begin(fleet: SimFleet, imports: str = "ray-first") -> str:
    return BEGIN.format(urls=fleet.urls, imports=IMPORTS[imports])


@pytest.mark.parametrize("imports", list(IMPORTS))
def test_ctrl_c_in_a_generate(imports: str, cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """It ends in time, with one traceback; the engines are idle, no actor stays."""
    code = begin(fleet, imports) + "fleet.generate([[3, 4], [5, 6]], params, n=2)"
    with Driver(code, tmp_path) as driver:
        await_running_or_end(fleet, 4, driver)
        driver.interrupt()
        assert driver.wait(20.0) != 0
        await_idle(fleet)
        driver.await_no_process()
        output = driver.output()
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.rstrip().endswith("KeyboardInterrupt"), output


def test_a_driver_that_ends_without_close(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """The main thread ends while samples are made: so do the actors, and engines stop working for them."""
    code = begin(fleet) + "job = fleet.start([[3, 4], [5, 6]], params, n=2)\n"
    code += "\nwhile sum(engine.in_flight for engine in fleet.engines()) < 4: time.sleep(0.02)\n"
    with Driver(code, tmp_path) as driver:
        assert driver.wait(30.0) == 0, driver.output()
        await_idle(fleet)
        driver.await_no_process()
        assert "Traceback" not in driver.output()


def test_a_driver_that_is_killed(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    code = begin(fleet) + "fleet.generate([[3, 4], [5, 6]], params, n=2)"
    with Driver(code, tmp_path) as driver:
        await_running_or_end(fleet, 4, driver)
        os.kill(driver.pid, signal.SIGKILL)
        await_idle(fleet)
        driver.await_no_process()


def test_ray_ends_before_the_fleet(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """``close`` and what waits come to an end, and no other Ray is started for them."""
    code = begin(fleet)
    code += """
job = fleet.start([[3, 4], [5, 6]], params, n=2, on_error="return")
while sum(engine.in_flight for engine in fleet.engines()) < 4: time.sleep(0.02)
ray.shutdown()
begun = time.monotonic()
left = fleet.close()
assert time.monotonic() - begun < 10.0, time.monotonic() - begun
assert all("-actor-" in name for name in left), left  # Ray may never let go of who waits in it
assert len(job.result()) == 4
assert not ray.is_initialized()
print("samples:", {str(sample.status) for sample in job.result()})
"""
    with Driver(code, tmp_path) as driver:
        assert driver.wait(40.0) == 0, driver.output()
        driver.await_no_process()
        assert "Traceback" not in driver.output()
    await_idle(fleet)


def test_a_driver_without_a_word_to_ray(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """Nobody called ``ray.init``: as everywhere in Ray, that happens by itself."""
    code = begin(fleet).replace("ray.init()\n", "").replace("actors=2, ", "")
    code += "print({str(s.status) for s in fleet.generate([[3]], dict(params, max_new_tokens=4))}, len(fleet.actors))"
    with Driver(code, tmp_path) as driver:
        assert driver.wait(40.0) == 0, driver.output()
        driver.await_no_process()
        assert "{'TRUNCATED'} 1" in driver.output()


def await_running_or_end(fleet: SimFleet, count: int, driver: Driver) -> None:
    """Poll until the engines have so many requests; a driver that has ended says why."""
    await_true(lambda: driver.ended or running(fleet) == count, f"{count} requests", 40.0)
    assert not driver.ended, driver.output()
