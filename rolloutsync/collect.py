"""collect: whole groups until enough are accepted, a few more in flight than needed, and the rest cut short."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.collected import Collected, tell
from rolloutsync.config import check_bool, check_count, check_has, check_number
from rolloutsync.errors import BatchError, ClientClosedError, CollectError, shown
from rolloutsync.order import Group, Wanted
from rolloutsync.progress import LOOK_S, Progress
from rolloutsync.resume import Resumed
from rolloutsync.sample import Prompt, Sample, Status, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor, Future

    from rolloutsync.batch import Item
    from rolloutsync.clock import Clock
    from rolloutsync.order import Order, Stop

_ABORT_S = 30.0
_LEAVING_S = 0.5
_PATIENCE = 8
_FINISHED = {Status.COMPLETED, Status.TRUNCATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments of one ``collect``, checked.

    Args:
        prompts: Items; a list or any iterable.
        n: Samples of each group.
        target: Groups to be accepted.
        accept: Judges a group; None accepts all.
        oversample: Groups in flight for each one that is missing.
        in_flight: Groups in flight, whatever is missing; takes the place of ``oversample``.
        executor: Where ``accept`` runs; None: in the caller's thread.
        timeout: Seconds of active time.
        progress: As for ``generate``.
        keep_partials: False: unfinished samples that come in lose their tokens and start over.
    """

    prompts: Iterable[Any]
    n: int
    target: int
    accept: Callable[[list[Sample]], object] | None = None
    oversample: float = 1.5
    in_flight: int | None = None
    executor: Executor | None = None
    timeout: float | None = None
    progress: bool | None = None
    keep_partials: bool = True

    def __post_init__(self) -> None:
        for name in ("n", "target"):
            check_count(name, getattr(self, name))
        check_number("oversample", self.oversample, least=1.0)
        if self.in_flight is not None:
            check_count("in_flight", self.in_flight)
        if self.timeout is not None:
            check_number("timeout", self.timeout, open_end=True)
        check_has("accept", self.accept, "__call__")
        check_has("executor", self.executor, "submit")
        if self.executor is not None and self.accept is None:
            raise ValueError(f"executor={shown(self.executor)} is for accept, which is None")
        check_bool("keep_partials", self.keep_partials)
        _check_prompts(self.prompts)

    def window(self, accepted: int) -> int:
        """How many groups may be undecided at once, with so many accepted."""
        if self.in_flight is not None:
            return self.in_flight
        missing = self.target - accepted
        return max(missing, math.ceil(missing * self.oversample - 1e-9))


def _check_prompts(prompts: Any) -> None:
    if isinstance(prompts, (str, bytes, dict, Prompt, Sample)) or getattr(prompts, "ndim", 2) == 1:
        kind = type(prompts).__name__
        raise TypeError(f"prompts is a single {kind}, not a list or an iterator of prompts: wrap it in a list")
    try:
        iter(prompts)
    except TypeError:
        raise TypeError(f"prompts must be a list or an iterator of prompts, got {prompts!r:.200}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a collector is given to work with.

    Attributes:
        read: Checks items, each for so many members.
        of_member: The prompt of one member of a fresh group: its seed is its own.
        admit: Takes samples on; each is delivered exactly once, from another thread.
        abort: Aborts what was admitted, within so many seconds for the answers; nobody else's requests are touched.
        stop: Set before that: what is delivered ABORTED afterwards is our own doing.
        deadline: On active time.
    """

    read: Callable[[list[Any], int], list[Item]]
    of_member: Callable[[Prompt, int], Prompt]
    admit: Callable[[list[Wanted], Callable[[Order, Sample], None]], None]
    abort: Callable[[float], object]
    stop: Stop
    clock: Clock
    deadline: Deadline


class _Row:
    """One group on its way."""

    def __init__(self, index: int, items: list[Item]) -> None:
        self.index = index
        self.samples = [_before(item, index, member) for member, item in enumerate(items)]
        self.open = {member for member, sample in enumerate(self.samples) if sample.status not in _FINISHED}
        self.verdict: bool | None = None
        group = Group(len(self.open))
        self.wanted = [_wanted(items[member], self.samples[member], group) for member in sorted(self.open)]

    def has(self, status: Status) -> bool:
        """Whether a member ended so."""
        return any(sample.status is status for sample in self.samples)


class Collector:
    """One ``collect``. ``run`` is called once, in the caller's thread; samples are delivered from others."""

    def __init__(self, plan: Plan, means: Means) -> None:
        self._plan = plan
        self._means = means
        self._source: Iterator[Any] = iter(plan.prompts)
        self._dry = False
        self._sent = False
        self._accepted = 0
        self._undecided = 0  # groups read, neither accepted nor rejected
        self._failed_in_a_row = 0  # groups without a sample that did not fail
        self._spoilt_in_a_row = 0  # groups with one that did
        self._verdicts: dict[int, Future[object]] = {}  # that are asked for, by the group's index
        self._bar = Progress(plan.target, plan.progress, means.clock, unit="group")
        # _changed's lock guards: _events, _open, _tokens, _interrupted, and members of rows whose sample is open.
        # Never held across I/O or a user's code.
        self._changed = threading.Condition()
        self._rows: list[_Row] = []
        self._events: deque[_Row] = deque()  # whole groups, and groups whose verdict is there
        self._open = 0
        self._tokens = 0
        self._interrupted = False

    def run(self) -> Collected:
        """Block until the target is met, or cannot be; nothing of it is left at the engines then."""
        try:
            ended = self._gather()
            self._leave()
        except Exception as error:
            self._leave()
            if not self._sent:
                raise
            raise self._error(error) from error
        except BaseException:  # Ctrl-C: the process wants to end, so nothing is waited for without a limit
            self._leave(_LEAVING_S)
            raise
        finally:
            self._bar.close()
        collected = self._collected(ended)
        tell(collected)
        return collected

    # --- until enough are accepted ---

    def _gather(self) -> str:
        while True:
            if (ended := self._ended()) is not None:
                return ended
            if self._room():
                try:
                    self._fill()
                except ClientClosedError:
                    if not self._sent:
                        raise
                    return "aborted"
            self._show()
            row = self._next()
            if row is not None:
                self._settle(row)

    def _ended(self) -> str | None:
        if self._accepted >= self._plan.target:
            return "target"
        with self._changed:
            if self._interrupted:
                return "aborted"
        if self._means.deadline.expired:
            return "timeout"
        return "source" if self._dry and not self._undecided else None

    def _room(self) -> bool:
        return not self._dry and self._undecided < self._plan.window(self._accepted)

    def _fill(self) -> None:
        """Read and send as many groups as there is room for; those of a list only when all of them are good."""
        batch: list[_Row] = []
        at_once = hasattr(self._plan.prompts, "__len__")
        while self._room() and not self._means.deadline.expired:
            batch += self._read()
            if not at_once:
                self._send(batch)
                batch = []
        self._send(batch)

    def _read(self) -> list[_Row]:
        """The next group, or none if the source is dry."""
        try:
            item = next(self._source)
        except StopIteration:
            self._dry = True
            return []
        row = _Row(len(self._rows), self._members(item, f"prompts[{len(self._rows)}]"))
        self._rows.append(row)
        self._undecided += 1
        return [row]

    def _members(self, item: Any, where: str) -> list[Item]:
        n = self._plan.n
        try:
            if not _is_group(item):
                return [self._member(one, member) for member, one in enumerate(self._means.read([item], n) * n)]
            if len(item) != n:
                raise ValueError(f"batch has {len(item)} samples, not n={n}")
            return self._means.read(list(item), 1)
        except (ValueError, TypeError) as error:
            raise type(error)(_named(str(error), where, group=_is_group(item))) from error

    def _member(self, item: Item, member: int) -> Item:
        return self._means.of_member(item, member) if isinstance(item, Prompt) else item

    def _send(self, rows: list[_Row]) -> None:
        wanted = [one for row in rows for one in row.wanted]
        with self._changed:
            self._open += len(wanted)
            self._events.extend(row for row in rows if not row.open)
        try:
            if wanted:
                self._means.admit(wanted, self._deliver)
        except Exception:  # nothing was taken
            with self._changed:
                self._open -= len(wanted)
            raise
        self._sent |= bool(rows)

    def _deliver(self, order: Order, sample: Sample) -> None:
        """Called by another thread, once for each sample. Does not block."""
        row = self._rows[order.index]
        with self._changed:
            self._tokens += len(sample.output_ids) - len(row.samples[order.member].output_ids)
            row.samples[order.member] = sample
            row.open.discard(order.member)
            self._open -= 1
            self._interrupted |= sample.status is Status.ABORTED and not self._means.stop.is_set
            if not row.open:
                self._events.append(row)
            self._changed.notify_all()

    def _next(self) -> _Row | None:
        """A group that something has happened to; None if time is up, or somebody should look after the bar."""
        left = self._means.deadline.remaining()
        if self._bar.wanted:
            left = LOOK_S if left is None else min(LOOK_S, left)
        with self._changed:
            if not self._events and not self._interrupted and self._undecided:
                self._means.clock.wait(self._changed, left)
            return self._events.popleft() if self._events and not self._interrupted else None

    def _show(self) -> None:
        with self._changed:
            tokens = self._tokens
        in_flight = 0 if self._means.stop.is_set else self._undecided
        rest = {"in_flight": in_flight, "rejected": len(self._rows) - self._undecided - self._accepted}
        self._bar.show(self._accepted, tokens, rest)

    # --- one group ---

    def _settle(self, row: _Row) -> None:
        """Judge a whole group, or have it judged, or take its verdict."""
        accept, executor = self._plan.accept, self._plan.executor
        if (verdict := self._verdicts.pop(row.index, None)) is not None:
            self._decide(row, verdict.result())
        elif row.has(Status.FAILED):
            self._decide(row, False)
            self._check_failures(row)
        elif accept is None:
            self._decide(row, True)
        elif executor is None:
            self._decide(row, accept(row.samples))
        else:
            future = self._verdicts[row.index] = executor.submit(accept, row.samples)
            future.add_done_callback(lambda _: self._judged(row))

    def _judged(self, row: _Row) -> None:
        with self._changed:
            self._events.append(row)
            self._changed.notify_all()

    def _decide(self, row: _Row, verdict: object) -> None:
        if verdict is None:
            raise TypeError("accept returned None: it must return whether the group is wanted")
        row.verdict = bool(verdict)
        self._accepted += row.verdict
        self._undecided -= 1
        if not row.has(Status.FAILED):
            self._failed_in_a_row = self._spoilt_in_a_row = 0

    def _check_failures(self, row: _Row) -> None:
        """Stop where nothing works: an endless source would be read to no end."""
        all_failed = all(sample.status is Status.FAILED for sample in row.samples)
        self._failed_in_a_row = self._failed_in_a_row + 1 if all_failed else 0
        self._spoilt_in_a_row += 1
        hopeless = self._failed_in_a_row == len(self._rows) and self._dry and not self._undecided
        patience = max(_PATIENCE, self._plan.window(0))
        if hopeless or self._failed_in_a_row >= patience or self._spoilt_in_a_row >= 4 * patience:
            first = next(sample.error for sample in row.samples if sample.error is not None)
            all_or_some = "every sample" if hopeless or self._failed_in_a_row >= patience else "some sample"
            words = f"{all_or_some} of the last {self._spoilt_in_a_row} groups failed; the last: {first}"
            counts = {Status.FAILED.value: len(row.samples)}
            raise BatchError(words, samples=list(row.samples), counts=counts) from first

    # --- the end ---

    def _leave(self, limit: float | None = None) -> None:
        """Abort what is left and await its answers, for at most about ``limit`` seconds or until they are there."""
        self._means.stop.set()
        for verdict in self._verdicts.values():
            verdict.cancel()
        with self._changed:
            left = self._open
        if left:
            self._means.abort(_ABORT_S if limit is None else limit)
        until = Deadline.after(self._means.clock, limit)
        with self._changed:
            while self._open and not until.expired:
                self._means.clock.wait(self._changed, until.remaining())
        self._show()

    def _error(self, error: Exception) -> CollectError:
        collected = self._collected("error")
        words = f"{type(error).__name__}: {error}"
        counts = collected.counts
        message = f"collect broke off with {len(collected.groups)} of {self._plan.target} groups: {words}"
        return CollectError(message, collected=collected, counts=counts, engine=getattr(error, "engine", None))

    def _collected(self, ended: str) -> Collected:
        lists: dict[str, list[list[Sample]]] = {"groups": [], "surplus": [], "rejected": [], "partials": []}
        for row in self._rows:
            lists[_list_of(row)].append(list(row.samples))
        return Collected(**lists, target=self._plan.target, ended=ended, read=len(self._rows))


def _list_of(row: _Row) -> str:
    if row.verdict is not None:
        return "groups" if row.verdict else "rejected"
    if row.has(Status.ABORTED):
        return "partials"
    return "rejected" if row.has(Status.FAILED) else "surplus"


def _is_group(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and all(isinstance(one, Sample) for one in item)


def _named(words: str, where: str, *, group: bool) -> str:
    """What is wrong with an item that was read as a batch of its own, in the words of this call."""
    if group:
        return where + words.removeprefix("batch")
    return where + words.removeprefix("batch[0]") if words.startswith("batch[0]") else words.replace("batch", "prompts")


def _before(item: Item, index: int, member: int) -> Sample:
    """The sample as it is before anything of this call is added."""
    if isinstance(item, Prompt):
        return begin(item, index, member)
    return replace(item.base if isinstance(item, Resumed) else item, index=index, member=member)


def _wanted(item: Item, before: Sample, group: Group) -> Wanted:
    prompt = item.prompt if isinstance(item, Resumed) else before.prompt
    return Wanted(prompt, before.index, before.member, group, before)
