"""The vocabulary: what one step of a sequence sends, and what has to happen before the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SHOWN_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call, and what is waited for after it.

    Attributes:
        what: The step in words.
        method: HTTP method.
        path: Path with query.
        body: Sent as it is if bytes, as JSON if anything else, and not at all if None.
        name: Names a call whose answer is not waited for here; "" waits for it.
        answers: Names of earlier calls (or this one) that must have been answered when the step ends.
        ordered: Whether they must come in an order that is determined.
        load: Running and waiting requests that the engine must come to show when the step ends; None does not look.
        fresh: Whether it must be seen in a snapshot later than the first one after the step: by then the engine has
            looked into its mail, whatever older snapshots happened to show.
    """

    what: str
    path: str
    method: str = "POST"
    body: Any = None
    name: str = ""
    answers: tuple[str, ...] = ()
    ordered: bool = False
    load: tuple[int, int] | None = None
    fresh: bool = False

    def __str__(self) -> str:
        """The step on one line."""
        body = self.body if self.body is None or isinstance(self.body, bytes) else json.dumps(self.body)
        text = "" if body is None else f" {body!r}" if isinstance(body, bytes) else f" {body}"
        cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        return f"{self.what}: {self.method} {self.path}{cut}"

    @property
    def route(self) -> str:
        """Method and path without the query."""
        return f"{self.method} {self.path.partition('?')[0]}"


Load = tuple[int, int]


def call(what: str, path: str, body: Any = None, *, method: str = "POST", load: Load | None = None) -> Step:
    """Any call that is answered at once."""
    return Step(what=what, path=path, body=body, method=method, load=load)


def generate(what: str, body: Any) -> Step:
    """A generation whose answer is waited for."""
    return Step(what=what, path="/generate", body=body)


def begin(what: str, name: str, body: Mapping[str, Any], *, load: Load | None = None) -> Step:
    """A generation that goes on while later steps are taken."""
    return Step(what=what, path="/generate", body=body, name=name, load=load)


def abort(what: str, rid: str, *, answers: Sequence[str] = (), load: Load | None = None) -> Step:
    """An abort by rid."""
    body = {"rid": rid, "abort_all": False}
    return Step(what=what, path="/abort_request", body=body, answers=tuple(answers), load=load)


def in_order(step: Step, *answers: str) -> Step:
    """The same step, which brings these answers one after the other."""
    return replace(step, answers=answers, ordered=True)


def abort_all(what: str, *, answers: Sequence[str] = (), load: Load | None = None) -> Step:
    """An abort of everything."""
    body = {"rid": "", "abort_all": True}
    return Step(what=what, path="/abort_request", body=body, answers=tuple(answers), load=load)


def pause(mode: str, *, answers: Sequence[str] = ()) -> Step:
    """A pause."""
    return Step(what=f"pause {mode}", path="/pause_generation", body={"mode": mode}, answers=tuple(answers))


def resume(what: str, *, answers: Sequence[str] = (), load: Load | None = None) -> Step:
    """The end of a pause."""
    return Step(what=what, path="/continue_generation", body={}, answers=tuple(answers), load=load)


def slow_down(seconds: float) -> Step:
    """Makes every token take at least this long."""
    return Step(what="slow down", path="/slow_down", body={"forward_sleep_time": seconds})


def afresh(step: Step) -> Step:
    """The same step, whose load is looked for in later snapshots alone."""
    return replace(step, fresh=True)
