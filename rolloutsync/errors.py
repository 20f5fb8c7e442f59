"""Every error that rolloutsync raises or puts into ``Sample.error``.

::

    RolloutError                      engine, rid, attempts, __cause__; all pickle
    ├── ClientClosedError             a verb on a closed client
    ├── ForkedError                   a job of the parent process, waited for in its child
    ├── EngineLaunchError             log, tail, command, returncode: an engine process did not start, or did not last
    ├── EngineUnavailableError        no live engine within the configured wait
    ├── DeadlineExceededError         (a TimeoutError) a sample, batch or control call ran out of time
    ├── TransportError                phase, cut: an exchange broke before its answer was complete
    ├── EngineHTTPError               status: the engine answered with an error of its own
    │   └── UnsupportedError          404/405: this engine does not have that endpoint
    ├── WrongServerError              what answers at that URL is no engine
    ├── ProtocolError                 200, but not an answer that can be right
    ├── EngineAbortError              the engine ended the sample, unasked, with an error
    ├── PoisonPromptError             engines: two of them died with this sample
    ├── BatchError                    samples, counts: see ``on_error``
    ├── EpisodeError                  episodes, counts: the same of a map
    ├── CollectError                  collected, counts: a collect broke off
    ├── ControlError                  answers, errors: a control verb failed at some engines
    ├── NotIdleError                  report: the drain ended without proof of idle
    └── WeightUpdateError             report: engines did not get the weights, or another update is running

``EpisodeInterrupt`` is no error but a BaseException: it ends an episode whose engines are drained.

Bad arguments are a plain ``ValueError`` or ``TypeError`` that names the field and the value.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

_MESSAGE_LIMIT = 1500


class Phase(str, Enum):
    """Where an exchange broke; ``rolloutsync.retry`` decides by it what may be done."""

    LOCAL = "no local resources"  # out of descriptors, ports or memory here: nothing sent, nobody to blame
    REFUSED = "connection refused"  # nothing sent, nobody listens
    CONNECT = "connecting"  # nothing sent
    RACE = "reused socket, no answer"  # the server may have closed it just before our request
    SENT = "request sent, no answer"
    BODY = "answer broken off"


class Cut(str, Enum):
    """Why we ended an exchange ourselves."""

    DEADLINE = "deadline"
    DRAIN = "drain ended without proof of idle"
    ABORT = "aborted by us"
    CLOSE = "client closed"
    DEAD = "engine found dead"


def clip(text: str, limit: int = _MESSAGE_LIMIT) -> str:
    """Shorten ``text`` to ``limit`` bytes of UTF-8 for a message or a log line, and say how much was left out.

    Lone surrogates, which cannot be written to a log, become question marks.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    kept = raw[:limit].decode("utf-8", "ignore")
    return f"{kept}... ({len(text) - len(kept)} more characters)"


def shown(value: object) -> str:
    """A bad value for a message, shortened: it may be a whole batch."""
    return clip(repr(value), 200)


class RolloutError(Exception):
    """Base of all rolloutsync errors.

    Attributes:
        message: The message alone, without engine, rid and attempts.
        engine: URL of the engine concerned, or None.
        rid: Request id concerned, or None.
        attempts: Requests sent for that sample so far.
    """

    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        """Moves the defaults of annotated attributes from the class to its instances.

        ``ray.get`` raises an instance of a class made of Ray's error and ours, which asks the original for every
        attribute that it does not find itself; a default on the class it would find.
        """
        super().__init_subclass__()
        own = {name: vars(cls)[name] for name in vars(cls).get("__annotations__", {}) if name in vars(cls)}
        cls._defaults = {**cls._defaults, **own}
        for name in own:
            delattr(cls, name)

    def __init__(
        self, message: str, *, engine: str | None = None, rid: str | None = None, attempts: int = 0, **facts: Any
    ) -> None:
        super().__init__(clip(message))
        self.message = clip(message)
        self.engine = engine
        self.rid = rid
        self.attempts = attempts
        for name, value in {**self._defaults, **facts}.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        known = {"engine": self.engine, "rid": self.rid, "attempts": self.attempts or None}
        tail = ", ".join(f"{name}={value}" for name, value in known.items() if value is not None)
        return f"{self.message} [{tail}]" if tail else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.message, self._travelling(), portable(self.__cause__))

    def _travelling(self) -> dict[str, Any]:
        """What a pickle carries beside the message."""
        return dict(vars(self))


def _without_cargo(sample: Any) -> Any:
    """The sample itself if it pickles, else without the user's metadata, which may hold anything."""
    try:
        pickle.loads(pickle.dumps(sample))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever the user's objects raise here means: they do not travel
        return replace(sample, metadata={}, prompt=replace(sample.prompt, metadata={}))
    return sample


def _revive(cls: type[RolloutError], message: str, facts: dict[str, Any], cause: BaseException | None) -> RolloutError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    vars(error).update(facts)
    error.__cause__ = cause
    return error


def portable(cause: BaseException | None) -> BaseException | None:
    """The cause itself if it pickles, else a stand-in with its type and text (foreign errors may hold sockets)."""
    if cause is None:
        return None
    try:
        pickle.loads(pickle.dumps(cause))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever a foreign class raises here means: it does not travel
        return RolloutError(f"{type(cause).__name__}: {cause}")
    return cause


class ClientClosedError(RolloutError):
    """The client is closed, or was closed while this waited."""


class ForkedError(RolloutError):
    """The object belongs to the parent process; its threads do not exist in this one."""


class EngineLaunchError(RolloutError):
    """An engine process did not start, was not ready in time, or ended too often; its text shows the log's tail.

    Attributes:
        log: Path of the file with all that the process wrote.
        tail: The end of that file, as far as this process wrote it.
        command: What was run, with keys blanked out.
        returncode: Exit code, or negative signal number; None if the process was running, or never ran.
    """

    log: str = ""
    tail: str = ""
    command: tuple[str, ...] = ()
    returncode: int | None = None

    def __str__(self) -> str:
        return f"{super().__str__()}\nthe end of {self.log}:\n{self.tail}" if self.tail else super().__str__()


class EngineUnavailableError(RolloutError):
    """No engine was live within the configured wait; the message has each URL and its last error."""


class DeadlineExceededError(RolloutError, TimeoutError):
    """A sample, a batch or a control call ran out of its time."""


class TransportError(RolloutError):
    """An exchange broke.

    Attributes:
        phase: How far it had come.
        cut: Why we ended it ourselves, or None where the other side or the network did.
    """

    phase: Phase = Phase.SENT
    cut: Cut | None = None


class EngineHTTPError(RolloutError):
    """The engine answered with a status other than 2xx.

    Attributes:
        status: HTTP status code.
        retry_after: The raw ``Retry-After`` header, or None.
        paused: The engine says that it is paused.
    """

    status: int = 0
    retry_after: str | None = None
    paused: bool = False


class UnsupportedError(EngineHTTPError):
    """The engine has no such endpoint (404 or 405)."""


class WrongServerError(RolloutError):
    """What answers at an engine's URL is something else, such as a router; the message says what to do."""


class ProtocolError(RolloutError):
    """The engine answered 200 with something that cannot be this request's answer."""


class EngineAbortError(RolloutError):
    """The engine ended the sample by itself, with an error, though nobody asked for an abort."""


class PoisonPromptError(RolloutError):
    """Two engines died with this sample, which ran as the only suspect on the second: the prompt seems to kill them.

    Attributes:
        engines: URLs of the engines that died, in that order.
    """

    engines: tuple[str, ...] = ()


class BatchError(RolloutError):
    """Samples failed and ``on_error`` says that this is an error.

    Attributes:
        samples: The complete list, in order (a pickle carries the first eight failed ones only).
        counts: Number of samples by status.
    """

    samples: list[Any]
    counts: dict[str, int]

    def _travelling(self) -> dict[str, Any]:
        failed = [sample for sample in self.samples if sample.error is not None]
        return {**vars(self), "samples": [_without_cargo(sample) for sample in failed[:8]]}


class CollectError(RolloutError):
    """A ``collect`` broke off: ``accept``, its source or an item raised (``__cause__``), or every sample failed.

    Attributes:
        collected: The ``Collected`` so far: nothing is lost. A pickle does not carry it.
        counts: Number of groups in each of its lists.
    """

    collected: Any = None
    counts: dict[str, int]

    def _travelling(self) -> dict[str, Any]:
        return {**vars(self), "collected": None}


class EpisodeError(RolloutError):
    """Episodes failed and ``on_error`` says that this is an error.

    Attributes:
        episodes: The complete list, in order (a pickle carries the first eight failed ones only, if they pickle).
        counts: Number of episodes by status.
    """

    episodes: list[Any]
    counts: dict[str, int]

    def _travelling(self) -> dict[str, Any]:
        failed = [episode for episode in self.episodes if episode.error is not None][:8]
        return {**vars(self), "episodes": [episode for episode in failed if portable(episode) is episode]}


class EpisodeInterrupt(BaseException):
    """An episode is to end now: its engines were drained, the client closed, or its map left.

    A BaseException, so that ``except Exception`` in a tool does not swallow it. ``try``/``finally`` runs as always.
    """


class ControlError(RolloutError):
    """A control verb failed at some engines.

    Attributes:
        answers: What the other engines answered, by URL.
        errors: The error of each engine where it failed, by URL. Where it timed out the engine's state is unknown;
            control calls are never re-sent.
    """

    answers: dict[str, Any]
    errors: dict[str, RolloutError]


class NotIdleError(RolloutError):
    """Engines could not be proven idle in time.

    Attributes:
        report: The ``DrainReport``: per engine the state, what remained and which rids.
    """

    report: Any = None


class WeightUpdateError(RolloutError):
    """Engines did not get the weights; they are quarantined as stale. Or the call cannot be made now.

    Attributes:
        report: The ``UpdateReport``, engine by engine; None where no update was made.
    """

    report: Any = None
