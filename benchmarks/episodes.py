"""Episodes with a tool that sleeps: the wall time of all at once against the sum of their parts.

    python benchmarks/episodes.py --episodes 256 --turns 6 --tool 0.2

Each line is one round. "model" and "tool" are the seconds that all turns and all tool calls took, added up; "longest"
is the slowest single episode, which no scheduling can beat; "overhead" is the wall time beyond it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it knows only its own folder

from benchmarks.report import table
from rolloutsync import Episode, EpisodeStatus, RolloutClient, Turn
from rolloutsync.sim import SimFleet

HEAD = ("episodes", "turns", "wall s", "model s", "tool s", "sum / wall", "longest s", "overhead s", "engines", "audit")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line has the same names, with the same defaults.

    Attributes:
        episodes: At once.
        turns: Of each.
        tool: Seconds that the tool sleeps after each turn but the last.
        tokens: Of each turn.
        engines: Simulated engines, each a process.
        speed: Tokens per second of one request.
        rounds: Measured, after one that warms up.
    """

    episodes: int = 256
    turns: int = 6
    tool: float = 0.2
    tokens: int = 32
    engines: int = 4
    speed: float = 200.0
    rounds: int = 3


@dataclass(frozen=True)
class Spent:
    """Seconds of one episode."""

    model: float
    tool: float
    whole: float


def play(turn: Turn, item: int, options: Options) -> Spent:
    """Ask, use the tool, ask again."""
    ids, model, tool, begun = [3 + item % 1000, 10 + item // 1000], 0.0, 0.0, time.monotonic()
    for number in range(options.turns):
        before = time.monotonic()
        ids += turn.generate(ids).output_ids.tolist()
        model += time.monotonic() - before
        if number < options.turns - 1:
            before = time.monotonic()
            time.sleep(options.tool)
            ids += [5, 6, 7]
            tool += time.monotonic() - before
    return Spent(model, tool, time.monotonic() - begun)


def measure(client: RolloutClient, options: Options) -> list[object]:
    """One round; its row of the table."""
    begun = time.monotonic()
    results = client.map(
        lambda turn, item: play(turn, item, options),
        range(options.episodes),
        sampling_params={"max_new_tokens": options.tokens, "ignore_eos": True},
        concurrency=options.episodes,
        on_error="raise",
    )
    wall = time.monotonic() - begun
    check(results, options)
    spent: list[Spent] = [episode.value for episode in results]
    model, tool, longest = sum(s.model for s in spent), sum(s.tool for s in spent), max(s.whole for s in spent)
    numbers = (wall, model, tool, (model + tool) / wall, longest, wall - longest)
    word = "balanced" if client.audit().balanced else "NOT BALANCED"
    return [options.episodes, options.turns, *(f"{number:.2f}" for number in numbers), options.engines, word]


def check(results: list[Episode], options: Options) -> None:
    """Every episode is whole, on one engine, and one training sample."""
    for episode in results:
        samples, segments = episode.transcript.samples, episode.transcript.segments
        assert episode.status is EpisodeStatus.COMPLETED
        assert len(samples) == options.turns
        assert len({sample.engine for sample in samples}) == 1
        assert len(segments) == 1
        assert int(segments[0].loss_mask.sum()) == options.turns * options.tokens


def parse() -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Options()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    with (
        SimFleet(engines=options.engines, tokens_per_second=options.speed, max_running_requests=256) as fleet,
        RolloutClient(fleet.urls, progress=False) as client,
    ):
        measure(client, options)
        print(table(HEAD, [measure(client, options) for _ in range(options.rounds)]))


if __name__ == "__main__":
    main()
