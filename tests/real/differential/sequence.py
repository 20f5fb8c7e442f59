"""Makes sequences of steps, a seed for each, of which every outcome is determined.

A sequence knows what the engine is doing: which requests run and wait, what was sent during a pause and is parked, what
was aborted under one. Long requests outlast the sequence by far, short ones end at once, and each step says which
answers it must bring; so nothing depends on how fast an engine is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from . import bodies, calls, steps
from .bodies import generation, prompt
from .steps import Step

RUNNING_LIMIT = 4
QUEUE_LIMIT = 2
LONG_TOKENS = 1900
RACE_TOKENS = 40
SLOW_S = 0.005
BIG_PROMPTS = [what for what, body in bodies.GOOD.items() if len(body.get("input_ids", ())) > 1000]
PARKABLE = ("plain", "logprobs", "one token", "logprobs of the prompt", "a stop id", "text", "ids back")
LOGPROBS: list[dict[str, Any]] = [{}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 2}]

MODES = ("abort", "abort", "in_place", "in_place", "in_place", "retract", "retract", "retract")

Action = Callable[[], None]


class Sequence:
    """One sequence in the making."""

    def __init__(self, seed: int) -> None:
        self.steps: list[Step] = [steps.slow_down(SLOW_S)]
        self._random = random.Random(seed)
        self._stem = f"seq{seed:04d}"
        self._count = 0
        self._running: list[str] = []
        self._waiting: list[str] = []
        self._parked: list[str] = []
        self._marked: list[str] = []
        self._paused = ""
        self._ended: list[str] = []

    def extend_to(self, size: int) -> list[Step]:
        """Adds actions until there are so many steps, then lets everything end."""
        while len(self.steps) < size:
            self._random.choice(list(self._actions()))()
        if self._paused:
            self._resume()
        self._abort_all()
        return self.steps

    def _actions(self) -> Iterable[Action]:
        """What can be done now; what stands here twice comes more often."""
        return self._in_pause() if self._paused else self._at_work()

    def _at_work(self) -> Iterable[Action]:
        yield from [self._begin, self._begin, self._begin] * (len(self._waiting) < QUEUE_LIMIT)
        yield from [self._pause, self._pause, self._look, self._bad_call, self._flush, self._useless_abort]
        yield from [self._refused_at_once, self._needless_resume]
        if self._has_room(1):
            yield from [self._good, self._good, self._good, self._refused_later]
        if self._has_room(2):
            yield from [self._race, self._prefix, self._fill, self._fill]
        if self._running:
            yield from [self._abort, self._abort, self._duplicate]
            yield from [self._abort_all] * (len(self._running) < RUNNING_LIMIT)
        if self._waiting:
            yield from [self._pause, self._pause, *[self._abort] * 5]
        if len(self._running) == RUNNING_LIMIT and not self._waiting:
            yield from [self._first_come] * 4
        if self._ended and self._has_room(1):
            yield self._reuse

    def _in_pause(self) -> Iterable[Action]:
        yield from [self._resume, self._resume, self._look, self._bad_call]
        yield from [self._flush] * (self._paused != "in_place" or bool(self._running))
        yield from [self._refused_at_once, self._pause_again]
        if len(self._live()) + len(self._parked) < RUNNING_LIMIT:
            yield from [self._late, self._late, self._late_refusal]
        if self._parked:
            yield from [self._abort_parked, self._duplicate]
        if self._running or self._waiting:
            yield from [self._abort, self._abort, self._duplicate, self._abort_all]

    # What the engine is doing

    def _has_room(self, count: int) -> bool:
        return not self._waiting and len(self._running) + count <= RUNNING_LIMIT

    def _live(self) -> list[str]:
        return [*self._running, *self._waiting]

    def _load(self) -> tuple[int, int] | None:
        return None if self._paused else (len(self._running), len(self._waiting))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < RUNNING_LIMIT:
            self._running.append(self._waiting.pop(0))

    def _name(self) -> str:
        self._count += 1
        return f"{self._stem}-{self._count:02d}"

    def _forget(self, names: Iterable[str]) -> None:
        for name in list(names):
            for group in (self._running, self._waiting):
                if name in group:
                    group.remove(name)
            self._ended.append(name)

    # Generations

    def _long(self, name: str, what: str) -> None:
        (self._running if self._has_room(1) else self._waiting).append(name)
        size = self._random.choice([3, 17, 60])
        fields = self._random.choice(LOGPROBS)
        body = generation(LONG_TOKENS, prompt(size, 11 * len(self.steps)), rid=name, **fields)
        self.steps.append(steps.afresh(steps.begin(what, name, body, load=self._load())))

    def _begin(self) -> None:
        self._long(self._name(), "a long request")

    def _fill(self) -> None:
        """As many as can run, and sometimes one more."""
        limit = RUNNING_LIMIT + self._random.choice([0, 1])
        while len(self._live()) < limit:
            self._begin()
        if self._waiting and self._random.random() < 0.5:
            self._abort()

    def _good(self) -> None:
        names = [what for what in bodies.GOOD if what not in BIG_PROMPTS or not self._running]
        what = self._random.choice(names)
        self.steps.append(steps.generate(what, bodies.GOOD[what]))

    def _refused_at_once(self) -> None:
        what = self._random.choice(list(bodies.REFUSED_AT_ONCE))
        self.steps.append(steps.generate(what, bodies.REFUSED_AT_ONCE[what]))

    def _refused_later(self) -> None:
        what = self._random.choice(list(bodies.REFUSED_LATER))
        self.steps.append(steps.generate(what, bodies.REFUSED_LATER[what]))

    def _reuse(self) -> None:
        rid = self._random.choice(self._ended)
        self.steps.append(steps.generate("a rid again that has ended", generation(2, prompt(4), rid=rid)))

    def _duplicate(self) -> None:
        rid = self._random.choice([*self._live(), *self._parked])
        body = generation(2, prompt(4), rid=rid)
        if self._random.random() < 0.3:
            body = generation(2, [prompt(4), prompt(5)], rid=[f"{self._stem}-free", rid])
        self.steps.append(steps.generate("a rid that is in use", body))

    def _race(self) -> None:
        slow, quick = self._name(), self._name()
        self.steps.append(steps.begin("the longer of two", slow, generation(RACE_TOKENS, prompt(4), rid=slow)))
        short = generation(2, prompt(4, 70), rid=quick)
        step = steps.begin("the shorter of two", quick, short, load=self._load())
        self.steps.append(steps.in_order(step, quick, slow))

    def _first_come(self) -> None:
        """Two wait; once a place is free, the first of them is first, by so much that no thread can mix them up."""
        first, second = self._name(), self._name()
        for place, name in enumerate((first, second), 1):
            body = generation(RACE_TOKENS, prompt(4, 70 + place), rid=name)
            self.steps.append(steps.begin("a short request waits", name, body, load=(RUNNING_LIMIT, place)))
        victim = self._random.choice(self._running)
        self._forget([victim])
        self.steps.append(steps.in_order(steps.abort("make room", victim, load=self._load()), victim, first, second))

    # Aborts

    def _abort(self) -> None:
        victim = self._random.choice([*self._live(), *self._waiting, *self._waiting])
        where = "running" if victim in self._running else "waiting"
        answers = self._after_abort([victim])
        self.steps.append(steps.abort(f"abort a {where} request", victim, answers=answers, load=self._load()))

    def _abort_all(self) -> None:
        answers = self._after_abort(self._live())
        self.steps.append(steps.abort_all("abort all", answers=answers, load=self._load()))

    def _after_abort(self, victims: list[str]) -> list[str]:
        """Books an abort; returns whose answers it brings at once."""
        held = [name for name in victims if self._paused == "in_place" and name in self._running]
        self._marked += [name for name in held if name not in self._marked]
        now = [name for name in victims if name not in held]
        self._forget(now)
        if not self._paused:
            self._admit()
        return now

    def _prefix(self) -> None:
        name = self._name()
        longer = f"{name}x"
        self._long(name, "a rid")
        self._long(longer, "a rid that begins with another")
        self.steps.append(steps.abort("abort by no more than a prefix", f"{name[:-1]}", load=self._load()))
        pair = [name, longer]
        self._forget(pair)
        self.steps.append(steps.abort("abort both by the shorter", name, answers=pair, load=self._load()))

    def _useless_abort(self) -> None:
        rid = self._random.choice(["nobody", self._stem, *self._ended[-1:]])
        self.steps.append(steps.abort("abort a rid that is not live", rid, load=self._load()))

    # Pauses

    def _pause(self) -> None:
        mode = self._random.choice(MODES)
        ended = self._live() if mode == "abort" else []
        self.steps.append(steps.pause(mode, answers=ended))
        self._forget(ended)
        self._enter(mode)

    def _pause_again(self) -> None:
        live = self._live()
        mode = self._random.choice(["in_place", "retract", *([] if live else ["abort"])])
        ended = self._marked if mode == "retract" else []
        self.steps.append(steps.pause(mode, answers=ended))
        self._forget(ended)
        self._marked = [] if ended else self._marked
        self._enter(mode)

    def _enter(self, mode: str) -> None:
        if mode == "retract":
            self._waiting += self._running
            self._running = []
        self._paused = mode

    def _resume(self) -> None:
        answers = [*self._marked, *self._parked]
        self._paused = ""
        self._forget(self._marked)
        self._admit()
        self._ended += self._parked
        self._marked, self._parked = [], []
        step = steps.resume("continue", answers=answers, load=self._load())
        self.steps.append(steps.afresh(step) if self._live() else step)

    def _needless_resume(self) -> None:
        self.steps.append(steps.resume("continue without a pause", load=self._load()))

    def _late(self) -> None:
        name, what = self._name(), self._random.choice(PARKABLE)
        body = {**bodies.GOOD[what], "rid": name}
        if "input_ids" in body:  # requests that start together do not find each other's prompts
            body["input_ids"] = prompt(5, 11 * len(self.steps))
        self._parked.append(name)
        self.steps.append(steps.begin(f"{what}, sent during a pause", name, body))

    def _late_refusal(self) -> None:
        name, what = self._name(), self._random.choice(list(bodies.REFUSED_LATER))
        self._parked.append(name)
        body = bodies.REFUSED_LATER[what]
        rid = [name, f"{name}-2"] if isinstance(body["input_ids"][0], list) else name
        self.steps.append(steps.begin(f"{what}, sent during a pause", name, {**body, "rid": rid}))

    def _abort_parked(self) -> None:
        name = self._random.choice(self._parked)
        self.steps.append(steps.abort("abort what is parked", name))

    # Everything else

    def _look(self) -> None:
        self.steps.append(self._random.choice(calls.LOOKS))

    def _bad_call(self) -> None:
        self.steps.append(self._random.choice(calls.BAD_CALLS))

    def _flush(self) -> None:
        self.steps.append(self._random.choice(calls.FLUSHES))


def sequence(seed: int, size: int) -> list[Step]:
    """Returns the sequence of a seed: always the same, at least `size` steps."""
    return Sequence(seed).extend_to(size)


def tour() -> list[Step]:
    """Returns every body and every call once, on an idle engine."""
    return [
        *(steps.generate(what, body) for group in bodies.ALL for what, body in group.items()),
        *calls.LOOKS,
        *calls.BAD_CALLS,
        *calls.FLUSHES,
    ]
