"""The handle of one episode: each call of it is one turn, made in the episode's own thread on the episode's engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rolloutsync.config import check_number
from rolloutsync.errors import ClientClosedError, DeadlineExceededError, EpisodeInterrupt, shown
from rolloutsync.order import Group, Stop, Wanted
from rolloutsync.resume import Resumed
from rolloutsync.sample import Prompt, Sample, Status
from rolloutsync.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rolloutsync.clock import ActiveTime, Clock, Deadline

    Item = Prompt | Sample | Resumed
    Read = Callable[[Any, Any, Mapping[str, Any]], Item]

_ON_ERROR = ("raise", "return")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the episodes of one map need of a client. Everything in it is thread-safe.

    Attributes:
        name: Of the client, for thread names.
        job: Number of the map among the client's jobs.
        deadline: Of the whole map, on active time.
        cuts: How many engine-wide aborts there were so far.
        cuts_before: How many there were when the map began.
        closed: Whether the client is closed.
        read: (prompt, sampling parameters, request fields) to a prompt, checked, a partial, or a finished sample.
        make: What is wanted, until when, to its sample; blocks; raises ClientClosedError.
        abort: Aborts what the map has at the engines, within so many seconds.
        stop: Set when the map is left.
    """

    name: str
    job: int
    clock: Clock
    active: ActiveTime
    deadline: Deadline
    cuts: Callable[[], int]
    cuts_before: int
    closed: Callable[[], bool]
    read: Read
    make: Callable[[Wanted, Deadline], Sample]
    abort: Callable[[float], object]
    stop: Stop = field(default_factory=Stop)

    def interruption(self) -> str | None:
        """Why no episode may go on, or None."""
        if self.closed():
            return "the client was closed"
        if self.stop.is_set:
            return "its map was left"
        return "the engines were drained" if self.cuts() != self.cuts_before else None


class Turn:
    """What an episode is handed to generate with. Made by ``RolloutClient.map`` only.

    Thread-safe, so that an episode may try several continuations at once; they are recorded as they end.

    Attributes:
        index: Position of the item.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        self.index = index
        self._stage = stage
        self._lock = threading.Lock()  # guards: _begun, _samples, _reason, _ended
        self._begun = 0
        self._samples: list[Sample] = []
        self._reason: str | None = None
        self._ended = False
        self._group: Group = Group(1, sticky=True)

    # --- for the episode ---

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        timeout: float | None = None,
        on_error: str = "raise",
        **request_fields: Any,
    ) -> Sample:
        """One turn: blocks until the model has answered.

        Args:
            prompt: One item of what ``RolloutClient.generate`` takes as a batch: the whole context, not what is new.
                A finished sample (of an earlier, interrupted run) is recorded and returned without a request; a
                partial goes on.
            sampling_params: Override those of the map key by key.
            timeout: Seconds for this turn; pauses by this client do not count.
            on_error: "raise": a failed sample's error is raised here. "return": the FAILED sample is returned.
            **request_fields: Override those of the map.

        Returns:
            COMPLETED or TRUNCATED (or FAILED, see ``on_error``); never a partial.

        Raises:
            ValueError, TypeError: Bad input, named; nothing was sent.
            RolloutError: The sample failed, see ``on_error``.
            EpisodeInterrupt: The engines were drained, the client closed or the map left, since the map began; also at
                each later call. What the model had said is in the transcript.
        """
        if on_error not in _ON_ERROR:
            raise ValueError(f"on_error of a turn must be one of {_ON_ERROR}, got {shown(on_error)}")
        if timeout is not None:
            check_number("timeout", timeout, open_end=True)
        self._check()
        try:
            item = self._stage.read(prompt, sampling_params, request_fields)
            sample = self._make(item, timeout)
        except ClientClosedError:
            raise self._interrupt("the client was closed") from None
        return self._record(sample, on_error)

    @property
    def transcript(self) -> Transcript:
        """The turns so far."""
        with self._lock:
            return Transcript(tuple(self._samples))

    @property
    def interrupted(self) -> bool:
        """Whether the next ``generate`` would be interrupted: a long tool may look, and leave early. Never blocks."""
        return self._look() is not None

    # --- for the map ---

    @property
    def reason(self) -> str | None:
        """Why the episode was interrupted, or None if it has not noticed."""
        with self._lock:
            return self._reason

    def begin(self) -> None:
        """Raise if the episode need not begin at all."""
        self._check()
        if self._stage.deadline.expired:
            raise DeadlineExceededError(f"item {self.index}: the map's time was up before its episode began")

    def end(self) -> None:
        """No turn is made any more; the engine is free of the episode."""
        with self._lock:
            self._ended = True
            self._group = Group(1, sticky=True)  # the old one lets go of its home

    # --- parts ---

    def _look(self) -> str | None:
        with self._lock:
            self._reason = self._reason or self._stage.interruption()
            return self._reason

    def _check(self) -> None:
        with self._lock:
            ended = self._ended
        if ended:
            raise RuntimeError(f"the episode of item {self.index} has ended: its turns cannot be used any more")
        reason = self._look()
        if reason is not None:
            raise self._interrupt(reason)

    def _interrupt(self, reason: str) -> EpisodeInterrupt:
        with self._lock:
            self._reason = self._reason or reason
        return EpisodeInterrupt(f"item {self.index}: {reason}")

    def _make(self, item: Item, timeout: float | None) -> Sample:
        stage, deadline = self._stage, self._stage.deadline.or_sooner(self._stage.active, timeout)
        with self._lock:
            number, self._begun = self._begun, self._begun + 1
            group = self._group
        if isinstance(item, Sample):  # of an earlier run; it counts, so that the seeds of later turns are the same
            return replace(item, index=self.index, member=number)
        if isinstance(item, Resumed):
            return stage.make(Wanted(item.prompt, self.index, number, group, item.base), deadline)
        return stage.make(Wanted(_asking_ids(item), self.index, number, group), deadline)

    def _record(self, sample: Sample, on_error: str) -> Sample:
        with self._lock:
            self._samples.append(sample)
        if sample.status is Status.ABORTED:
            raise self._interrupt(self._stage.interruption() or f"turn {sample.member} was cut short by an abort")
        if sample.error is not None and on_error == "raise":
            raise sample.error
        return sample


def _asking_ids(prompt: Prompt) -> Prompt:
    """A text's token ids are the engine's to tell: the transcript needs them."""
    if prompt.input_ids is not None or "return_prompt_token_ids" in prompt.fields:
        return prompt
    return replace(prompt, fields={**prompt.fields, "return_prompt_token_ids": True})
