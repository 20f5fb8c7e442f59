"""The error tree: everything pickles, nothing is long, and the drawing is complete."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from typing import Any

import pytest

from rolloutsync import errors
from rolloutsync.errors import (
    BatchError,
    CollectError,
    ControlError,
    Cut,
    EngineHTTPError,
    EngineLaunchError,
    EpisodeError,
    NotIdleError,
    Phase,
    RolloutError,
    TransportError,
    WeightUpdateError,
    clip,
)
from rolloutsync.idle import DrainReport
from rolloutsync.proof import IdleState
from rolloutsync.sample import Prompt, Sample, Status
from rolloutsync.sweep import EngineDrain
from rolloutsync.weight_report import EngineUpdate, UpdateReport, UpdateState

from .makers import prompt


def _tree(root: type[RolloutError]) -> list[type[RolloutError]]:
    ours = [kind for kind in root.__subclasses__() if kind.__module__.startswith("rolloutsync.")]
    return [root, *(below for kind in ours for below in _tree(kind))]


_KINDS = sorted(set(_tree(RolloutError)), key=lambda kind: kind.__name__)
_FACTS: dict[type[RolloutError], dict[str, Any]] = {
    BatchError: {"samples": [], "counts": {"FAILED": 1}},
    EpisodeError: {"episodes": [], "counts": {"FAILED": 1}},
    CollectError: {"collected": None, "counts": {"groups": 1, "partials": 2}},
    ControlError: {"answers": {"http://a": 1}, "errors": {"http://b": RolloutError("no", engine="http://b")}},
    TransportError: {"phase": Phase.BODY, "cut": Cut.DRAIN},
    EngineHTTPError: {"status": 429, "retry_after": "3", "paused": True},
    EngineLaunchError: {"log": "/tmp/e.log", "command": ("python", "-m", "engine"), "returncode": -9},
    WeightUpdateError: {"report": UpdateReport("12", "abort", (EngineUpdate("http://a", UpdateState.STALE),), 1.5)},
    NotIdleError: {"report": DrainReport((EngineDrain("http://a", IdleState.BUSY, rids=("r",)),), 1.5)},
}


class _StubbornError(Exception):
    """An exception that does not pickle, like those of HTTP libraries that hold sockets."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.lock = threading.Lock()


class _LopsidedError(Exception):
    """An exception that pickles but cannot be made again: its arguments are not what ``__init__`` wants."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def _made(kind: type[RolloutError], message: str = "it broke") -> RolloutError:
    return kind(message, engine="http://h:1", rid="ab" * 16, attempts=3, **_FACTS.get(kind, {}))


def _travelled(error: RolloutError) -> RolloutError:
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, RolloutError)
    return back


@pytest.mark.parametrize("kind", _KINDS)
def test_every_error_pickles(kind: type[RolloutError]) -> None:
    """Type, words, facts and cause are the same in the other process."""
    error = _made(kind)
    error.__cause__ = ConnectionResetError(104, "reset")
    back = _travelled(error)
    assert type(back) is kind
    assert str(back) == str(error) == f"it broke [engine=http://h:1, rid={'ab' * 16}, attempts=3]"
    assert (back.engine, back.rid, back.attempts, back.message) == ("http://h:1", "ab" * 16, 3, "it broke")
    assert isinstance(back.__cause__, ConnectionResetError)
    assert back.__cause__.args == (104, "reset")
    for name in _FACTS.get(kind, {}):
        assert repr(getattr(back, name)) == repr(getattr(error, name))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("cause", [_StubbornError("socket"), _LopsidedError(code=7)])
def test_a_cause_that_does_not_pickle_travels_as_its_words(kind: type[RolloutError], cause: Exception) -> None:
    """The error itself must arrive whatever it was caused by."""
    error = _made(kind)
    error.__cause__ = cause
    back = _travelled(error)
    assert type(back) is kind
    assert str(back.__cause__) == f"{type(cause).__name__}: {cause}"


def test_causes_travel_all_the_way_down() -> None:
    """An error caused by an error caused by a foreign one."""
    last = _made(TransportError)
    last.__cause__ = TimeoutError("slow")
    error = _made(EngineHTTPError)
    error.__cause__ = last
    back = _travelled(error)
    assert isinstance(back.__cause__, TransportError)
    assert back.__cause__.phase is Phase.BODY
    assert isinstance(back.__cause__.__cause__, TimeoutError)


@pytest.mark.parametrize("kind", _KINDS)
def test_errors_copy_and_are_caught_as_what_they_are(kind: type[RolloutError]) -> None:
    """``copy`` goes the way of pickle; a deadline is a TimeoutError too."""
    assert str(copy.copy(_made(kind))) == str(_made(kind))
    assert issubclass(kind, TimeoutError) == (kind is errors.DeadlineExceededError)


@pytest.mark.parametrize("payload", ["x" * 1_000_000, "漢" * 1_000_000, "\ud83d" * 100_000, "a\n" * 500_000])
@pytest.mark.parametrize("kind", _KINDS)
def test_messages_stay_short(kind: type[RolloutError], payload: str) -> None:
    """A log line never carries an engine's megabytes, and can always be written as UTF-8."""
    assert len(str(_made(kind, payload)).encode()) < 2000


def test_clip_says_what_is_missing() -> None:
    """A whole text is untouched; the cut never splits a character."""
    assert clip("abc", 3) == "abc"
    assert clip("abcdef", 3) == "abc... (3 more characters)"
    assert clip("漢字漢字", 7) == "漢字... (2 more characters)"
    assert clip("x\udc00", 10) == "x?"


def test_a_batch_error_travels_light() -> None:
    """It is raised with the complete list; a pickle carries the counts and eight failures at most."""
    failed = [Sample(prompt(), n, 0, status=Status.FAILED, error=RolloutError(f"no {n}")) for n in range(20)]
    whole = [Sample(prompt(), 99, 0, status=Status.COMPLETED), *failed]
    error = BatchError("20 of 21 failed", samples=whole, counts={"COMPLETED": 1, "FAILED": 20})
    assert len(error.samples) == 21
    back = pickle.loads(pickle.dumps(error))
    assert [sample.index for sample in back.samples] == list(range(8))
    assert str(back.samples[3].error) == "no 3"
    assert back.counts == {"COMPLETED": 1, "FAILED": 20}


def test_the_drawing_shows_the_tree() -> None:
    """Every class is in the module's docstring, indented below its base."""
    drawn: dict[str, int] = {}
    for line in str(errors.__doc__).splitlines():
        found = re.match(r"^    ([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if found:
            drawn[found[2]] = len(found[1]) // 4
    assert set(drawn) == {kind.__name__ for kind in _KINDS}
    for kind in _KINDS[:]:
        depth = len([base for base in kind.__mro__ if issubclass(base, RolloutError)]) - 1
        assert drawn[kind.__name__] == depth, kind.__name__


def test_a_batch_error_pickles_whatever_the_metadata_holds() -> None:
    """A lock in a failed sample's metadata stays behind; the error and the sample's own error travel."""
    prompt = Prompt(text="x", metadata={"lock": threading.Lock()})
    failed = Sample(prompt, 0, 0, status=Status.FAILED, error=RolloutError("why"), metadata=dict(prompt.metadata))
    revived = pickle.loads(pickle.dumps(BatchError("all failed", samples=[failed], counts={"FAILED": 1})))
    assert revived.samples[0].error.message == "why"
    assert revived.samples[0].metadata == {}
