"""Episodes: multi-turn rollouts as plain blocking functions, each in a thread of its own, hundreds at once."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.errors import DeadlineExceededError, EpisodeError, EpisodeInterrupt, portable
from rolloutsync.progress import LOOK_S, Progress
from rolloutsync.threads import start_thread
from rolloutsync.transcript import Transcript
from rolloutsync.turn import Stage, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    Play = Callable[[Turn, Any], Any]

log = logging.getLogger("rolloutsync.episodes")
_STACK_BYTES = 8 << 20  # what a main thread has: tools are written for it; only what is touched is memory
_GRACE_S = 5.0  # for tools to return, once the time is up or the client closed
_LEAVING_S = 0.5  # and after Ctrl-C


def check_episode(episode: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(episode):
        raise TypeError(f"episode must be a function of (turn, item), got {episode!r:.200}")


class EpisodeStatus(str, Enum):
    """How an episode ended."""

    COMPLETED = "COMPLETED"  # its function returned
    INTERRUPTED = "INTERRUPTED"  # a drain, close() or the end of its map came before
    FAILED = "FAILED"  # its function raised

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """What became of one item.

    Attributes:
        index: Position of the item.
        item: As it was passed.
        value: What the function returned; None unless it returned. An interrupted one may have, see ``status``.
        transcript: Its turns, also of an episode that failed or was interrupted.
        status: INTERRUPTED whenever a turn was interrupted, whatever the function made of that.
        error: What the function raised, or the ``EpisodeInterrupt`` of an interrupted one; None if COMPLETED.
    """

    index: int
    item: Any
    value: Any
    transcript: Transcript
    status: EpisodeStatus
    error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """An error that does not pickle travels as its words."""
        error = portable(self.error)
        return Episode, (self.index, self.item, self.value, self.transcript, self.status, error)


class EpisodeRun:
    """All episodes of one map. ``result`` is for one thread.

    Args:
        stage: What it needs of a client.
        play: The user's function.
        items: One episode each.
        concurrency: Episodes at once.
        progress: See ``Progress``.
    """

    def __init__(self, stage: Stage, play: Play, items: list[Any], *, concurrency: int, progress: bool | None) -> None:
        self._stage = stage
        self._play = play
        self._items = items
        self._concurrency = concurrency
        self._bar = Progress(len(items), progress, stage.clock, unit="episode")
        self._turns = [Turn(stage, index) for index in range(len(items))]
        self._next = itertools.count()  # atomic
        # _changed's lock guards: _ended, _playing, _statuses, _tokens. Never held across a user's code.
        self._changed = threading.Condition()
        self._ended: dict[int, Episode] = {}
        self._playing: dict[int, threading.Thread] = {}
        self._statuses: Counter[EpisodeStatus] = Counter()
        self._tokens = 0

    def result(self, on_error: str) -> list[Episode]:
        """Block until every episode has ended; all of them in input order.

        Threads that do not come back from a user's code are left behind, with a WARNING, when the client is closed,
        the time is up, or this thread is interrupted (Ctrl-C).

        Raises:
            EpisodeError: As ``on_error`` says.
            RuntimeError: Not even one thread could be started.
        """
        self._bar.begin()
        try:
            self._start()
            self._wait()
        except BaseException:
            self._leave()
            raise
        finally:
            self._bar.close()
        episodes = [self._ended[index] for index in range(len(self._items))]
        judge_episodes(episodes, on_error)
        return episodes

    # --- the threads ---

    def _start(self) -> None:
        """As many threads as are wanted, or as the system gives."""
        count = min(self._concurrency, len(self._items))
        for number in range(count):
            name = f"{self._stage.name}-episode-{self._stage.job}-{number}"
            try:
                start_thread(name, self._run, stack_bytes=_STACK_BYTES)
            except RuntimeError as error:
                if not number:
                    raise
                log.warning("only %d of %d episodes at once (%s): raise RLIMIT_NPROC or pids.max", number, count, error)
                return

    def _run(self) -> None:
        """A thread's life: one episode after the other."""
        while (index := next(self._next)) < len(self._items):
            with self._changed:
                self._playing[index] = threading.current_thread()
            self._end(self._episode(index))

    def _episode(self, index: int) -> Episode:
        turn, value, error = self._turns[index], None, None
        try:
            turn.begin()
            value = self._play(turn, self._items[index])
        except BaseException as raised:  # noqa: BLE001 - a thread's outermost frame: it is the item's answer
            error = raised
        turn.end()
        return self._made(index, value, error)

    def _made(self, index: int, value: Any, error: BaseException | None) -> Episode:
        """The verdict: an interrupted turn makes an interrupted episode, even if the function swallowed it."""
        turn, status = self._turns[index], EpisodeStatus.COMPLETED
        if turn.reason is not None:
            status = EpisodeStatus.INTERRUPTED
            error = error or EpisodeInterrupt(f"item {index}: {turn.reason}")
        elif error is not None:
            status = EpisodeStatus.INTERRUPTED if isinstance(error, EpisodeInterrupt) else EpisodeStatus.FAILED
        return Episode(index, self._items[index], value, turn.transcript, status, error)

    def _end(self, episode: Episode) -> None:
        """Keep what became of an item, unless it has been given up."""
        with self._changed:
            self._playing.pop(episode.index, None)
            if self._ended.setdefault(episode.index, episode) is not episode:
                return
            self._statuses[episode.status] += 1
            self._tokens += sum(len(sample.output_ids) for sample in episode.transcript.samples)
            self._changed.notify_all()

    # --- waiting ---

    def _wait(self) -> None:
        grace: Deadline | None = None
        while not self._await_some(LOOK_S):
            self._show()
            if grace is None and (self._stage.closed() or self._stage.deadline.expired):
                grace = Deadline.after(self._stage.clock, _GRACE_S)
            if grace is not None and grace.expired:
                self._give_up(_GRACE_S)
        self._show()

    def _await_some(self, seconds: float) -> bool:
        """Block until an episode ends, for at most ``seconds``; whether all have ended."""
        with self._changed:
            if len(self._ended) < len(self._items):
                self._stage.clock.wait(self._changed, seconds)
            return len(self._ended) == len(self._items)

    def _show(self) -> None:
        with self._changed:
            done, tokens = len(self._ended), self._tokens
            counts = {"playing": len(self._playing), **{str(s).lower(): n for s, n in self._statuses.items() if n}}
        self._bar.show(done, tokens, counts)

    def _leave(self) -> None:
        """This thread is called away: end what is at the engines, wait for tools no longer than people do."""
        self._stage.stop.set()
        limit = Deadline.after(self._stage.clock, 2 * _LEAVING_S)
        self._stage.abort(_LEAVING_S)
        while self._playing and not limit.expired and not self._await_some(limit.within(LOOK_S)):
            pass
        self._give_up(_LEAVING_S)

    def _give_up(self, waited_s: float) -> None:
        """Answer for the episodes that do not come back; their threads are daemons and get an interrupt at most."""
        with self._changed:
            threads = [thread.name for thread in self._playing.values()]
            left = [index for index in range(len(self._items)) if index not in self._ended]
        if threads:
            words = "%d episodes did not return within %g s; their threads are left behind: %s"
            log.warning(words, len(threads), waited_s, ", ".join(sorted(threads)))
        for index in left:
            self._end(self._made(index, None, self._abandon(index)))

    def _abandon(self, index: int) -> BaseException:
        """No turn is made any more; why."""
        turn = self._turns[index]
        if turn.interrupted:
            return EpisodeInterrupt(f"item {index}: {turn.reason}; its thread has not come back")
        turn.end()
        return DeadlineExceededError(f"item {index}: the map's time is up, and its thread has not come back")


def judge_episodes(episodes: list[Episode], on_error: str) -> None:
    """Warn of failed episodes, or raise, as ``on_error`` says."""
    failed = [episode for episode in episodes if episode.status is EpisodeStatus.FAILED]
    if not failed or on_error == "return":
        return
    first = failed[0].error
    words = f"{len(failed)} of {len(episodes)} episodes failed; the first: {type(first).__name__}: {first}"
    if on_error == "raise" or len(failed) == len(episodes):
        counts = Counter(episode.status.value for episode in episodes)
        raise EpisodeError(words, episodes=episodes, counts=dict(counts)) from first
    log.warning("%s", words)
