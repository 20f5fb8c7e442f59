"""Who needs Ray, and who does not. Part of the fast suite: runs with and without Ray installed."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_actor_without_ray_says_what_to_install() -> None:
    """One clear ImportError, not a traceback out of somebody else's module."""
    done = run("import sys; sys.modules['ray'] = None; import rolloutsync.ray_actor")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: rolloutsync.ray_actor needs Ray")
    assert last.endswith("pip install 'rolloutsync[ray]'")


def test_the_package_does_not_import_ray() -> None:
    done = run("import rolloutsync, sys; print('ray' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
