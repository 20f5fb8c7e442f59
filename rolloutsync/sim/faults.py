"""Faults that a test switches on: what goes wrong, how often, for which calls."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

GENERATE = "/generate"
ABORT = "/abort_request"
LOADS = "/v1/loads"

DEFAULT_PATHS: Mapping[str, str] = {
    "status": GENERATE,
    "hang": GENERATE,
    "drop": GENERATE,
    "reset": GENERATE,
    "truncate": GENERATE,
    "drip": GENERATE,
    "delay": GENERATE,
    "interim": GENERATE,
    "wrong_id": GENERATE,
    "error_200": GENERATE,
    "paused_503": GENERATE,
    "ignore_abort": ABORT,
    "stale_weights": "/update_weights_from_disk",
    "crash": GENERATE,
    "stuck_load": LOADS,
    "freeze": "",
}
KINDS = tuple(DEFAULT_PATHS)
_OUTER_ID = re.compile(r"generate-tokens-(.+)|cmpl-(.+)-\d+")
STANDING = ("freeze", "stuck_load", "stale_weights")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Frozen; raises `ValueError` naming field and value.

    Kinds:
        status: Answers `status` with `headers` and `body`; `after=True` runs the call first, `early=True` answers
            before the request body was read and then resets the connection.
        hang: Never answers; `after=True` runs the call all the same.
        drop: Closes the connection after `seconds`, while the generation goes on.
        reset: Resets the connection instead of running the call, or with `after=True` instead of answering it.
        truncate: Sends the true Content-Length, `bytes` bytes of the body, and closes.
        drip: Sends the answer `bytes` bytes at a time, every `seconds`; `headers_too=True` drips the headers as well.
        delay: Waits `seconds` before it runs the call, or with `after=True` before it answers.
        interim: Sends the informational answer `status` (103) first.
        wrong_id: Answers with `body` (a string) as the answer's id.
        error_200: Answers 200 with `body`, an error object if not given.
        paused_503: Answers 503 "paused" instead of parking, while the engine is paused.
        ignore_abort: Answers an abort with 200 and forgets it.
        stale_weights: Reports the new version, but keeps the old weights (the checksum tells).
        crash: Ends the process at once; with vLLM its core: 500 for what is in flight, and the end a little later.
        stuck_load: Reports at least one running request, until cleared.
        freeze: Hangs the scheduler until cleared, or for `seconds`.

    Attributes:
        kind: One of `KINDS`.
        times: How many calls it hits; None for ever. Freeze, stuck_load and stale_weights last until cleared.
        skip: How many matching calls it lets pass first.
        path: Which endpoint; None is the one that the kind is about, or those with vLLM, "*" any.
        rid: Only a generation or abort with exactly this id, as its caller gave it.
        prompt: Only a generation whose text contains this, or whose ids start with these.
        status: HTTP status.
        headers: Extra headers of the answer.
        body: JSON body of the answer, or text.
        seconds: Duration, per kind.
        bytes: Number of bytes, per kind.
        after: Run the call first.
        early: Answer before the request body was read.
        headers_too: Drip the headers as well.
    """

    kind: str
    times: int | None = 1
    skip: int = 0
    path: str | None = None
    rid: str | None = None
    prompt: str | tuple[int, ...] | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    seconds: float = 0.0
    bytes: int = 1
    after: bool = False
    early: bool = False
    headers_too: bool = False

    def __post_init__(self) -> None:
        self._require("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        self._require("times", self.times is None or self.times >= 1, "None or at least 1")
        self._require("skip", self.skip >= 0, "at least 0")
        self._require("seconds", self.seconds >= 0, "at least 0")
        self._require("bytes", self.bytes >= 0, "at least 0")
        self._require("status", self.status is None or 100 <= self.status <= 599, "in [100, 599]")
        if self.kind == "status":
            self._require("status", self.status is not None, "given for kind 'status'")

    def _require(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Fault:
        """Makes one of JSON values.

        Raises:
            ValueError: Not an object, an unknown field or a bad value.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a fault must be a JSON object, got {values!r}")
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown fields of a fault: {', '.join(unknown)}")
        prompt = values.get("prompt")
        return cls(**values | {"prompt": tuple(prompt) if isinstance(prompt, list) else prompt})

    def hits(self, path: str, role: str, body: Any) -> bool:
        """Returns whether it is about this call.

        Args:
            path: The call's.
            role: The path that SGLang has for the same.
            body: The decoded body, or None.
        """
        if self.path not in (None, path, "*") or (self.path is None and DEFAULT_PATHS[self.kind] != role):
            return False
        call = body if isinstance(body, dict) else {}
        return self._hits_rid(call) and self._hits_prompt(call)

    def _hits_rid(self, call: Mapping[str, Any]) -> bool:
        return self.rid is None or self.rid in _rids(call)

    def _hits_prompt(self, call: Mapping[str, Any]) -> bool:
        if self.prompt is None:
            return True
        if isinstance(self.prompt, str):
            return self.prompt in str(call.get("text") or call.get("prompt") or "")
        ids = call.get("input_ids") or call.get("token_ids") or call.get("prompt") or []
        lists = [item for item in [ids, *ids] if isinstance(item, list)]
        return any(tuple(item[: len(self.prompt)]) == self.prompt for item in lists)


def _rids(call: Mapping[str, Any]) -> set[str]:
    """The ids in a call, and what its caller called them where vLLM puts something around it."""
    given = [call.get(name) for name in ("rid", "request_id", "request_ids")]
    rids = {str(each) for value in given for each in (value if isinstance(value, list) else [value]) if each}
    matches = [match for rid in rids if (match := _OUTER_ID.fullmatch(rid))]
    return rids | {match[1] or match[2] for match in matches}


@dataclass
class Entry:
    """A fault that is switched on."""

    number: int
    fault: Fault
    left: int | None
    skip: int
    hits: int = 0

    def row(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"id": self.number, "left": self.left, "hits": self.hits, "fault": self.fault.to_dict()}


class FaultBook:
    """The faults of one engine, in the order in which they were switched on."""

    def __init__(self, freeze: Callable[[], None], thaw: Callable[[], None], roles: Mapping[str, str]) -> None:
        self._roles = roles
        self._entries: list[Entry] = []
        self._numbers = itertools.count(1)
        self._freeze = freeze
        self._thaw = thaw

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, fault: Fault) -> Entry:
        """Switches one on."""
        left = None if fault.kind in STANDING else fault.times
        entry = Entry(next(self._numbers), fault, left, fault.skip)
        self._entries.append(entry)
        if fault.kind == "freeze":
            self._freeze()
        return entry

    def clear(self, number: int | None = None) -> None:
        """Switches one off, or all."""
        gone = [entry for entry in self._entries if number in (None, entry.number)]
        self._entries = [entry for entry in self._entries if entry not in gone]
        if any(entry.fault.kind == "freeze" for entry in gone):
            self._thaw()

    def has(self, kind: str) -> bool:
        """Returns whether a fault of this kind is on."""
        return any(entry.fault.kind == kind for entry in self._entries)

    def needs_body(self) -> bool:
        """Returns whether a matcher looks into bodies."""
        return any(entry.fault.rid is not None or entry.fault.prompt is not None for entry in self._entries)

    def take(self, path: str, body: Any, *, early: bool, paused: bool) -> Fault | None:
        """Returns the first fault that hits a call, and counts the hit."""
        for entry in self._entries:
            fault = entry.fault
            if fault.kind in STANDING or fault.early != early or (fault.kind == "paused_503" and not paused):
                continue
            if fault.hits(path, self._roles.get(path, path), body) and self._counts(entry):
                return fault
        return None

    def _counts(self, entry: Entry) -> bool:
        if entry.skip > 0:
            entry.skip -= 1
            return False
        entry.hits += 1
        if entry.left is not None:
            entry.left -= 1
            if entry.left == 0:
                self._entries.remove(entry)
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Returns all that are on, as JSON values."""
        return [entry.row() for entry in self._entries]
