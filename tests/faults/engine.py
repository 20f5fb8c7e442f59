"""A scripted engine whose generations really run: they hold a place, show in its load, and end for a reason."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.client.kit import ScriptedEngine, body_of, completion
from tests.faults.kit import echo_ids
from tests.wire import Left, Peer, Request, Script, Step, answer

_LOOK_S = 0.02
Fault = Callable[[Request, int], Script | None]


@dataclass
class Generation:
    """One request that the engine took on.

    Attributes:
        prompt: Its first token id.
        end: Why it ended: "finished", "aborted", "lost" (its client had left), "died", "closed"; empty while it runs.
    """

    rid: str
    prompt: int
    end: str = ""
    at: float = field(default_factory=time.monotonic)


class Journal:
    """Every generation of one or several engines, and how many copies of one prompt ever ran at once."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # its lock guards everything here, and the ends of the generations
        self.all: list[Generation] = []
        self.most_copies = 0

    def begin(self, request: Request) -> Generation:
        body = body_of(request)
        made = Generation(body["rid"], body["input_ids"][0])
        with self.changed:
            if any(other.rid == made.rid for other in self.all):
                raise ValueError(made.rid)
            self.all.append(made)
            copies = Counter(other.prompt for other in self.all if not other.end)
            self.most_copies = max(self.most_copies, copies[made.prompt])
            self.changed.notify_all()
        return made

    def end(self, why: str, which: Callable[[Generation], bool] = lambda _: True) -> int:
        """Ends what runs of ``which``; how many that were."""
        with self.changed:
            chosen = [made for made in self.all if not made.end and which(made)]
            for made in chosen:
                made.end = why
            self.changed.notify_all()
        return len(chosen)

    def ends(self, prompt: int | None = None) -> list[str]:
        """Why each generation (of one prompt) ended, in the order of their beginnings."""
        with self.changed:
            return [made.end for made in self.all if prompt in {None, made.prompt}]

    def running(self) -> list[str]:
        with self.changed:
            return [made.rid for made in self.all if not made.end]

    def await_running(self, count: int, timeout: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: sum(not made.end for made in self.all) >= count, timeout)


class LiveEngine(ScriptedEngine):
    """Generates until told to finish, aborted, or left by its client; refuses an id that it has seen.

    Args:
        fault: Steps to play, in place of the answer, once a generation runs; it runs on. None: the answer.
        deaf: Does not notice that a client has left.
        takes_s: Seconds for a generation; None: until ``finish``.
        ignored_aborts: So many abort_all have no effect; -1: none ever has.
        aborted: The answer to an aborted request.
        journal: Where to write; give the same one to several engines.
    """

    def __init__(
        self,
        fault: Fault = lambda request, number: None,
        *,
        deaf: bool = False,
        takes_s: float | None = None,
        ignored_aborts: int = 0,
        aborted: Callable[[Request], Script] | None = None,
        others: Mapping[str, Script] | None = None,
        journal: Journal | None = None,
        **options: Any,
    ) -> None:
        self.journal = journal or Journal()
        self._mine: set[str] = set()
        self._fault = fault
        self._deaf = deaf
        self._takes_s = takes_s
        self._ignored = ignored_aborts
        self._aborted = aborted or partial
        self.aborts: list[tuple[float, str | None]] = []  # when, and which rid; None: all
        super().__init__(self._take_on, others={"/abort_request": [self._abort], **(others or {})}, **options)

    def close(self) -> None:
        self._end("closed")
        super().close()

    # --- what a test says ---

    def finish(self, *, from_now_on: bool = False) -> int:
        """Whatever runs here is whole now, and so is at once what comes, if ``from_now_on``; how many that were."""
        if from_now_on:
            self._takes_s = 0.0
        return self._end("finished")

    def die(self) -> None:
        """The process is killed: nothing runs any more, connections are reset, new ones refused."""
        self._end("died")
        self.server.die()

    def running(self) -> int:
        return len(self._mine.intersection(self.journal.running()))

    def _end(self, why: str, which: Callable[[Generation], bool] = lambda _: True) -> int:
        return self.journal.end(why, lambda made: made.rid in self._mine and which(made))

    # --- /generate ---

    def _take_on(self, request: Request, number: int) -> Script:
        try:
            made = self.journal.begin(request)
        except ValueError as error:
            return [answer(b'{"error": {"message": "duplicate request id %s"}}' % str(error).encode(), "400 Bad")]
        self._mine.add(made.rid)
        steps = self._fault(request, number)
        return [self._answer(request, made)] if steps is None else steps

    def _answer(self, request: Request, made: Generation) -> Step:
        def step(peer: Peer) -> None:
            self._await_end(peer.sock, made)
            if made.end == "aborted":
                for inner in self._aborted(request):
                    inner(peer)
            elif made.end == "finished":
                peer.send_answer(completion(request, ids=echo_ids(body_of(request)["input_ids"])))
            else:
                raise Left

        return step

    def _await_end(self, sock: socket.socket, made: Generation) -> None:
        while not made.end:
            if self._takes_s is not None and time.monotonic() - made.at >= self._takes_s:
                self._end("finished", lambda other: other is made)
            elif not self._deaf and _has_left(sock):
                self._end("lost", lambda other: other is made)
            else:
                with self.journal.changed:
                    self.journal.changed.wait(_LOOK_S)

    # --- /abort_request and the load ---

    def _abort(self, peer: Peer) -> None:
        body = body_of(peer.requests[-1])
        rid = None if body.get("abort_all") else body["rid"]
        self.note_abort(rid)
        self.aborts.append((time.monotonic(), rid))
        if rid is not None or self._ignored == 0:
            self._end("aborted", lambda made: rid is None or made.rid.startswith(rid))
        elif self._ignored > 0:
            self._ignored -= 1
        peer.send_answer(b"")

    def note_abort(self, rid: str | None) -> None:
        """Called for each abort, before it has an effect."""

    def aborted_rids(self) -> list[str]:
        return [rid for _, rid in self.aborts if rid is not None]

    def sweeps(self) -> list[float]:
        """When abort_all came."""
        return [at for at, rid in self.aborts if rid is None]

    def _facts(self, path: str) -> Any:
        if path == "/get_load":
            return [{"dp_rank": 0, "num_reqs": self.running(), "num_waiting_reqs": 0, "num_tokens": 0}]
        facts = super()._facts(path)
        if path == "/v1/loads":
            facts["loads"][0]["num_running_reqs"] = self.running()
        return facts


class FragileEngine(LiveEngine):
    """Dies, as some versions do, of an abort for an id that is finished or unknown, of a flood of abort_all, and of an
    abort_all when it has been idle for half a second.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.offences: list[str] = []
        self._idle_since: float | None = time.monotonic()

    def note_abort(self, rid: str | None) -> None:
        now, running = time.monotonic(), self.journal.running()
        if rid is not None and rid not in running:
            self.offences.append(f"abort of {rid}, which does not run")
        if rid is None and sum(now - at < 1.0 for at in self.sweeps()) >= 5:
            self.offences.append("a flood of abort_all")
        if rid is None and not running and now - max((made.at for made in self.journal.all), default=0.0) > 0.5:
            self.offences.append("an abort_all while idle")
        if self.offences:
            self.die()


def partial(request: Request, tokens: int = 1) -> Script:
    """What an engine answers to an aborted request: the first tokens of the answer."""
    ids = echo_ids(body_of(request)["input_ids"])[:tokens]
    return [answer(completion(request, ids=ids, finish_reason={"type": "abort", "message": "Abort in waiting queue"}))]


def _has_left(sock: socket.socket) -> bool:
    try:
        return bool(select.select([sock], [], [], 0)[0]) and not sock.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True
