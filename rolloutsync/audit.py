"""The audit: every sample that was admitted is delivered or named, with what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.fleet import Fleet
    from rolloutsync.ledger import Ledger
    from rolloutsync.order import Order

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSample:
    """A sample that has not ended.

    Attributes:
        job: Number of its job, in the order of the calls.
        index: Of its prompt in the batch.
        member: In its group.
        rid: Of its last request, or None before the first.
        engine: Where that request went, or None.
        attempts: Requests sent so far.
        doing: What it waits for, in words.
        doing_s: Seconds that it has done so.
        age_s: Seconds since it was admitted.
    """

    job: int
    index: int
    member: int
    rid: str | None
    engine: str | None
    attempts: int
    doing: str
    doing_s: float
    age_s: float

    def __str__(self) -> str:
        where = f" {self.engine}" if self.engine else ""
        tail = f", rid {self.rid}, {self.attempts} attempts" if self.rid else ""
        name = f"job {self.job} sample {self.index}/{self.member}"
        return f"{name} {self.doing}{where} for {self.doing_s:.1f} s (age {self.age_s:.1f} s{tail})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A request that may still run though nobody waits for it: its abort could not be delivered.

    Attributes:
        rid: Its id.
        engine: Where it was sent.
        age_s: Seconds since its abort failed.
    """

    rid: str
    engine: str
    age_s: float

    def __str__(self) -> str:
        return f"rid {self.rid} may run on at {self.engine}, for {self.age_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The books of one client at one moment. ``print`` names what is open.

    Attributes:
        admitted: Samples taken on since the client was made.
        delivered: Samples that have ended, each exactly once.
        open: Those that have not, oldest first.
        orphans: Requests that may run though nobody waits for them, until their engine is proven idle or gone.
        dropped: Second endings of a sample, which were not delivered: a bug of ours, always 0.
    """

    admitted: int
    delivered: int
    open: tuple[OpenSample, ...]
    orphans: tuple[Orphan, ...]
    dropped: int

    @property
    def balanced(self) -> bool:
        """Whether admitted = delivered + open, nothing ended twice, and no two open samples share a request id."""
        rids = [sample.rid for sample in self.open if sample.rid is not None]
        books = self.admitted == self.delivered + len(self.open)
        return books and not self.dropped and len(rids) == len(set(rids))

    def __str__(self) -> str:
        word = "balanced" if self.balanced else f"NOT BALANCED, {self.dropped} dropped"
        head = f"{self.admitted} admitted = {self.delivered} delivered + {len(self.open)} open: {word}"
        lines = [head, *map(str, self.open[:_SHOWN])]
        if len(self.open) > _SHOWN:
            lines.append(f"... and {len(self.open) - _SHOWN} more open samples")
        return "\n".join([*lines, *(f"possible orphan: {orphan}" for orphan in self.orphans)])


def make_audit(ledger: Ledger, fleet: Fleet, clock: Clock) -> Audit:
    """Read the books."""
    admitted, delivered, dropped, orders = ledger.book()
    now = clock.monotonic()
    orders.sort(key=lambda order: order.admitted_at)
    return Audit(
        admitted=admitted,
        delivered=delivered,
        open=tuple(_open(order, now) for order in orders),
        orphans=tuple(Orphan(rid=rid, engine=url, age_s=max(0.0, now - since)) for url, rid, since in fleet.orphans()),
        dropped=dropped,
    )


def _open(order: Order, now: float) -> OpenSample:
    life = order.life
    since = order.admitted_at if life.since is None else life.since
    return OpenSample(
        job=order.job,
        index=order.index,
        member=order.member,
        rid=life.rid,
        engine=life.engine,
        attempts=life.attempts,
        doing=life.doing.value,
        doing_s=max(0.0, now - since),
        age_s=max(0.0, now - order.admitted_at),
    )
