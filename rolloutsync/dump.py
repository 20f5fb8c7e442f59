"""The dump: who waits for what, in words, for a person with a live process that does not move."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from rolloutsync.audit import Audit
    from rolloutsync.slot import EngineStatus

_FRAMES = 6
_HERE = str(Path(__file__).parent)


class Dump(str):
    """A text whose repr is the text itself, so that a debugger shows it readably."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def make_dump(name: str, gate: str, engines: Iterable[EngineStatus], audit: Audit) -> Dump:
    """The text: the gate, each engine, each open sample by what it does, possible orphans, our threads' stacks."""
    doing = Counter(sample.doing for sample in audit.open)
    summary = ", ".join(f"{words}: {count}" for words, count in doing.items())
    lines = [f"{name}: the gate is {gate}; open samples: {summary or 'none'}", "engines:"]
    lines += [f"  {_engine(engine)}" for engine in engines]
    lines += ["audit:", *(f"  {line}" for line in str(audit).splitlines())]
    lines += ["threads:", *(f"  {line}" for line in _threads(name))]
    return Dump("\n".join(lines))


def _engine(engine: EngineStatus) -> str:
    paused = ", paused by us" if engine.paused else ""
    reason = f": {engine.reason}" if engine.reason else ""
    return f"{engine.url} is {engine.state}{paused}, {engine.in_flight} of {engine.limit} in flight{reason}"


def _threads(name: str) -> list[str]:
    """Each stack once, with the number of our threads that stand in it."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, for debugging
    stacks: Counter[str] = Counter()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and (thread.name.startswith(f"{name}-") or thread is threading.main_thread()):
            kind = thread.name.removeprefix(f"{name}-").rstrip("0123456789").rstrip("-")
            stacks[f"{kind}: {_stack(frame)}"] += 1
    return [f"{count} x {stack}" for stack, count in stacks.most_common()]


def _stack(frame: FrameType) -> str:
    """Our own frames, the innermost first; where there are none, the innermost of all."""
    found = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
    ours = [(code, line) for code, line in found if code.co_filename.startswith(_HERE)]
    shown = ours[:_FRAMES] or found[:1]
    return " < ".join(f"{code.co_name} ({Path(code.co_filename).name}:{line})" for code, line in shown)
