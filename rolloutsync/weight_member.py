"""A member: one engine's part in a weight update or a weight group."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rolloutsync.errors import EngineHTTPError, RolloutError, TransportError, UnsupportedError
from rolloutsync.threads import fan_out, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rolloutsync.clock import Deadline
    from rolloutsync.dialects.base import Call
    from rolloutsync.engine import Engine

Sessionless = set[tuple[str, "str | None"]]
_GRACE_S = 10.0


class Member:
    """What one engine went through. Its first failure is kept; after that it is asked nothing more of the update.

    Used by one thread at a time: an update's steps come one after another.

    Args:
        engine: Whose part it is.
        sessionless: (url, version) of engines that were found to have no sessions; shared and added to.
    """

    def __init__(self, engine: Engine, sessionless: Sessionless) -> None:
        self.engine = engine
        self.url = engine.url
        self.reason = ""
        self.error: RolloutError | None = None
        self.touched = False  # an update was sent: the weights are what they were before, new, or something between
        self.flushed = False
        self.checksum: str | None = None
        self.version: str | None = None
        self._weights = engine.dialect.weights
        self._sessionless = sessionless
        self._session = False

    @property
    def ok(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self.reason

    def fail(self, reason: str, error: RolloutError | None = None) -> None:
        """Keep what went wrong first."""
        if self.ok:
            self.reason, self.error = reason, error

    def attempt(self, what: str, act: Callable[[], object]) -> bool:
        """Do something unless something has gone wrong before; whether all is well after it."""
        if self.ok:
            try:
                act()
            except RolloutError as error:
                self.fail(f"{what}: {error.message}", error)
        return self.ok

    def ask(self, call: Call, *, deadline: Deadline | None = None) -> Any:
        """Make a call of the update; RolloutError where the engine refuses, in whatever form."""
        answer = self.engine.call(call, deadline=deadline)
        refusal = self._weights.refusal(answer)
        if refusal is not None:
            raise RolloutError(f"{call.path} was refused: {refusal}", engine=self.url)
        return answer

    @property
    def _keeps_label(self) -> bool:
        return self._weights.keeps_label(self.engine.facts)

    # --- the steps of an update, in their order ---

    def apply(self, what: str, call: Call, version: str, *, session: bool) -> bool:
        """Make an update call, inside a session or outside of any, whichever it needs; whether it worked."""

        def act() -> None:
            if session:
                self._begin()
            else:
                self._end()
            if not self.touched and self._keeps_label:
                self._mark(version)
            self.touched = True
            self._update(call)

        return self.attempt(what, act)

    def _update(self, call: Call) -> None:
        try:
            self.ask(call)
        except EngineHTTPError as error:
            if not self._weights.applied(error.status, error.message):
                raise

    def _begin(self) -> None:
        kind = (self.url, self.engine.facts.version)
        if self._session or kind in self._sessionless:
            return
        try:
            self.ask(self._weights.begin)
        except UnsupportedError:
            self._sessionless.add(kind)
            return
        except RolloutError as error:
            if not self._weights.already_open(error.message):
                raise
        self._session = True

    def _end(self, deadline: Deadline | None = None) -> None:
        if self._session:
            self._session = False
            self.ask(self._weights.end, deadline=deadline)

    def _mark(self, version: str) -> None:
        """A label of the way there: an engine that got stuck bears it, one that was restarted meanwhile does not."""
        self.ask(self._weights.set_version(_partial(version)))

    def _check_mark(self, version: str) -> None:
        """Raise if the engine is not the one that was sent the buckets: a restarted one bears another label."""
        told = self.read_version()
        if self.touched and told not in {version, _partial(version)}:
            what = "it was restarted during the update, or keeps its label"
            words = f"it says {told!r}, not {_partial(version)!r}: {what}"
            raise RolloutError(words, engine=self.url)

    def finish(self, *, holds_requests: bool) -> None:
        """End the session and empty the cache, once for all buckets. One that holds requests cannot be emptied."""
        self.attempt("end of the session", self._end)
        self.attempt("flush of the cache", lambda: self._flush(holds_requests=holds_requests))

    def _flush(self, *, holds_requests: bool) -> None:
        try:
            self.ask(self.engine.dialect.flush)
        except RolloutError as error:
            if not holds_requests or isinstance(error, TransportError):
                raise
            return
        self.flushed = True

    def sum_up(self) -> None:
        """Ask for the checksum."""

        def act() -> None:
            self.checksum = self._weights.read_checksum(self.ask(self._weights.checksum))
            if self.checksum is None:
                raise RolloutError("the engine names none", engine=self.url)

        self.attempt("checksum", act)

    def label(self, version: str) -> None:
        """Name the weights, and read the name back; where an engine bears no name, only we remember it."""

        def act() -> None:
            if not self._keeps_label:
                self.engine.heard_version(version)
                return
            self._check_mark(version)
            self.ask(self._weights.set_version(version))
            self.version = self.read_version()
            if self.version != version:
                raise RolloutError(f"the engine says {self.version!r}, not {version!r}", engine=self.url)

        self.attempt("weight version", act)

    def give_up(self, deadline: Deadline) -> None:
        """End a session that was left open, if the engine still can."""
        try:
            self._end(deadline)
        except RolloutError as error:
            self.fail(f"end of the session: {error.message}", error)

    def forget(self) -> None:
        """It does not have the weights."""
        if self.touched:
            self.engine.forget_version()

    def read_version(self) -> str | None:
        """Ask what the engine calls its weights, and keep it among its facts."""
        engine = self.engine
        engine.know()
        version = engine.dialect.read_version(engine.call(engine.dialect.version_call()))
        engine.heard_version(version)
        return version


def _partial(version: str) -> str:
    return f"{version} (partial)"


def run_all(name: str, members: Sequence[Member], act: Callable[[Member], object]) -> None:
    """Let each member act in a thread of its own; blocks until all have ended."""
    for outcome in fan_out(name, [_bind(act, member) for member in members]):
        outcome.get()


def run_together(
    name: str, members: Sequence[Member], act: Callable[[Member], object], cut: Callable[[str], object]
) -> None:
    """The same for members that wait for each other: when one fails, the others get ten seconds more, then are cut."""
    ended, alarmed = threading.Event(), threading.Lock()

    def mourn() -> None:
        if not ended.wait(_GRACE_S):
            for member in members:
                cut(member.url)

    def one(member: Member) -> None:
        act(member)
        if not member.ok and alarmed.acquire(blocking=False):
            start_thread(f"{name}-lost", mourn)

    try:
        run_all(name, members, one)
    finally:
        ended.set()


def _bind(act: Callable[[Member], object], member: Member) -> Callable[[], object]:
    return lambda: act(member)
