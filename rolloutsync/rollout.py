"""One sample's life, from lease to result. Owns no threads: whoever calls ``run`` lends its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.errors import (
    Cut,
    DeadlineExceededError,
    EngineAbortError,
    EngineHTTPError,
    Phase,
    PoisonPromptError,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
)
from rolloutsync.gate import Turned
from rolloutsync.growth import extend, make
from rolloutsync.journey import Journey, Trail
from rolloutsync.order import Doing, new_rid
from rolloutsync.sample import Sample, Segment, Status, Timing
from rolloutsync.slot import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock
    from rolloutsync.config import RetryPolicy, Timeouts
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet
    from rolloutsync.order import Order
    from rolloutsync.retry import Judge, Verdict
    from rolloutsync.slot import Lease
    from rolloutsync.transport import Landed

log = logging.getLogger("rolloutsync.rollout")
_FINISHES = {"stop", "length", "abort"}
_CALLED_OFF = {Cut.DRAIN, Cut.ABORT, Cut.CLOSE}
_INTERNAL = 500
_LATE_S = 0.5  # for the abort of a request whose sample is out of time: it must end within a second
_AFTER_SENDING = {Phase.RACE, Phase.SENT, Phase.BODY}


class Rollout:
    """Turns orders into samples. Thread-safe: a sample's state is in its journey, which one thread at a time has."""

    def __init__(self, fleet: Fleet, judge: Judge, clock: Clock, *, policy: RetryPolicy, timeouts: Timeouts) -> None:
        self._fleet = fleet
        self._judge = judge
        self._clock = clock
        self._policy = policy
        self._timeouts = timeouts

    def run(self, order: Order) -> Sample:
        """Block until the sample has ended, in whatever way; never raises for anything an engine does."""
        journey = self.journey(order)
        while (sample := self.travel(journey)) is None:
            pass
        return sample

    def journey(self, order: Order) -> Journey:
        """The way of a sample, which ``travel`` goes to its end, or another with ``set_out``, ``park`` and ``land``."""
        return Journey(Trail(order, order.deadline.or_sooner(self._fleet.active, self._timeouts.sample_s)))

    def travel(self, journey: Journey, gives_way: Callable[[], bool] = lambda: False) -> Sample | None:
        """Go on from wherever it is to the end, see ``run``. None: it waits for a place, and ``gives_way()``."""
        trail = journey.trail
        while True:
            if journey.lease is None:
                trail.note(Doing.PLACE, self._clock.monotonic())
                place = self._fleet.lease(
                    trail.order, trail.rid, trail.deadline, avoid=trail.avoid, gives_way=gives_way
                )
                if place is Turned.ASIDE:
                    return None
                if isinstance(place, Turned):
                    return self._turned_away(trail, place)
                self._placed(journey, place)
            sample = self._try(journey)
            if sample is not None:
                return sample

    def _placed(self, journey: Journey, lease: Lease) -> None:
        journey.lease, trail = lease, journey.trail
        if trail.queued_s is None:
            trail.queued_s = self._clock.monotonic() - trail.order.admitted_at

    # --- with nobody who waits for the answer ---

    def set_out(self, journey: Journey, relieve: Callable[[], None] | None) -> bool:
        """Have its first request sent, where there is room at an engine; whether it was.

        Not where a thread that waits for the answer is quicker: then its place is kept, and to be used at once.
        ``relieve`` is called before it blocks, as a connect does. With None it never does, and keeps no place unused.
        """
        trail = journey.trail
        lease = self._fleet.lease_now(trail.order, trail.rid, trail.deadline)
        if lease is None:
            return False
        self._placed(journey, lease)
        kept = False
        try:
            if lease.engine.parks(trail.order.prompt, block=relieve is not None):
                self._depart(trail, lease)
                journey.flight = lease.engine.send_off(
                    trail.order.prompt, trail.rid, deadline=trail.deadline, dp_rank=lease.dp_rank, relieve=relieve
                )
            kept = journey.flight is not None or relieve is not None
        except RolloutError:
            kept = relieve is not None  # travel() finds it again, and judges it
        finally:
            if not kept:  # who has to wait for a thread first must keep no place
                journey.lease = trail.queued_s = None
                self._fleet.give_back(lease)
        return journey.flight is not None

    def park(self, journey: Journey, landed: Landed) -> bool:
        """Have the usher read the answer, and call ``landed(whole)`` from its thread; see ``Transport.park``.

        False: travel on. True: nobody may touch the journey until then.
        """
        flight, lease = journey.flight, journey.lease
        return flight is not None and lease is not None and lease.engine.park(flight, landed)

    def land(self, journey: Journey) -> Sample | None:
        """The answer has come whole: its sample. Does not block. None: what has to be done now does; travel on."""
        trail, lease = journey.trail, journey.at
        try:
            segment = self._send(journey, landed=True)
            sample = self._delivered(trail, segment)
        except RolloutError as error:
            journey.error = error
            return None
        except BaseException:
            journey.lease = None
            self._fleet.release(lease)
            raise
        self._fleet.release(lease, answered=True, tokens=len(segment.output_ids), version=_version(segment))
        return sample

    # --- one request ---

    def _try(self, journey: Journey) -> Sample | None:
        """One request on a lease, and once more at once after a keep-alive race. None: get another lease."""
        trail, lease = journey.trail, journey.at
        retry = False
        segment: Segment | None = None
        try:
            while True:
                try:
                    segment = self._send(journey)
                    return self._delivered(trail, segment)
                except RolloutError as error:
                    verdict = self._judged(trail, lease, error)
                retry = verdict is not None and verdict.again
                if verdict is None or not verdict.again:
                    return self._gave_up(trail, called_off=verdict is None)
                if not verdict.fresh:
                    break
        finally:
            journey.lease = None
            tokens = 0 if segment is None else len(segment.output_ids)
            got = segment is not None
            self._fleet.release(lease, answered=got, tokens=tokens, version=_version(segment), retry=retry)
        trail.note(Doing.REST, self._clock.monotonic())
        self._fleet.rest(trail.order, verdict.delay_s, trail.deadline)
        return None

    def _depart(self, trail: Trail, lease: Lease) -> None:
        trail.sent_at = self._clock.monotonic()
        trail.engine = lease.engine.front
        lease.rid = trail.rid
        trail.note(Doing.ENGINE, trail.sent_at)

    def _send(self, journey: Journey, *, landed: bool = False) -> Segment:
        """Make the request, or take the answer of the one that was sent, or raise what came of that.

        ``landed``: that has come whole, and nothing blocks.
        """
        trail, lease = journey.trail, journey.at
        flight, error = journey.take()
        if error is not None:
            raise error
        if flight is None:
            self._depart(trail, lease)
        try:
            if landed and flight is not None:
                segment = lease.engine.take_in(flight, trail.order.prompt, trail.rid)
            else:
                segment = lease.engine.generate(
                    trail.order.prompt,
                    trail.rid,
                    deadline=trail.deadline,
                    dp_rank=lease.dp_rank,
                    fresh=trail.fresh,
                    group=trail.order.group,
                    flight=flight,
                )
        finally:
            trail.engine_s += self._clock.monotonic() - trail.sent_at
            trail.fresh = False
        kind = segment.finish.type
        if kind not in _FINISHES and not self._fleet.calls_off(trail.order):
            words = f"an unknown finish_reason {kind!r}" if kind else "no finish_reason"
            raise ProtocolError(f"the answer has {words}", engine=trail.engine, rid=trail.rid)
        trail.attempts += 1
        overlapped = self._fleet.expected_since > trail.sent_at  # by an update that let it go on
        return _unsure(segment) if overlapped else segment

    # --- ends ---

    def _delivered(self, trail: Trail, segment: Segment) -> Sample:
        """A whole answer. An abort that nobody asked for, with an error status, is the engine's error."""
        finish = segment.finish
        failed = finish.type == "abort" and (finish.status_code or 0) >= 400
        if failed and not self._fleet.calls_off(trail.order):
            words = f"the engine ended the sample ({finish.status_code}): {finish.message}"
            trail.last_error = EngineAbortError(words, engine=trail.engine, rid=trail.rid, attempts=trail.attempts)
            return replace(self._grown(trail, segment), status=Status.FAILED, error=trail.last_error)
        return self._grown(trail, segment)

    def _grown(self, trail: Trail, segment: Segment) -> Sample:
        order = trail.order
        if order.base is None:
            return make(order.prompt, order.index, order.member, segment, **self._stamp(trail))
        return extend(order.blank(), segment, **self._stamp(trail))

    def _turned_away(self, trail: Trail, turned: Turned) -> Sample:
        if turned in {Turned.ABORTED, Turned.CLOSED}:
            return self._ended(trail, None)
        if turned is Turned.UNAVAILABLE:
            return self._ended(trail, self._fleet.unavailable())
        return self._ended(trail, self._out_of_time(trail))

    def _gave_up(self, trail: Trail, *, called_off: bool) -> Sample:
        if called_off:
            return self._ended(trail, None)
        error = trail.last_error
        if error is not None and _cut(error) is Cut.DEADLINE:
            error = self._out_of_time(trail)
        return self._ended(trail, error)

    def _ended(self, trail: Trail, error: RolloutError | None) -> Sample:
        """A sample without an answer: ABORTED, or FAILED with ``error``."""
        blank = trail.order.blank()
        if error is None:
            return replace(blank, **self._stamp(trail))
        error.attempts, error.rid = trail.attempts, error.rid or trail.rid
        return replace(blank, status=Status.FAILED, error=error, **self._stamp(trail))

    def _out_of_time(self, trail: Trail) -> DeadlineExceededError:
        last = f"; last: {trail.told.message}" if trail.told else ""
        error = DeadlineExceededError(f"the sample's deadline came{last}", engine=trail.engine, rid=trail.rid)
        error.__cause__ = trail.told
        return error

    def _stamp(self, trail: Trail) -> dict[str, Any]:
        total = self._clock.monotonic() - trail.order.admitted_at
        timing = Timing(total if trail.queued_s is None else trail.queued_s, trail.engine_s, total)
        before = trail.order.base.attempts if trail.order.base is not None else 0
        attempts = before + trail.attempts
        return {"rid": trail.rid, "engine": trail.engine, "attempts": attempts, "timing": timing}

    # --- failures ---

    def _judged(self, trail: Trail, lease: Lease, error: RolloutError) -> Verdict | None:
        """What to do after a failed request; None if it was called off. Aborts an orphan while the lease is held."""
        trail.learn(error)
        verdict = self._judge.judge(error, attempts=trail.attempts, broken_answers=trail.broken_answers)
        trail.attempts += verdict.counts
        trail.broken_answers += isinstance(error, ProtocolError)
        out_of_time, cut = _cut(error) is Cut.DEADLINE, _cut(error) in _CALLED_OFF
        if verdict.unreachable and not cut and not out_of_time:
            self._fleet.set_state(lease.engine.url, EngineState.DOWN, error.message)
        called_off = (cut or self._fleet.calls_off(trail.order)) and not verdict.definite
        if verdict.abort_old and not cut and (not called_off or trail.order.stopped):
            verdict = self._after_orphan(trail, lease, error, verdict)
        if called_off:
            return None
        if _failed_inside(error) and lease.engine.has_died():
            verdict = self._after_death(trail, lease, error, verdict)
        if out_of_time or not verdict.again:
            return replace(verdict, again=False)
        trail.rid = new_rid() if verdict.new_rid else trail.rid
        trail.avoid = lease.engine.url if verdict.elsewhere else None
        trail.fresh = verdict.fresh
        if _blameless(error) and self._fleet.first_time(lease.engine.url, "no local resources"):
            log.warning(
                "requests to %s wait for local resources: %s; raise RLIMIT_NOFILE", lease.engine.url, error.message
            )
        log.debug("sample %d/%d: %s; next: %s", trail.order.index, trail.order.member, error, verdict)
        return verdict

    def _after_orphan(self, trail: Trail, lease: Lease, error: RolloutError, verdict: Verdict) -> Verdict:
        """Abort the broken request. Where the engine turns out to have died with it, the sample may be to blame."""
        broken_at = self._clock.monotonic()
        trail.note(Doing.ORPHAN, broken_at)
        listens = self._abort_orphan(lease, trail.rid, error)
        if listens or not _broke_at_the_engine(error):
            return verdict
        return self._suspected(trail, lease, error, verdict, broken_at)

    def _after_death(self, trail: Trail, lease: Lease, error: RolloutError, verdict: Verdict) -> Verdict:
        """The engine died and had time to say so."""
        died_at = self._clock.monotonic()
        self._fleet.set_state(lease.engine.url, EngineState.DOWN, f"its core has died: {error.message}")
        return self._suspected(trail, lease, error, verdict, died_at)

    def _suspected(
        self, trail: Trail, lease: Lease, error: RolloutError, verdict: Verdict, broken_at: float
    ) -> Verdict:
        if not self._fleet.convicts(lease, broken_at):
            return replace(verdict, fresh=False, elsewhere=True)
        trail.last_error = _poisonous(trail)
        trail.last_error.__cause__ = error
        return replace(verdict, again=False)

    def _abort_orphan(self, lease: Lease, rid: str, error: RolloutError) -> bool:
        """The request may be running without anybody to take its answer: end it before the sample runs elsewhere.

        Returns False if nobody is there to be told: refused, or broken off too.
        """
        engine, patience_s = lease.engine, self._policy.orphan_abort_timeout_s
        over = _cut(error) is Cut.DEADLINE  # the sample runs nowhere else: it may end though the old one may run on
        limit = Deadline.after(self._clock, min(patience_s, _LATE_S) if over else patience_s)
        if _cut(error) is Cut.DEAD:  # it is out of the fleet already, and comes back only when proven idle
            self._fleet.note_orphan(engine.url, rid)
            return True
        try:
            engine.abort(rid, deadline=limit)
        except UnsupportedError as refusal:
            if self._fleet.first_time(engine.url, "cannot abort"):
                log.warning("engine %s cannot abort by id: broken requests may run on: %s", engine.url, refusal.message)
        except RolloutError as failure:
            if _blameless(failure) or (over and _cut(failure) is Cut.DEADLINE):
                self._fleet.note_orphan(engine.url, rid)
                return True
            return self._undelivered(engine, rid, failure)
        return True

    def _undelivered(self, engine: Engine, rid: str, failure: RolloutError) -> bool:
        """The abort did not reach the engine, or was refused; see ``_abort_orphan``."""
        phase = failure.phase if isinstance(failure, TransportError) else None
        if phase is Phase.REFUSED:
            self._fleet.set_state(engine.url, EngineState.DOWN, failure.message)
            return False
        self._fleet.note_orphan(engine.url, rid)
        word = "was refused" if phase is None else "could not be delivered"
        self._fleet.set_state(engine.url, EngineState.QUARANTINED, f"the abort of {rid} {word}: {failure.message}")
        return not _broke_at_the_engine(failure)


def _blameless(error: RolloutError) -> bool:
    """Whether it failed for want of descriptors or memory here."""
    return isinstance(error, TransportError) and error.phase is Phase.LOCAL


def _broke_at_the_engine(error: RolloutError) -> bool:
    """Whether the other side ended a request that it had: it died, or the connection did."""
    return isinstance(error, TransportError) and error.cut is None and error.phase in _AFTER_SENDING


def _failed_inside(error: RolloutError) -> bool:
    """Whether the engine says that something went wrong within it, as one does that is dying."""
    return isinstance(error, EngineHTTPError) and error.status == _INTERNAL


def _poisonous(trail: Trail) -> PoisonPromptError:
    engines = trail.order.life.died_on
    places = (
        f"{len(engines)} engines when they died"
        if len(set(engines)) == len(engines)
        else "one engine twice when it died"
    )
    what = f"sample {trail.order.index}/{trail.order.member} was on {places}"
    words = f"{what}, on {engines[-1]} as the only suspect: its prompt seems to kill engines; it is not sent again"
    return PoisonPromptError(words, engine=trail.engine, rid=trail.rid, engines=engines)


def _cut(error: RolloutError) -> Cut | None:
    """Why we ended the exchange ourselves, or None if that is not what happened."""
    return error.cut if isinstance(error, TransportError) else None


def _unsure(segment: Segment) -> Segment:
    """An engine without ``weight_versions`` (before 0.5.20) names the last version for all tokens: nobody knows."""
    if "weight_versions" in segment.meta_info:
        return segment
    return replace(segment, weight_spans=tuple(span._replace(version=None) for span in segment.weight_spans))


def _version(segment: Segment | None) -> str | None:
    return segment.weight_spans[-1].version if segment is not None and segment.weight_spans else None
