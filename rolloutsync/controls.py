"""Control verbs: one call to every engine, all at once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson

from rolloutsync.dialects.base import Call, unknown_load
from rolloutsync.errors import ControlError, NotIdleError, Phase, RolloutError, TransportError, shown
from rolloutsync.gate import GateMode
from rolloutsync.slot import EngineState
from rolloutsync.threads import fan_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rolloutsync.dialects.base import LoadReading
    from rolloutsync.engine import Engine
    from rolloutsync.fleet import Fleet

log = logging.getLogger("rolloutsync.controls")
_MEMORY = ("cuda_graph", "kv_cache", "weights")


class Controls:
    """Fans control calls out. Thread-safe. Nothing is re-sent."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name
        self._pause = object()  # the gate's token while we hold engines paused
        self.kept_closed = object()  # and while a drain has left it closed
        self._memory = object()  # while memory is given back: a request would kill the engine
        self._released: set[str] = set()  # memory tags; memory verbs are called one after the other

    def everywhere(
        self, verb: str, call_for: Callable[[Engine], Call], *, gone_ok: bool = False, strict: bool = False
    ) -> dict[str, Any]:
        """Make a call at every engine and block until all have answered; the answers by URL.

        With ``gone_ok`` an engine that refuses connections is taken out of the fleet and is no error. With ``strict`` a
        refusal within a 200 is one.

        Raises:
            ControlError: It failed at some; the others' answers are in it.
        """
        engines = self._fleet.engines()
        calls = [
            _bind(engine, call_for(engine) if engine.known else None, call_for, strict=strict) for engine in engines
        ]
        answers: dict[str, Any] = {}
        errors: dict[str, RolloutError] = {}
        for engine, outcome in zip(engines, fan_out(f"{self._name}-{verb}", calls), strict=True):
            try:
                answers[engine.url] = outcome.get()
            except RolloutError as error:
                if not (gone_ok and self._is_gone(engine, error)):
                    errors[engine.url] = error
        if errors:
            words = "; ".join(f"{url}: {error.message}" for url, error in errors.items())
            message = f"{verb} failed at {len(errors)} of {len(engines)} engines: {words}"
            raise ControlError(message, engine=next(iter(errors)), answers=answers, errors=errors)
        return answers

    def _is_gone(self, engine: Engine, error: RolloutError) -> bool:
        """Whether nobody listens there: nothing runs and nothing is paused there any more."""
        if not isinstance(error, TransportError) or error.phase is not Phase.REFUSED:
            return False
        self._fleet.set_paused(engine.url, False)
        self._fleet.set_state(engine.url, EngineState.DOWN, error.message)
        return True

    def loads(self) -> dict[str, LoadReading]:
        """Every engine's load; an UNKNOWN reading where it cannot be read."""
        engines = self._fleet.engines()
        outcomes = fan_out(f"{self._name}-loads", [_bind_load(engine) for engine in engines])
        return {engine.url: outcome.get() for engine, outcome in zip(engines, outcomes, strict=True)}

    def pause(self, mode: str) -> None:
        """Hold the gate, then pause every engine."""
        for engine in self._fleet.engines():
            if engine.known:
                engine.dialect.pause(mode)  # refuses an unknown mode before anything happens
        self._fleet.close_gate(self._pause, GateMode.HOLD, cuts=mode == "abort")
        if any(self._fleet.is_paused(engine.url) for engine in self._fleet.engines()):
            self._continue()  # a second mode on top of the first can block an engine
        try:
            done = self.everywhere("pause", lambda engine: engine.dialect.pause(mode), gone_ok=True)
        except ControlError as error:
            unsure = [url for url, reason in error.errors.items() if isinstance(reason, TransportError)]
            self._note_paused([*error.answers, *unsure], paused=True)  # no answer: it may be paused all the same
            raise
        self._note_paused(done, paused=True)

    def resume(self) -> None:
        """Continue every engine, then open the gate."""
        self._continue()
        self.reopen()

    def _continue(self) -> None:
        try:
            done = self.everywhere("resume", lambda engine: engine.dialect.resume(), gone_ok=True)
        except ControlError as error:
            self._note_paused(error.answers, paused=False)
            raise
        self._note_paused(done, paused=False)

    def reopen(self) -> None:
        """Open the gate again after a pause, or after a drain that kept it closed."""
        self._fleet.open_gate(self._pause, self.kept_closed)

    def _note_paused(self, urls: Iterable[str], *, paused: bool) -> None:
        for url in urls:
            self._fleet.set_paused(url, paused)

    def let_go(self, url: str) -> None:
        """Continue an engine that we hold paused, before it is removed: nobody else would."""
        engine = next((engine for engine in self._fleet.engines() if engine.url == url), None)
        if engine is None or not self._fleet.is_paused(url):
            return
        try:
            engine.call(engine.dialect.resume())
        except RolloutError as error:
            log.warning("engine %s is removed while paused, and could not be continued: %s", url, error.message)

    def release_memory(self, tags: Iterable[str] | None) -> None:
        """Give memory back everywhere; refused unless every engine is proven idle: a busy one dies of it."""
        chosen = _read_tags(tags)
        unproven = self._fleet.unproven()
        if unproven:
            advice = "call abort_until_idle(keep_closed=True) first, resume() after"
            raise NotIdleError(f"release_memory needs proof of idle, which is missing for {unproven}: {advice}")
        for engine in self._fleet.engines():
            if engine.known:
                engine.dialect.release_memory(chosen)  # refuses tags that it cannot release before anything happens
        self._fleet.close_gate(self._memory, GateMode.HOLD)
        self._released |= set(_MEMORY if chosen is None else chosen)
        self.everywhere("release_memory", lambda engine: engine.dialect.release_memory(chosen), gone_ok=True)

    def resume_memory(self, tags: Iterable[str] | None) -> None:
        """Take memory again everywhere; without tags what we released: an engine dies of a tag that is not released."""
        chosen = _read_tags(tags)
        if chosen is None and self._released:
            chosen = sorted(self._released)
        self.everywhere("resume_memory", lambda engine: engine.dialect.resume_memory(chosen), gone_ok=True)
        self._pause_again()
        self._released -= set(_MEMORY if chosen is None else chosen)
        if not self._released:
            self._fleet.open_gate(self._memory)

    def _pause_again(self) -> None:
        """Some engines end a pause when they have their memory again; whoever paused them still counts on it."""
        for engine in self._fleet.engines():
            again = engine.dialect.pause_after_memory
            if again is not None and self._fleet.is_paused(engine.url):
                engine.call(again)


def _read_tags(tags: Any) -> list[str] | None:
    if tags is None:
        return None
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise TypeError(
            f"tags must be a list of strings such as ['weights', 'kv_cache'], or None for all; got {shown(tags)}"
        )
    return list(tags)


def control_call(path: Any, json: Any, method: Any) -> Call:
    """A call to any endpoint, checked."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise ValueError(f"path must be a string that begins with '/', got {shown(path)}")
    if method not in {"POST", "GET"}:
        raise ValueError(f"method must be 'POST' or 'GET', got {shown(method)}")
    body = None if method == "GET" else orjson.dumps({} if json is None else json, option=orjson.OPT_SERIALIZE_NUMPY)
    return Call(method=method, path=path, body=body, admin=True)


def _bind(engine: Engine, call: Call | None, call_for: Callable[[Engine], Call], *, strict: bool) -> Callable[[], Any]:
    """The call, or how it is made once it is known what the engine speaks."""

    def make() -> Any:
        engine.know()
        made = call or call_for(engine)
        answer = engine.call(made)
        refusal = engine.dialect.weights.refusal(answer) if strict else None
        if refusal is not None:
            raise RolloutError(f"{made.path} was refused: {refusal}", engine=engine.url)
        return answer

    return make


def _bind_load(engine: Engine) -> Callable[[], LoadReading]:
    def read() -> LoadReading:
        try:
            return engine.load()
        except RolloutError as error:
            return unknown_load(error.message)

    return read
