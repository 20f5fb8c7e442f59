"""An engine process inside a Ray actor: ``EngineActor.options(num_gpus=1).remote("sglang", model="...")``.

Ray places the actor, gives it its GPUs and starts it again elsewhere if told to (``max_restarts=-1``); the actor starts
the engine process and starts it again when it ends. ``RayEngines`` tells a client of the driver's which URLs there are.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rolloutsync.client import MemberChanges
from rolloutsync.clock import Clock
from rolloutsync.config import parse_url
from rolloutsync.errors import RolloutError
from rolloutsync.keeper import FAILED, SERVING, STOPPED, Keeper, KeptEngine
from rolloutsync.launch import LaunchedEngine
from rolloutsync.launch_plan import LaunchPlan
from rolloutsync.threads import start_thread

try:
    import ray
except ImportError as missing:
    raise ImportError(f"rolloutsync.ray_engine needs Ray ({missing}): pip install 'rolloutsync[ray]'") from missing

from rolloutsync.ray_actor import in_group  # after the check, which names this module

if TYPE_CHECKING:
    from rolloutsync.client import RolloutClient

log = logging.getLogger("rolloutsync.ray_engine")
CONCURRENCY_GROUPS = {"control": 2, "look": 4}
MAX_CONCURRENCY = 8  # of the default group, where ``url`` waits
_ANSWER_S = 5.0


class EngineWorker:
    """What an ``EngineActor`` is made of: an engine process and what keeps it up. Thread-safe.

    The constructor starts the engine and does not wait for it; ``url`` does. The engine ends with the actor's process,
    however that ends; only ``stop`` and ``__ray_terminate__`` give it time to end in an orderly way.

    A process that is started again serves what the actor was made with, or what ``serve`` said last. A client admits it
    only if that is what the fleet has: call ``serve`` after each weight update, or ``RayEngines.serve`` for all. vLLM
    cannot be started with a label for its weights, so that a restarted one stays out until the next update.

    Args:
        kind: ``"sglang"``, ``"vllm"`` or ``"sim"``.
        restarts: So often the engine is brought back within ``window_s``; then the state is ``"failed"``.
        window_s: In seconds.
        backoff_s: Seconds before a second restart within the window, doubled with each one, at most 30.
        log: As for ``launch_engine``: a path on the actor's node.
        **options: As for ``launch_engine``; ``host`` is this node's address in Ray unless given. A wrong one is an
            ``ActorDiedError`` at the first call, with our words in it.
    """

    def __init__(
        self,
        kind: str,
        *,
        restarts: int = 5,
        window_s: float = 600.0,
        backoff_s: float = 1.0,
        log: str | None = None,
        **options: Any,
    ) -> None:
        if kind != "sim":
            options.setdefault("host", ray.util.get_node_ip_address())
        engine = LaunchedEngine(LaunchPlan(kind=kind, **options), log)
        self.keeper = Keeper(engine, limit=restarts, window_s=window_s, backoff_s=backoff_s)

    def __ray_shutdown__(self) -> None:
        """Ray calls it when the actor ends in an orderly way."""
        self.keeper.stop()

    def url(self, timeout: float | None = None) -> str:
        """The engine's base URL; blocks until it has served for the first time.

        Raises:
            EngineLaunchError: It did not start, ended too often, or was stopped; the text has the log's tail.
            DeadlineExceededError: It is still starting after ``timeout`` seconds.
        """
        return self.keeper.url(timeout)

    @in_group("look")
    def state(self) -> KeptEngine:
        """How the engine is: state, URL, process id, restarts, what it is to serve, and why it last ended."""
        return self.keeper.look()

    @in_group("look")
    def pid(self) -> int | None:
        """Id of the engine's main process on the actor's node; None before its first start."""
        return self.keeper.engine.pid

    @in_group("look")
    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the engine's present process wrote."""
        return self.keeper.engine.log_tail(lines)

    @in_group("control")
    def serve(self, model: str | None, version: str | int | None = None, *, now: bool = False) -> None:
        """Say what a restarted process is to serve; call it after each weight update. Does not touch the running one.

        Args:
            model: A checkpoint that is readable on the actor's node; None leaves it as it is.
            version: The label that the update gave those weights.
            now: Restart the engine with it, unless it was started with just that; blocks until it serves.

        Raises:
            EngineLaunchError: With ``now``: it did not start; more attempts follow.
        """
        self.keeper.serve(model, None if version is None else str(version), now=now)

    @in_group("control")
    def stop(self) -> None:
        """End the engine for good; blocks until it is gone. The actor stays, and says that it is stopped."""
        self.keeper.stop()


EngineActor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS, max_concurrency=MAX_CONCURRENCY)(EngineWorker)


class RayEngines:
    """Engine actors, and which of their URLs a client of this process has. Thread-safe.

    ::

        engines = RayEngines([EngineActor.options(num_gpus=1, max_restarts=-1).remote("sglang", model=path)])
        with RolloutClient(engines.urls()) as client, engines.watch(client):
            ...

    Args:
        actors: Handles of ``EngineActor``.
    """

    def __init__(self, actors: Iterable[Any]) -> None:
        self.actors = list(actors)
        if not self.actors:
            raise ValueError("actors is empty: give at least one EngineActor")
        self._clock = Clock()
        # _lock guards: what follows. Never held across a call.
        self._lock = threading.Lock()
        self._had: list[set[str]] = [set() for _ in self.actors]  # URLs of each actor, so far
        self._first: dict[str, int | None] = {}  # process by URL, as ``urls`` saw it
        self._seen: weakref.WeakKeyDictionary[RolloutClient, dict[str, int | None]] = weakref.WeakKeyDictionary()
        self._weights: tuple[str | None, str | None] | None = None

    def urls(self, timeout: float | None = None) -> list[str]:
        """The base URLs, in the actors' order; blocks until every engine has served for the first time.

        Raises:
            EngineLaunchError: One did not start.
            DeadlineExceededError, ray.exceptions.GetTimeoutError: One is still starting after ``timeout`` seconds.
        """
        wait = None if timeout is None else timeout + _ANSWER_S
        urls = [parse_url(url) for url in ray.get([actor.url.remote(timeout) for actor in self.actors], timeout=wait)]
        serving = self._serving(self.states())
        with self._lock:
            self._first.update(serving)
        return urls

    def states(self, timeout: float = _ANSWER_S) -> list[KeptEngine | None]:
        """How each engine is; None for an actor that does not answer in time, for example while Ray moves it.

        An actor that is dead for good counts as one whose engine is ``"stopped"``.
        """
        refs = [actor.state.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        return [_answer(ref) for ref in refs]

    def serve(self, model: str | None, version: str | int | None = None) -> None:
        """``EngineActor.serve`` of all: what restarted engines are to serve; call it after each weight update.

        An actor that does not answer now, or is started anew by Ray, is told by the next ``sync``, and restarts its
        engine.
        """
        label = None if version is None else str(version)
        refs = [actor.serve.remote(model, label) for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S)
        with self._lock:
            self._weights = (model, label)

    def sync(self, client: RolloutClient) -> MemberChanges:
        """Make engines with a new URL members of the client, and remove those of ours that are gone.

        Gone is an engine that does not serve: it ended and has not come back, or its actor is dead for good, stopped,
        failed, or has another URL by now. One that comes back is added again, also one that ended and came back since
        the last call: the client asks it anew which weights it has, and admits it only with the fleet's. An engine
        whose actor does not answer stays what it is, and engines that are not of these actors are not touched.

        Blocks for a few seconds at most, as ``add_engine`` does; raises what that does.
        """
        states = self.states()
        self._remind(states)
        serving = self._serving(states)
        members = {status.url for status in client.engines()}
        with self._lock:
            had = {url for state, urls in zip(states, self._had, strict=True) if state is not None for url in urls}
            seen = self._seen.setdefault(client, dict(self._first))
            renewed = {url for url, pid in serving.items() if seen.get(url, pid) != pid}
            seen.update(serving)
        removed = sorted(members & (had - serving.keys() | renewed))
        added = sorted(serving.keys() - members | renewed)
        for url in removed:
            client.remove_engine(url)
        for url in added:
            client.add_engine(url)
        return MemberChanges(tuple(added), tuple(removed))

    @contextmanager
    def watch(self, client: RolloutClient, interval_s: float = 2.0) -> Iterator[None]:
        """A block inside which a thread calls ``sync`` every ``interval_s`` seconds; what it raises is logged."""
        if interval_s <= 0:
            raise ValueError(f"interval_s must be above 0, got {interval_s!r}")
        over = threading.Event()
        thread = start_thread("rolloutsync-ray-engines", lambda: self._watch(client, interval_s, over))
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, client: RolloutClient, interval_s: float, over: threading.Event) -> None:
        while not self._clock.sleep(interval_s, over):
            try:
                changes = self.sync(client)
            except (RolloutError, ray.exceptions.RayError, ValueError) as error:
                log.warning("looking after the engines' URLs: %s: %s", type(error).__name__, error)
                continue
            if changes:
                log.info("engines of Ray actors: %s", changes)

    def _serving(self, states: list[KeptEngine | None]) -> dict[str, int | None]:
        """The process of each engine that serves, by URL."""
        serving: dict[str, int | None] = {}
        with self._lock:
            for had, state in zip(self._had, states, strict=True):
                if state is not None and state.state == SERVING:
                    url = parse_url(state.url)
                    serving[url] = state.pid
                    had.add(url)
        return serving

    def _remind(self, states: list[KeptEngine | None]) -> None:
        """Tell actors what they missed: they were started anew, or did not answer then."""
        with self._lock:
            weights = self._weights
        for actor, state in zip(self.actors, states, strict=True):
            if weights is None or state is None or state.state in {FAILED, STOPPED}:
                continue
            model, version = weights
            if version != state.version or model not in {None, state.model}:
                actor.serve.remote(model, version, now=True)


def _answer(ref: Any) -> KeptEngine | None:
    try:
        answer: KeptEngine = ray.get(ref, timeout=0)
    except ray.exceptions.ActorDiedError as error:
        return KeptEngine("", STOPPED, None, 0, None, None, str(error))
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
        return None
    return answer
