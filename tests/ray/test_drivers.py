"""Drivers as a user starts them: the README's snippet, and Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from rolloutsync.sim import SimFleet
from tests.processes import await_true
from tests.ray.conftest import await_idle, running
from tests.ray.drivers import ROOT, Driver

pytestmark = pytest.mark.ray

README_URLS = ("http://127.0.0.1:30000", "http://127.0.0.1:30001")
OWN_RAY = """
import ray
from rolloutsync.ray_actor import RolloutActor

if {own}:
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir={folder!r},
             object_store_memory=80 * 2**20, address="local")
else:
    ray.init()
actor = RolloutActor.remote({urls!r})
ray.get(actor.generate.remote([[3, 4], [5, 6]], {{"max_new_tokens": 30_000, "ignore_eos": True}}, n=2))
"""


def snippet(section: str, number: int = 0) -> str:
    """A Python block of a section of the README."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = text.split("```python\n")[1:]
    assert len(blocks) > number, f"README.md has no such Python block under {section!r}"
    return blocks[number].partition("```")[0]


def on_our_ports(code: str, fleet: SimFleet) -> str:
    """The block, with the session's engines for those of the README."""
    for url, ours in zip(README_URLS, fleet.urls, strict=True):
        assert url in code
        code = code.replace(url, ours)
    return code


def test_the_readme_snippet_runs_as_written(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """Word for word, but for the ports."""
    with Driver(on_our_ports(snippet("From a Ray actor"), fleet), tmp_path) as driver:
        assert driver.wait(60.0) == 0, driver.output()
        output = driver.output()
        driver.await_no_process()
    assert "Stats(" in output
    assert "2 engines, idle after" in output
    assert re.search(r"(^(ABORTED|TRUNCATED) \d+\n){3}\Z", output, re.MULTILINE), output
    await_idle(fleet)


def test_the_readmes_fleet_runs_as_written(cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """Two actors, a drain, new weights."""
    with Driver(on_our_ports(snippet("Many actors"), fleet), tmp_path) as driver:
        assert driver.wait(60.0) == 0, driver.output()
        driver.await_no_process()
        output = driver.output()
    assert "2 engines, idle after" in output
    assert "2 of 2 engines have weights '12'" in output


def test_the_readmes_engines_run_as_written(cluster: ModuleType, tmp_path: Path) -> None:
    """As processes, and as actors, whose processes end with the driver."""
    code = snippet("Engines as processes") + snippet("Engines as processes", 1)
    with Driver(f"{code}\nprint([s.weight_spans[-1].version for s in samples])", tmp_path) as driver:
        assert driver.wait(90.0) == 0, driver.output()
        driver.await_no_process()
        output = driver.output()
    assert output.rstrip().endswith("['1', '1', '1', '1']"), output


@pytest.mark.parametrize("own", [True, False], ids=["own-ray", "shared-ray"])
def test_ctrl_c_in_the_driver(own: bool, cluster: ModuleType, fleet: SimFleet, tmp_path: Path) -> None:
    """It ends with one traceback, the engines stop working for it, and no process stays behind."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rs-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        code = OWN_RAY.format(own=own, folder=folder, urls=fleet.urls)
        with Driver(code, tmp_path, **({"RAY_ADDRESS": ""} if own else {})) as driver:
            await_true(lambda: running(fleet) == 4 or driver.ended, "four requests")
            assert not driver.ended, driver.output()
            driver.interrupt()
            assert driver.wait() != 0
            await_idle(fleet)
            driver.await_no_process()
            output = driver.output()
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.rstrip().endswith("KeyboardInterrupt"), output
