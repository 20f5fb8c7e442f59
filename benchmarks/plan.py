"""What a large fleet needs: processes, cores, memory, sockets and network, from constants measured by ``scale``.

    python -m benchmarks.plan --engines 64 --in-flight 512 --payload-mb 12 --generation-s 270

Arithmetic, no measurement. Another machine's constants (``python -m benchmarks scale``) can be given as options.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.harness.options import add_fields, read_fields

MOST_PER_PROCESS = 4096  # requests in flight, above which a client warns
_BASE64 = 4 / 3
_DESCRIPTORS = 256  # beside a socket for each request: control calls, files, Ray


@dataclass(frozen=True, kw_only=True)
class Load:
    """The command line has the same names. The last six are constants of a machine."""

    engines: int = field(default=64, metadata={"help": "engines"})
    in_flight: int = field(default=512, metadata={"help": "requests at each engine"})
    payload_mb: float = field(default=12.0, metadata={"help": "MB of one answer, experts as base64 of int32"})
    narrow: int = field(default=4, metadata={"help": "times that expert ids shrink: 4 for up to 256 experts"})
    generation_s: float = field(default=270.0, metadata={"help": "seconds of one generation"})
    abort_s: float = field(default=15.0, metadata={"help": "seconds that an abort of everything may take"})
    step_samples: int = field(default=32768, metadata={"help": "samples that a trainer keeps at once"})
    network_gbit_s: float = field(default=100.0, metadata={"help": "Gbit/s of a node"})
    actor_ms_per_mb: float = field(default=0.9, metadata={"help": "CPU ms of an actor for each MB"})
    actor_ms: float = field(default=0.5, metadata={"help": "CPU ms of an actor for each answer, however small"})
    driver_ms: float = field(default=0.6, metadata={"help": "CPU ms of the driver for each sample"})
    cores_per_actor: float = field(default=1.1, metadata={"help": "that one actor can use (one interpreter)"})
    idle_mb: float = field(default=140.0, metadata={"help": "MB of an actor without requests"})
    thread_kb: float = field(default=32.0, metadata={"help": "kB of a request in flight: its thread and socket"})


def plan(load: Load) -> list[tuple[str, str, str]]:
    """(what, how much, why) of each resource."""
    flying = load.engines * load.in_flight
    rate = flying / load.generation_s
    each_ms = load.actor_ms + load.actor_ms_per_mb * load.payload_mb
    storm_core_s = flying * each_ms / 1e3
    by_threads = math.ceil(flying / MOST_PER_PROCESS)
    by_cores = math.ceil(storm_core_s / load.abort_s / load.cores_per_actor)
    actors = max(by_threads, by_cores)
    kept_mb = load.payload_mb / _BASE64 / load.narrow
    storm_gb = flying * load.payload_mb / 1e3
    within = f"{load.abort_s:g} s"
    nodes = max(1, math.ceil(storm_gb * 8 / load.network_gbit_s / load.abort_s))
    return [
        ("requests in flight", f"{flying:,}", f"{load.engines} engines x {load.in_flight}"),
        ("samples", f"{rate:,.0f} /s", f"each takes {load.generation_s:g} s"),
        ("network, steady", f"{rate * load.payload_mb * 8 / 1e3:.1f} Gbit/s", f"{load.payload_mb:g} MB each"),
        ("actors' CPU, steady", f"{rate * each_ms / 1e3:.1f} cores", f"{each_ms:.1f} ms each"),
        ("driver's CPU, steady", f"{100 * rate * load.driver_ms / 1e3:.0f} % of a core", f"{load.driver_ms:g} ms each"),
        ("an abort of everything", f"{storm_gb:,.0f} GB", "all answer at once, with what they have, at most in full"),
        ("... actors' CPU", f"{storm_core_s:,.0f} core-s", f"{storm_core_s / load.abort_s:.0f} cores for {within}"),
        (
            "... driver's CPU",
            f"{flying * load.driver_ms / 1e3:,.0f} core-s",
            "one interpreter: no less than that",
        ),
        ("... network", f"{nodes} nodes", f"of {load.network_gbit_s:g} Gbit/s for {within}"),
        ("actors", f"{actors}", f"{by_cores} by the abort's CPU, {by_threads} by {MOST_PER_PROCESS} in flight in each"),
        ("memory of an actor", f"{_actor_mb(load, flying / actors):,.0f} MB", "idle, threads, body budget of 2 GiB"),
        ("threads of an actor", f"{flying / actors:,.0f}", "at most: one for each large answer that comes"),
        ("descriptors of an actor", f"{flying / actors + _DESCRIPTORS:,.0f}", "RLIMIT_NOFILE"),
        ("ports", f"{load.in_flight} of 28,232", "local ports to each engine's address, by Linux' default range"),
        ("kept samples", f"{load.step_samples * kept_mb / 1e3:,.0f} GB", f"{kept_mb:.1f} MB each, in Ray's store"),
    ]


def _actor_mb(load: Load, flying: float) -> float:
    return load.idle_mb + flying * load.thread_kb / 1e3 + 2.147 * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_fields(parser, Load())
    load = read_fields(parser.parse_args(arguments), Load())
    wrong = [f"{each.name}={getattr(load, each.name)}" for each in fields(load) if not getattr(load, each.name) > 0]
    if wrong:
        parser.error(f"must be above 0: {', '.join(wrong)}")
    rows = plan(load)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print(", ".join(f"{name} {value:g}" for name, value in asdict(load).items()))
    for what, much, why in rows:
        print(f"{what.ljust(widths[0])}  {much.rjust(widths[1])}  {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
