"""Who needs Ray, and who does not."""

from __future__ import annotations

from tests.processes import run


def test_an_engine_actor_without_ray_says_what_to_install() -> None:
    """One clear ImportError, as of the other actor."""
    done = run("import sys; sys.modules['ray'] = None; import rolloutsync.ray_engine")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: rolloutsync.ray_engine needs Ray")
    assert last.endswith("pip install 'rolloutsync[ray]'")


def test_launching_needs_nothing_but_the_package() -> None:
    """No Ray, and no part of the simulated engine."""
    done = run("import rolloutsync.keeper, sys; print({'ray', 'uvicorn', 'rolloutsync.sim'} & set(sys.modules))")
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
