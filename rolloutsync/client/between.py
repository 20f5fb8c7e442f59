"""The verbs between steps: drains, pauses, memory, anything that an engine can be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.config import check_number
from rolloutsync.controls import control_call
from rolloutsync.owner import CoreOwner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rolloutsync.idle import DrainReport

_SCOPES = ("engine", "own")
_LEARN_BEFORE_DRAIN_S = 2.0


class BetweenSteps(CoreOwner):
    """Verbs that concern whole engines. Thread-safe."""

    def abort_until_idle(
        self,
        timeout: float = 60.0,
        *,
        scope: str = "engine",
        keep_closed: bool = False,
        raise_on_timeout: bool = True,
    ) -> DrainReport:
        """Abort everything and prove that the engines are idle, by their own word. Blocks until then.

        No new request leaves meanwhile; ``generate`` calls of other threads get their partials, samples that still
        wait for an engine end ABORTED. Calls that overlap are one drain.

        Args:
            timeout: Seconds; then the sockets of what is left are shut, on which engines abort.
            scope: "engine": everything that runs there, whoever sent it. "own": this client's requests alone, and no
                proof beyond their answers.
            keep_closed: Leave the gate closed when idle: requests wait until ``resume()``.
            raise_on_timeout: False returns the report instead of raising.

        Returns:
            What was found, engine by engine; ``print`` shows a table.

        Raises:
            NotIdleError: Not proven idle in time; names each engine and what remained, carries the report.
        """
        _check_scope(scope)
        check_number("timeout", timeout)
        core = self._open()
        deadline = Deadline.after(core.clock, timeout)
        core.ready(deadline.within(_LEARN_BEFORE_DRAIN_S))
        drain = core.drainer.drain_own if scope == "own" else core.drainer.drain
        token = core.controls.kept_closed if keep_closed else None
        return drain(deadline.within(timeout), keep_closed=token, raise_on_timeout=raise_on_timeout)

    def pause(self, mode: str = "abort") -> None:
        """Pause every engine, in "abort", "in_place" or "retract" mode; this client's requests wait until ``resume``.

        Raises:
            ControlError: Some engine did not answer, or refused; the gate stays closed until ``resume``.
        """
        self._ready().controls.pause(mode)

    def resume(self) -> None:
        """Continue every engine and let requests leave again, also after ``abort_until_idle(keep_closed=True)``.

        Raises:
            ControlError: Some engine did not answer, or refused; requests still wait.
        """
        self._ready().controls.resume()

    def flush_cache(self) -> None:
        """Empty every engine's prefix cache. A busy engine refuses.

        Raises:
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.everywhere("flush_cache", lambda engine: engine.dialect.flush)

    def release_memory(self, tags: Iterable[str] | None = None) -> None:
        """Make every engine give GPU memory back ("weights", "kv_cache", ...; None: all).

        Raises:
            NotIdleError: Not proven idle behind a closed gate: a busy engine dies of it.
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.release_memory(tags)

    def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        """Make every engine take GPU memory again.

        Raises:
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.resume_memory(tags)

    def control(self, path: str, json: Any = None, *, method: str = "POST") -> dict[str, Any]:
        """Call any endpoint of every engine, with the admin key where there is one. Never re-sent.

        Args:
            path: Such as "/load_lora_adapter".
            json: The request body; None sends ``{}`` with POST.
            method: "POST" or "GET".

        Returns:
            The answers by URL: JSON, or text where it is not JSON.

        Raises:
            ControlError: It failed at some engine; the others' answers are in it.
        """
        call = control_call(path, json, method)
        return self._ready().controls.everywhere(f"{method} {path}", lambda _: call)


def _check_scope(scope: Any) -> None:
    if scope not in _SCOPES:
        raise ValueError(f"scope must be one of {_SCOPES}, got {scope!r}")
