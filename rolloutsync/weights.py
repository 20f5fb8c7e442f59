"""The weights of a client's engines: updates one at a time, versions, groups."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rolloutsync.errors import Cut, RolloutError, WeightUpdateError
from rolloutsync.slot import EngineState
from rolloutsync.threads import fan_out
from rolloutsync.transport import Lane
from rolloutsync.weight_groups import Groups
from rolloutsync.weight_member import Member, Sessionless
from rolloutsync.weight_update import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet
    from rolloutsync.quiet import Quiet
    from rolloutsync.transport import Transport

VERIFY = (None, "checksum")


class Weights:
    """Thread-safe; a second update while one runs is refused.

    Args:
        fleet: Whose engines.
        quiet: Makes them quiet.
        transport: Of their calls.
        clock: Time.
        name: Of the client, for thread names.
    """

    def __init__(self, fleet: Fleet, quiet: Quiet, transport: Transport, clock: Clock, name: str) -> None:
        self._fleet = fleet
        self._quiet = quiet
        self._transport = transport
        self._clock = clock
        self._name = name
        self.groups = Groups(fleet, self._cut, clock, name)
        self._sessionless: Sessionless = set()
        self._lock = threading.Lock()  # guards: _running, _count. Never held across I/O.
        self._running: str | None = None
        self._count = 0

    @contextmanager
    def update(
        self, version: Any, mode: str, *, verify: str | None, raise_on_stale: bool, timeout: float
    ) -> Iterator[WeightUpdate]:
        """One transaction: quiet, buckets, version, and on again; see ``RolloutClient.weight_update``."""
        label = self._claim(version)
        try:
            begun = self._clock.monotonic()
            with self._quiet.block(mode, timeout):
                update = self._begin(label, begun)
                try:
                    yield update
                    update.commit(verify)
                except BaseException as error:
                    update.break_off(error)
                    raise
        finally:
            with self._lock:
                self._running = None
        if raise_on_stale:
            _check_stale(update)

    def _claim(self, version: Any) -> str:
        label = self._label(version)
        with self._lock:
            if self._running is not None:
                raise WeightUpdateError(f"weights {self._running!r} are being updated: one update at a time")
            self._running = label
        return label

    def _label(self, version: Any) -> str:
        """The version as given; for None a number above all that were seen."""
        if version is not None:
            if isinstance(version, bool) or not isinstance(version, (str, int)) or version == "":
                raise TypeError(f"version must be a non-empty string, an integer or None, got {version!r}")
            return str(version)
        seen = [self._fleet.expected_version, *(engine.facts.weight_version for engine in self._fleet.engines())]
        with self._lock:
            self._count = 1 + max([self._count, *(int(v) for v in seen if v and v.isascii() and v.isdigit())])
            return str(self._count)

    def _begin(self, label: str, begun: float) -> WeightUpdate:
        members = [Member(engine, self._sessionless) for engine in self._quiet.engines]
        if not members:
            raise self._fleet.unavailable()
        return WeightUpdate(
            label,
            self._quiet.mode,
            members,
            fleet=self._fleet,
            groups=self.groups,
            cut=self._cut,
            clock=self._clock,
            begun=begun,
            name=self._name,
        )

    def _cut(self, url: str) -> int:
        return self._transport.cut(lambda made: made.engine == url and made.lane is Lane.CONTROL, Cut.ABORT)

    def versions(self) -> dict[str, str | None]:
        """Ask every engine what it calls its weights; None where it does not answer or say."""
        engines = self._fleet.engines(EngineState.LIVE, EngineState.QUARANTINED, EngineState.DOWN)
        outcomes = fan_out(f"{self._name}-versions", [_bind(engine) for engine in engines])
        return {engine.url: outcome.get() for engine, outcome in zip(engines, outcomes, strict=True)}


def _bind(engine: Engine) -> Callable[[], str | None]:
    def ask() -> str | None:
        try:
            return Member(engine, set()).read_version()
        except RolloutError:
            return None

    return ask


def _check_stale(update: WeightUpdate) -> None:
    report = update.report
    if report is None or not report.stale:
        return
    words = "; ".join(f"{engine.url}: {engine.detail}" for engine in report.stale)
    message = f"{len(report.stale)} of {len(report.engines)} engines do not have weights {report.version!r}: {words}"
    error = WeightUpdateError(message, engine=report.stale[0].url, report=report)
    raise error from update.first_error
