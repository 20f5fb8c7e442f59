"""A launched engine that is started again when it ends, on the same URL and with what it is to serve by then."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutsync.clock import Clock, Deadline
from rolloutsync.errors import DeadlineExceededError, EngineLaunchError
from rolloutsync.launch_process import told
from rolloutsync.threads import start_thread

if TYPE_CHECKING:
    from rolloutsync.launch import LaunchedEngine

log = logging.getLogger("rolloutsync.keeper")
_LONGEST_S = 30.0
STARTING, SERVING, RESTARTING, FAILED, STOPPED = "starting", "serving", "restarting", "failed", "stopped"


@dataclass(frozen=True, slots=True)
class KeptEngine:
    """What a keeper says of its engine.

    Attributes:
        url: The base URL; the same for as long as the keeper lives.
        state: ``"starting"``, ``"serving"``, ``"restarting"``, ``"failed"`` (for good; ``error`` says why) or
            ``"stopped"``.
        pid: Id of the engine's main process, the last one if it has ended; None before the first start.
        restarts: How often it was started again.
        model: What the next process is to serve.
        version: And the label of those weights.
        error: Why it last ended, or did not start; empty if it never did.
    """

    url: str
    state: str
    pid: int | None
    restarts: int
    model: str | None
    version: str | None
    error: str


class Keeper:
    """Starts an engine, and starts it again whenever it ends. Thread-safe; call ``stop`` in the end.

    A first start that fails is final: it is a mistake in the command line, mostly. Later the engine may end ``limit``
    times within ``window_s``; failed starts count too.

    Args:
        engine: Not started yet; it is the keeper's from now on.
        limit: As often it is brought back within ``window_s``.
        window_s: In seconds.
        backoff_s: Seconds before a second restart within the window, doubled with each one, at most 30.
        clock: Tests pass their own.
    """

    def __init__(
        self,
        engine: LaunchedEngine,
        *,
        limit: int = 5,
        window_s: float = 600.0,
        backoff_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        for name, value, good in (
            ("limit", limit, limit >= 0),
            ("window_s", window_s, window_s > 0),
            ("backoff_s", backoff_s, backoff_s >= 0),
        ):
            if not good:
                raise ValueError(f"{name} is out of range, got {value!r}")
        self.engine = engine
        self._limit = limit
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._clock = clock or Clock()
        self._turn = threading.Lock()  # one restart at a time. Held until the engine is ready, or given up.
        # _changed guards: _state, _error, _serves, _restarts. Never held across a wait for the engine.
        self._changed = threading.Condition()
        self._state = STARTING
        self._error: EngineLaunchError | None = None
        self._serves = (engine.model, engine.weight_version)
        self._restarts = 0
        self._ends: list[float] = []  # clock seconds of the ends within the window; for the holder of the turn
        self._stopping = threading.Event()
        self._thread = start_thread(f"rolloutsync-keeper-{engine.port}", self._run)

    def look(self) -> KeptEngine:
        """How it is. Does not block."""
        engine = self.engine
        with self._changed:
            error = "" if self._error is None else str(self._error)
            return KeptEngine(engine.url, self._state, engine.pid, self._restarts, *self._serves, error)

    def url(self, timeout: float | None = None) -> str:
        """The base URL, once the engine has served for the first time.

        Raises:
            EngineLaunchError: It did not start, ended too often, or was stopped.
            DeadlineExceededError: It is still starting after ``timeout`` seconds.
        """
        deadline = Deadline.after(self._clock, timeout)
        with self._changed:
            while self._state == STARTING and not deadline.expired:
                self._clock.wait(self._changed, deadline.remaining())
            state, error = self._state, self._error
        if state == STARTING:
            raise DeadlineExceededError(f"the engine is still starting after {timeout:g} s", engine=self.engine.url)
        if state == FAILED and error is not None:
            raise error
        if state == STOPPED:
            raise self.engine.failure("was stopped")
        return self.engine.url

    def serve(self, model: str | None, version: str | None = None, *, now: bool = False) -> None:
        """Say what a restarted process is to serve: a process that ends forgets what it was told over HTTP.

        Blocks only with ``now``, until the engine serves again.

        Args:
            model: Path or name of the checkpoint; None leaves it as it is.
            version: Label of those weights. vLLM cannot be started with one.
            now: Restart the engine, unless it was started with just that.

        Raises:
            EngineLaunchError: With ``now``: it did not start; the keeper goes on trying.
        """
        with self._changed:
            self._serves = (self._serves[0] if model is None else model, version)
        if now:
            with self._turn:
                if self._state in {SERVING, RESTARTING} and not self._serves_that():
                    self._start_anew()

    def stop(self) -> None:
        """End the engine, and the keeping. Blocks until it is gone. Idempotent."""
        self._stopping.set()
        self._become(STOPPED)
        self.engine.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread ---

    def _run(self) -> None:
        try:
            begun = self._serves
            self.engine.start()
            with self._turn:
                if begun == self._serves:
                    self._become(SERVING)
                else:
                    self._start_anew()
            while not self._stopping.is_set():
                self.engine.wait()
                with self._turn:
                    if self.engine.poll() is not None:  # else it was restarted on purpose
                        self._bring_back()
        except EngineLaunchError as error:
            self._fail(error)
        except Exception as error:  # a thread's outermost frame: whoever waits for the URL must hear of it
            log.exception("keeping %s: unexpected error", self.engine.url)
            self._fail(self.engine.failure(f"cannot be kept: {type(error).__name__}: {error}"))

    def _bring_back(self) -> None:
        """Of an engine that has ended. For the holder of the turn."""
        failure = self.engine.failure(told(self.engine.poll()))
        while not self._stopping.is_set():
            self._count(failure)
            pause = min(_LONGEST_S, self._backoff_s * 2 ** (len(self._ends) - 2)) if len(self._ends) > 1 else 0.0
            log.warning("%s; starting it again in %.1f s", failure.message, pause)
            self._become(RESTARTING, failure)
            if self._clock.sleep(pause, self._stopping):
                return
            try:
                self._start_anew()
            except EngineLaunchError as error:
                failure = error
            else:
                return

    def _count(self, failure: EngineLaunchError) -> None:
        """Note an end. Raises if there were too many."""
        now = self._clock.monotonic()
        self._ends = [*(at for at in self._ends if at > now - self._window_s), now]
        if len(self._ends) > self._limit:
            what = f"ended {len(self._ends)} times within {self._window_s:g} s and is not started again; last, it"
            words = failure.message.removeprefix(f"{self.engine.kind} ").partition("; command: ")[0]
            raise self.engine.failure(f"{what} {words}") from failure

    def _start_anew(self) -> None:
        """For the holder of the turn; again if it is to serve something else by the time that it is ready."""
        while True:
            model, version = wanted = self._serves
            self.engine.restart(model=model, weight_version=None if self.engine.kind == "vllm" else version)
            with self._changed:
                self._restarts += 1
                done = wanted == self._serves
            if done:
                self._become(SERVING)
                return

    def _serves_that(self) -> bool:
        """Whether the process was started with what it is to serve."""
        engine, (model, version) = self.engine, self._serves
        same = engine.kind == "vllm" or engine.weight_version == version
        return engine.poll() is None and engine.model == model and same

    def _fail(self, error: EngineLaunchError) -> None:
        if not self._stopping.is_set():
            log.error("%s", error)
        self._become(FAILED, error)

    def _become(self, state: str, error: EngineLaunchError | None = None) -> None:
        with self._changed:
            if self._state != STOPPED:
                self._state = state
                self._error = error or self._error
            self._changed.notify_all()
