"""Threads with a name, a small stack and an owner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_STACK_BYTES = 512 * 1024
# _stack_lock guards: the process-wide threading.stack_size while we start a thread. Held across Thread.start only.
_stack_lock = threading.Lock()


def renew_after_fork() -> None:
    """Replace the lock that another thread of the parent may have held at the fork."""
    global _stack_lock  # noqa: PLW0603 - a lock made anew is the only way out of a lock held by nobody
    _stack_lock = threading.Lock()


def start_thread(name: str, target: Callable[[], None], *, stack_bytes: int = _STACK_BYTES) -> threading.Thread:
    """Start a daemon thread, with a small stack unless told otherwise: what users run needs a larger one.

    Raises:
        RuntimeError: The process may have no more threads ("can't start new thread").
    """
    thread = threading.Thread(name=name, target=target, daemon=True)
    with _stack_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class Outcome(Generic[T]):
    """What one branch of a fan-out came to: a value or an exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self.error: Exception | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Make the call and keep what it came to."""
        try:
            self._value = self._call()
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: handed to the caller by get()
            self.error = error
        finally:
            self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Block until it has ended, for at most ``seconds``; False if it has not."""
        return self._ended.wait(seconds)

    def get(self) -> T:
        """The value of an ended call, or its exception raised."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]  # ended without error: it is a T


def fan_out(name: str, calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
    """Run each call in a thread of its own and block until all have ended; the calls bound their own time.

    Where the process may have no more threads, the rest runs in this one.
    """
    outcomes = [Outcome(call) for call in calls]
    for number, outcome in enumerate(outcomes[1:]):
        try:
            start_thread(f"{name}-{number}", outcome.run)
        except RuntimeError:
            outcome.run()
    for outcome in outcomes[:1]:
        outcome.run()
    for outcome in outcomes:
        outcome.wait(None)
    return outcomes
