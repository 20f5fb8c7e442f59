"""What may be done after a failure: the whole table, the caps, and what a Retry-After is worth."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.config import RetryPolicy
from rolloutsync.errors import (
    ClientClosedError,
    Cut,
    DeadlineExceededError,
    EngineAbortError,
    EngineHTTPError,
    EngineUnavailableError,
    Phase,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
)
from rolloutsync.retry import Judge, Verdict, parse_retry_after
from tests.fakes import FakeClock

_POLICY = RetryPolicy(max_attempts=5, backoff_base_s=1.0, backoff_cap_s=15.0, retry_after_cap_s=60.0)
_CLOCK = FakeClock(epoch=1_800_000_000.0)


class _Fixed(random.Random):
    """Chance that always draws the same share of the way from low to high."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self._share = share

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self._share


def _judge(error: RolloutError, *, attempts: int = 0, broken: int = 0, share: float = 1.0, **policy: Any) -> Verdict:
    rules = RetryPolicy(**policy) if policy else _POLICY
    return Judge(rules, _CLOCK, _Fixed(share)).judge(error, attempts=attempts, broken_answers=broken)


def _broke(phase: Phase) -> TransportError:
    return TransportError("x", phase=phase)


def _said(status: int, **facts: Any) -> EngineHTTPError:
    return EngineHTTPError("x", status=status, **facts)


@pytest.mark.parametrize("phase", [Phase.REFUSED, Phase.CONNECT])
@pytest.mark.parametrize("attempts", [0, 4, 1000])
def test_connecting(phase: Phase, attempts: int) -> None:
    """Nothing was sent: anywhere, with the same rid, at no cost, at once, as often as engines are left."""
    verdict = _judge(_broke(phase), attempts=attempts)
    assert verdict == Verdict(again=True, counts=False, new_rid=False, elsewhere=True, unreachable=True)


def test_no_local_resources() -> None:
    """Nobody is to blame but us: the same engine stays live, after a pause."""
    verdict = _judge(_broke(Phase.LOCAL), attempts=2)
    assert verdict == Verdict(again=True, counts=False, new_rid=False, delay_s=4.0)


def test_the_keep_alive_race() -> None:
    """Once at once on a fresh socket, under a new rid, the old one aborted too, the engine not blamed."""
    verdict = _judge(_broke(Phase.RACE))
    assert verdict == Verdict(again=True, new_rid=True, abort_old=True, fresh=True)
    assert not verdict.elsewhere
    assert not verdict.unreachable
    assert verdict.delay_s == 0.0


@pytest.mark.parametrize("phase", [Phase.SENT, Phase.BODY])
def test_broken_after_it_was_sent(phase: Phase) -> None:
    """It may be running: abort the old rid where it went, then elsewhere under a new one; later ones with a pause."""
    first = _judge(_broke(phase))
    assert first == Verdict(again=True, counts=True, new_rid=True, abort_old=True, elsewhere=True)
    second = _judge(_broke(phase), attempts=1)
    assert (second.again, second.abort_old, second.new_rid, second.delay_s) == (True, True, True, 2.0)


def test_paused_is_not_an_attempt() -> None:
    """A 503 that says so: wait for the resume, however long it takes."""
    for attempts in (0, 4, 1000):
        verdict = _judge(_said(503, paused=True), attempts=attempts)
        assert (verdict.again, verdict.counts, verdict.abort_old) == (True, False, False)
        assert 0.0 < verdict.delay_s <= 2.0


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 503, 507, 529, 599])
def test_worth_another_try_after_a_while(status: int) -> None:
    """Backoff, and preferably another engine."""
    verdict = _judge(_said(status))
    assert (verdict.again, verdict.counts, verdict.new_rid, verdict.elsewhere) == (True, True, True, True)
    assert (verdict.abort_old, verdict.unreachable, verdict.delay_s) == (False, False, 1.0)


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_that_gave_up_leaves_the_request_running(status: int) -> None:
    """So its rid is aborted first."""
    verdict = _judge(_said(status))
    assert (verdict.again, verdict.abort_old, verdict.elsewhere, verdict.delay_s) == (True, True, True, 1.0)


@pytest.mark.parametrize("status", [300, 301, 302, 304, 307, 308, 400, 401, 403, 409, 410, 413, 414, 422, 431, 451])
def test_never_again(status: int) -> None:
    """The engine has refused this very request (B11); a redirect is a wrong URL (B37)."""
    assert _judge(_said(status)) == Verdict(again=False, definite=True)


@pytest.mark.parametrize("status", [404, 405])
def test_no_such_endpoint(status: int) -> None:
    """It will not appear."""
    assert _judge(UnsupportedError("x", status=status)) == Verdict(again=False, definite=True)


def test_an_answer_that_cannot_be_right_gets_one_more_chance() -> None:
    """As a broken body once, then the engine's words are the sample's error."""
    first = _judge(ProtocolError("x"))
    assert first == Verdict(again=True, counts=True, new_rid=True, abort_old=True, elsewhere=True)
    assert not _judge(ProtocolError("x"), attempts=1, broken=1).again


@pytest.mark.parametrize(
    "kind", [RolloutError, ClientClosedError, DeadlineExceededError, EngineAbortError, EngineUnavailableError]
)
def test_everything_else_is_final(kind: type[RolloutError]) -> None:
    """What has no rule is not retried."""
    assert not _judge(kind("x")).again


_COUNTING: list[RolloutError] = [_broke(Phase.RACE), _broke(Phase.SENT), _broke(Phase.BODY), _said(500), _said(429)]


@pytest.mark.parametrize("error", _COUNTING, ids=str)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_attempts_are_capped(error: RolloutError, most: int) -> None:
    """Five requests means five, whatever went wrong; what may be running is aborted all the same."""
    tries = 0
    while _judge(error, attempts=tries, max_attempts=most).again:
        tries += 1
    assert tries + 1 == most
    last = _judge(error, attempts=tries, max_attempts=most)
    assert last.abort_old == _judge(error).abort_old


def test_a_cut_of_ours_is_judged_by_its_phase() -> None:
    """Whoever cut it decides first; the verdict alone must still abort what may run."""
    verdict = _judge(TransportError("x", phase=Phase.SENT, cut=Cut.DEAD))
    assert (verdict.again, verdict.abort_old, verdict.elsewhere) == (True, True, True)


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempts", "longest"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0), (4, 15.0), (5000, 15.0)])
def test_backoff_doubles_up_to_its_cap_and_is_spread(attempts: int, longest: float) -> None:
    """Evenly between a quarter and all of it."""
    draws = [Judge(_POLICY, _CLOCK, random.Random(seed)).backoff(attempts) for seed in range(200)]
    assert all(longest / 4 <= draw <= longest for draw in draws)
    assert max(draws) - min(draws) > longest / 2
    fixed = [Judge(_POLICY, _CLOCK, _Fixed(share)).backoff(attempts) for share in (0.0, 1.0)]
    assert fixed == [longest / 4, longest]


def test_no_backoff_is_possible() -> None:
    """Zero is a policy too."""
    assert _judge(_said(500), backoff_base_s=0.0).delay_s == 0.0


def test_a_second_wave_is_spread() -> None:
    """256 refused at the same moment do not come back at the same moment (B04)."""
    judge = Judge(_POLICY, _CLOCK, random.Random(7))
    for after in (None, "2"):
        delays = [judge.judge(_said(503, retry_after=after), attempts=0, broken_answers=0).delay_s for _ in range(256)]
        bins = [int(delay / 0.05) for delay in delays]
        assert max(bins.count(number) for number in set(bins)) < 256 * 0.2


def _date(seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(_CLOCK.wall() + seconds, timezone.utc), usegmt=True)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("0", 0.0),
        ("3", 3.0),
        (" 3 ", 3.0),
        ("2.5", 2.5),
        ("3600", 3600.0),
        ("9999999999", 9999999999.0),
        ("-5", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("1e999", 0.0),
        ("abc", 0.0),
        ("3 seconds", 0.0),
        (_date(-86400), 0.0),
        (_date(30), 30.0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", 0.0),
        ("Xyz, 99 Foo 2026 99:99:99 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
        ("\ud83d", 0.0),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    """Seconds or a date; anything senseless is no wish at all (B13)."""
    assert parse_retry_after(header, _CLOCK) == pytest.approx(seconds, abs=1.0 if seconds == 30.0 else 0.0)


@given(st.text(max_size=40))
def test_no_retry_after_breaks_us(header: str) -> None:
    """Whatever a proxy writes there."""
    assert 0.0 <= parse_retry_after(header, _CLOCK) < float("inf")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("3", 3.0, 4.0),
        ("0.01", 0.25, 1.0),
        ("3600", 59.0, 60.0),
        ("9999999999", 59.0, 60.0),
        (_date(-86400), 0.25, 1.0),
        ("abc", 0.25, 1.0),
        ("nan", 0.25, 1.0),
    ],
)
def test_retry_after_is_obeyed_up_to_its_cap(header: str, least: float, most: float, share: float) -> None:
    """Never sooner than asked, never longer than the cap, a little spread; the normal backoff where it is senseless."""
    delay = _judge(_said(503, retry_after=header), share=share).delay_s
    assert least <= delay <= most


def test_the_longer_of_both_waits() -> None:
    """A short wish does not shorten the backoff."""
    assert _judge(_said(429, retry_after="1"), attempts=3).delay_s == 8.0


def test_a_cap_of_zero_ignores_the_header() -> None:
    """The backoff remains."""
    assert _judge(_said(429, retry_after="30"), retry_after_cap_s=0.0).delay_s == 1.0
