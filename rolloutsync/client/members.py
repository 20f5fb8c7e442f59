"""The verbs about engines and counts: who is there, what they do, what was counted, what is open."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from rolloutsync.config import parse_url
from rolloutsync.errors import WrongServerError, shown
from rolloutsync.owner import CoreOwner

if TYPE_CHECKING:
    from rolloutsync.audit import Audit
    from rolloutsync.dialects.base import LoadReading
    from rolloutsync.slot import EngineStatus
    from rolloutsync.stats import Stats


class Members(CoreOwner):
    """Verbs about engines and counts. Thread-safe."""

    def engines(self) -> list[EngineStatus]:
        """What is known of each engine. Blocks only while new engines are asked what they are."""
        return self._ready().fleet.statuses()

    def loads(self) -> dict[str, LoadReading]:
        """Read every engine's load now, by URL; what cannot be read is an UNKNOWN reading, which is never idle."""
        core = self._ready()
        return core.controls.loads()

    def add_engine(self, url: str) -> None:
        """Make an engine a member; the next verb asks it what it is, then it gets requests. Known ones are no error.

        Raises:
            ValueError, TypeError: The URL is malformed.
            WrongServerError: What answers there is no engine; it is no member then.
        """
        normal, core = parse_url(url), self._open()
        core.check_open()
        with self._lock:
            if normal not in self._urls:
                self._urls.append(normal)
        self._join(core, [normal])
        try:
            core.ready()
        except WrongServerError as error:
            if error.engine == normal:
                self.remove_engine(normal)
            raise
        core.workers.grow()

    def remove_engine(self, url: str) -> None:
        """Send nothing more there; requests in flight finish.

        Raises:
            ValueError: The URL is malformed, or not a member.
        """
        normal, core = parse_url(url), self._open()
        core.check_open()
        with self._lock:
            if normal not in self._urls:
                raise ValueError(f"{shown(url)} is not one of this client's engines: {self._urls}")
            self._urls.remove(normal)
        if not core.quiet.mode:  # a block continues its own
            core.controls.let_go(normal)
        core.fleet.remove(normal)

    def stats(self) -> Stats:
        """Counts so far. Does not block; works on a closed client."""
        return self._open().stats()

    def audit(self) -> Audit:
        """The sample ledger: admitted = delivered + open, each open sample by name, and possible orphans.

        Does not block; works on a closed client. ``print`` shows it.
        """
        return self._open().audit()

    def dump(self, file: IO[str] | None = None) -> str:
        """Who waits for what: the gate, engines, open samples, possible orphans and the stacks of our threads.

        Does not block; not for signal handlers: start a thread there. The text's ``repr`` is the text itself.

        Args:
            file: Where to write the text too; None writes nothing.
        """
        text = self._open().dump()
        if file is not None:
            file.write(f"{text}\n")
        return text
