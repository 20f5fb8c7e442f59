"""What the tests of episodes share."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutsync import Episode, EpisodeStatus, RolloutClient, Turn

WAIT_S = 20.0
DONE, INTERRUPTED, FAILED = EpisodeStatus.COMPLETED, EpisodeStatus.INTERRUPTED, EpisodeStatus.FAILED


def chat(turn: Turn, item: int, turns: int = 3) -> list[str | None]:
    """Some turns, each on top of all before, with two ids of a tool between; the engines that answered."""
    ids, engines = [3 + item, 10], []
    for number in range(turns):
        answer = turn.generate(ids)
        ids += [*answer.output_ids.tolist(), 20 + number, 30 + number]
        engines.append(answer.engine)
    return engines


def check_books(client: RolloutClient, samples: int) -> None:
    """Every sample of every turn is accounted for, once."""
    audit = client.audit()
    assert audit.balanced
    assert (audit.admitted, audit.delivered) == (samples, samples)


def statuses(results: Sequence[Episode]) -> list[EpisodeStatus]:
    return [episode.status for episode in results]
