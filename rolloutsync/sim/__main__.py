"""`python -m rolloutsync.sim`: one simulated engine in this process.

It lives as long as its standard input stays open (a fleet holds the other end) and says on standard output, as one line
of JSON, which port it got.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys

import uvloop

from rolloutsync.sim.config import DEFAULTS, SimConfig
from rolloutsync.sim.faces import engine_of
from rolloutsync.sim.server import bind, serve

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the engine that the command line describes until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m rolloutsync.sim", description=__doc__)
    parser.add_argument("--config-json", default="{}", help="settings as a JSON object; see SimConfig")
    parser.add_argument("--dialect", choices=sorted(DEFAULTS), help="which engine's API; as in the settings")
    parser.add_argument("--version", "--vllm-version", help="the version to answer as; as in the settings")
    parser.add_argument("--parent", type=int, help="end with the thread of this process that started us")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input is closed")
    arguments = parser.parse_args()
    given = {"dialect": arguments.dialect, "version": arguments.version}
    config = SimConfig.from_json(arguments.config_json, **{name: value for name, value in given.items() if value})
    if arguments.parent is not None:
        die_with(arguments.parent)
    uvloop.run(run(config, watch_stdin=arguments.watch_stdin))
    sys.stdout.flush()
    os._exit(0)


def die_with(parent: int) -> None:
    """Asks the kernel to kill us when the thread that started us ends; exits if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


async def run(config: SimConfig, *, watch_stdin: bool) -> None:
    """Serves one engine."""
    listener = bind(config)
    engine = engine_of(config)
    if watch_stdin:
        asyncio.get_running_loop().add_reader(0, _on_stdin)
    await serve(engine, listener, lambda: _report(listener.getsockname()[1]))


def _on_stdin() -> None:
    if not os.read(0, 4096):
        os._exit(0)


def _report(port: int) -> None:
    sys.stdout.write(json.dumps({"port": port, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
