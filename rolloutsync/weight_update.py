"""One weight update: any number of buckets to all engines, and what makes it whole at the end."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.config import parse_url
from rolloutsync.errors import WeightUpdateError
from rolloutsync.slot import EngineState
from rolloutsync.threads import start_thread
from rolloutsync.weight_member import run_all, run_together
from rolloutsync.weight_report import EngineUpdate, UpdateReport, UpdateState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rolloutsync.clock import Clock
    from rolloutsync.dialects.base import Call
    from rolloutsync.errors import RolloutError
    from rolloutsync.fleet import Fleet
    from rolloutsync.weight_groups import Groups
    from rolloutsync.weight_member import Member

DEFAULT_GROUP = "weight_update_group"
_BROKEN_OFF_S = 10.0
_INTERRUPTED_S = 1.0  # Ctrl-C, or a sys.exit


class WeightUpdate:
    """What ``client.weight_update()`` gives to its block. Thread-safe; buckets are sent one after another.

    Attributes:
        version: The label that the weights get.
        mode: How the engines were made quiet.
        report: What it came to; None until the block has ended.
    """

    def __init__(
        self,
        version: str,
        mode: str,
        members: Sequence[Member],
        *,
        fleet: Fleet,
        groups: Groups,
        cut: Callable[[str], object],
        clock: Clock,
        begun: float,
        name: str,
    ) -> None:
        self.version = version
        self.mode = mode
        self.report: UpdateReport | None = None
        self._members = list(members)
        self._fleet = fleet
        self._groups = groups
        self._cut = cut
        self._clock = clock
        self._begun = begun
        self._name = name
        self._lock = threading.Lock()  # guards: all that follows. Never held across I/O.
        self._sent: list[Future[None]] = []
        self._lost = ""  # why no broadcast can reach all engines any more
        self._ended = False
        self._used_groups: set[str] = set()

    @property
    def failed(self) -> dict[str, str]:
        """Why, for each engine that did not get a bucket so far, by URL."""
        return {member.url: member.reason for member in self._members if not member.ok}

    @property
    def first_error(self) -> RolloutError | None:
        """The error behind the first failure, where there is one."""
        return next((member.error for member in self._members if member.error is not None), None)

    # --- buckets ---

    def from_disk(self, path: str | os.PathLike[str], **fields: Any) -> None:
        """Make every engine load a checkpoint that it can read. Blocks until all have; failures are told at the end.

        Args:
            path: As the engines see it.
            **fields: Sent through, such as ``load_format``.
        """
        checkpoint = os.fspath(path)
        if not isinstance(checkpoint, str) or not checkpoint:
            raise ValueError(f"path must be a non-empty string or path, got {path!r}")
        calls = {m.url: m.engine.dialect.weights.from_disk(checkpoint, fields) for m in self._members}
        self._send("update from disk", calls, session=False).result()

    def from_tensor(self, tensors: Mapping[str, Sequence[str | bytes]], **fields: Any) -> None:
        """Give every engine tensors. Blocks until all have taken them: the memory behind handles must live until then.

        Args:
            tensors: By engine URL: what ``MultiprocessingSerializer`` made, one for each tensor-parallel rank.
            **fields: Sent through, such as ``load_format="flattened_bucket"``.

        Raises:
            ValueError: An engine of this update is missing, or the number of ranks is not its own.
        """
        given = {parse_url(url): list(ranks) for url, ranks in tensors.items()}
        members = [member for member in self._members if member.ok]
        for member in members:
            _check_ranks(member, given)
        calls = {m.url: m.engine.dialect.weights.from_tensor(given[m.url], fields) for m in members}
        self._send("update from tensors", calls, session=True).result()

    def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str = DEFAULT_GROUP,
        **fields: Any,
    ) -> Future[None]:
        """Make every engine receive a broadcast. Does not block: the caller is rank 0 and broadcasts now.

        A bucket is sent when the engines have answered for the one before, so broadcast in the order of the calls.

        Args:
            names: Of the tensors.
            dtypes: Of each, as torch names it (``"bfloat16"``, or the dtype itself).
            shapes: Of each.
            group_name: Of the group that ``init_group`` made.
            **fields: Sent through, such as ``load_format``.

        Returns:
            Ends when all engines have the bucket; its error is a ``WeightUpdateError`` that says which have not.

        Raises:
            WeightUpdateError: A rank was lost before: the broadcast would hang.
        """
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"got {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
        texts = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        self._groups.check(group_name)
        self._check_group(group_name)
        calls = {
            m.url: m.engine.dialect.weights.from_distributed(names, texts, shapes, group_name, fields)
            for m in self._members
        }
        with self._lock:
            self._used_groups.add(group_name)
        return self._send("update from a broadcast", calls, session=True, together=True)

    def _check_group(self, name: str) -> None:
        """Every rank must be there: one that is outside of the group, has failed or is gone makes a broadcast hang."""
        here, urls = {member.url for member in self._members}, self._groups.urls(name)
        for member in self._members:
            if urls is not None and member.url not in urls:
                member.fail(f"it is not in the weight group {name!r}")
            if not member.ok:
                self._lose(f"{member.url}: {member.reason}")
        for url in sorted((urls or here) - here):
            self._lose(f"{url}, a member of the weight group {name!r}, is not there")

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason

    def _send(self, what: str, calls: Mapping[str, Call], *, session: bool, together: bool = False) -> Future[None]:
        """Send a bucket in a thread of its own, after the one before."""

        def send(member: Member) -> None:
            if member.url in calls:
                member.apply(what, calls[member.url], self.version, session=session)

        before, future = self._enqueue(together=together)
        try:
            start_thread(f"{self._name}-update", lambda: self._run(before, future, send, together=together))
        except RuntimeError:
            future.set_exception(WeightUpdateError("no thread could be started for the update"))
            raise
        return future

    def _enqueue(self, *, together: bool) -> tuple[list[Future[None]], Future[None]]:
        """The bucket before, if there is one, and the new one."""
        future: Future[None] = Future()
        with self._lock:
            if self._ended:
                raise WeightUpdateError(f"the update to {self.version!r} has ended")
            if together and self._lost:
                raise WeightUpdateError(f"no broadcast can reach all engines any more; {self._lost}")
            before = self._sent[-1:]
            self._sent.append(future)
        return before, future

    def _run(
        self, before: list[Future[None]], future: Future[None], send: Callable[[Member], None], *, together: bool
    ) -> None:
        wait(before)
        try:
            if together:
                self._send_together(send)
            else:
                run_all(f"{self._name}-update", self._members, send)
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: handed to whoever waits
            future.set_exception(error)

    def _send_together(self, send: Callable[[Member], None]) -> None:
        if not self.failed:
            run_together(f"{self._name}-update", self._members, send, self._cut)
        if failed := self.failed:
            words = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
            self._lose(words)
            raise WeightUpdateError(f"the broadcast did not reach all engines: {words}", engine=next(iter(failed)))

    # --- the end ---

    def commit(self, verify: str | None) -> None:
        """Await the buckets, end the session, flush, compare, label, and say which engines have the weights."""
        wait(self._close())
        if self._lost:
            for member in self._members:
                member.fail(f"a broadcast lost a rank, so nobody has all of it; {self._lost}")
        holds = self.mode in {"hold", "wait"}
        self._all(lambda member: member.finish(holds_requests=holds))
        live = self._fleet.engines(EngineState.LIVE)
        for member in self._members:
            if not member.touched and member.engine not in live:  # it was stale before: a label does not mend that
                member.fail("no bucket was sent to it")
        if verify == "checksum":
            self._all(lambda member: member.sum_up())
            _compare(self._members)
        self._all(lambda member: member.label(self.version))
        self._settle()

    def break_off(self, error: BaseException) -> None:
        """The block raised: whatever was touched is stale, for nobody knows what was still to come."""
        sent, patience_s = self._close(), _BROKEN_OFF_S if isinstance(error, Exception) else _INTERRUPTED_S
        if wait(sent, patience_s).not_done:
            for member in self._members:
                self._cut(member.url)
            wait(sent, _BROKEN_OFF_S)
        if any(member.touched for member in self._members):
            for member in self._members:
                member.fail(f"the update was broken off by {type(error).__name__}")
            self._settle()
        else:
            self._give_up()

    def _close(self) -> list[Future[None]]:
        with self._lock:
            self._ended = True
            return list(self._sent)

    def _all(self, act: Callable[[Member], object]) -> None:
        run_all(f"{self._name}-update", [member for member in self._members if member.ok], act)

    def _give_up(self) -> None:
        """Leave failed engines as tidy as they let us: no open session, no group."""
        deadline = Deadline.after(self._clock, _BROKEN_OFF_S)
        run_all(f"{self._name}-update", self._members, lambda member: member.give_up(deadline))
        if self._lost:
            for name in self._used_groups:
                self._groups.destroy(name, quietly=True)

    def _settle(self) -> None:
        """Tell the fleet: from now on only engines with these weights get traffic."""
        fleet, members = self._fleet, {member.url: member for member in self._members}
        self._give_up()
        fleet.expected_version, fleet.expected_since = self.version, self._clock.monotonic()
        for member in self._members:
            self._settle_one(member)
        for engine in fleet.engines(EngineState.LIVE):
            if engine.url not in members:
                reason = f"stale: it joined while the others got weights {self.version!r}"
                fleet.set_state(engine.url, EngineState.QUARANTINED, reason)
        updates = [_told(engine.url, members.get(engine.url)) for engine in fleet.engines()]
        self.report = UpdateReport(self.version, self.mode, tuple(updates), self._clock.monotonic() - self._begun)

    def _settle_one(self, member: Member) -> None:
        """A quarantined engine that has the weights now is brought back by the watcher, as any other, and by it alone.

        1. The watcher sees work on an engine that it is to prove idle. 2. An update would make that engine live, and
        samples go there. 3. The watcher's abort_all ends them. Seen on SGLang, hence not done.
        """
        fleet, url = self._fleet, member.url
        if not member.ok:
            member.forget()
            reason = f"stale: {member.reason}"
            fleet.set_state(url, EngineState.QUARANTINED, reason)
            fleet.explain(url, reason)
        elif member.engine in fleet.engines(EngineState.QUARANTINED):
            fleet.explain(url, f"has weights {self.version!r} by now, and must be proven idle")


def _check_ranks(member: Member, given: Mapping[str, Sequence[str | bytes]]) -> None:
    size, url = member.engine.facts.tp_size, member.url
    if url not in given:
        raise ValueError(f"tensors has nothing for {url}, only for {list(given)}")
    if size is not None and len(given[url]) != size:
        raise ValueError(f"tensors has {len(given[url])} ranks for {url}, whose tp_size is {size}")


def _compare(members: Sequence[Member]) -> None:
    """Engines of the same make must agree; where a majority does, the others are wrong, else nobody knows who is."""
    makes: dict[tuple[object, ...], list[Member]] = defaultdict(list)
    for member in members:
        facts = member.engine.facts
        if member.ok:
            makes[facts.version, facts.tp_size, facts.dp_size].append(member)
    for alike in makes.values():
        counts = Counter(member.checksum for member in alike)
        (best, most), *_ = counts.most_common()
        for member in alike:
            if len(counts) > 1 and (member.checksum != best or most * 2 <= len(alike)):
                shown = ", ".join(f"{other.url} {(other.checksum or '')[:12]}" for other in alike)
                member.fail(f"checksum: engines that should be alike disagree ({shown})")


def _told(url: str, member: Member | None) -> EngineUpdate:
    if member is None:
        return EngineUpdate(url, UpdateState.ABSENT, detail="it was not there to be updated")
    state = UpdateState.UPDATED if member.ok else UpdateState.STALE
    return EngineUpdate(url, state, member.version, member.checksum, member.flushed, member.reason)
