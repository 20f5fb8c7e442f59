"""A client inside a Ray actor: ``RolloutActor.options(name="rollout").remote(urls, **client_options)``.

The actor is a plain synchronous one. Ray gives each concurrency group threads of its own, so that a call of one group
never waits behind those of another:

======== ======= ==============================================================
group    threads calls
======== ======= ==============================================================
default  64      ``generate``, ``collect``; the 65th waits in Ray's queue. Another number:
                 ``RolloutActor.options(max_concurrency=256)``
control  8       verbs that wait for engines: aborts, pauses, memory, weights,
                 ``close``
look     4       verbs that only look: ``stats``, ``audit``, ``dump``, ...
======== ======= ==============================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from rolloutsync.client import RolloutClient

try:
    import ray
except ImportError as missing:
    raise ImportError(f"rolloutsync.ray_actor needs Ray ({missing}): pip install 'rolloutsync[ray]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rolloutsync.audit import Audit
    from rolloutsync.collected import Collected
    from rolloutsync.dialects.base import LoadReading
    from rolloutsync.episodes import Episode
    from rolloutsync.idle import DrainReport
    from rolloutsync.sample import Sample
    from rolloutsync.slot import EngineStatus
    from rolloutsync.stats import Stats
    from rolloutsync.weight_report import UpdateReport

    F = TypeVar("F", bound=Callable[..., Any])

CONCURRENCY_GROUPS = {"control": 8, "look": 4}
MAX_CONCURRENCY = 64  # of the default group
_CANCEL_POLL_S = 0.25


def in_group(name: str, **options: Any) -> Callable[[F], F]:
    """Put a method into a concurrency group."""
    return cast("Callable[[F], F]", ray.method(concurrency_group=name, **options))


class RolloutWorker:
    """What a ``RolloutActor`` is made of: a client, and its verbs sorted into concurrency groups. Thread-safe.

    Ray's actor classes cannot be subclassed, so subclass this one to add methods of your own::

        Actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS, max_concurrency=64)(YourSubclass)

    The verbs promise, take and raise what those of ``RolloutClient`` do. ``start`` and ``submit`` are missing: jobs and
    futures don't travel, and ``generate.remote()`` does not block anyway. Errors arrive in the driver as their own type
    (and as Ray's ``RayTaskError``); ``error.cause`` is the original. A ``Sample``'s arrays arrive as read-only views of
    Ray's object store, without a copy.

    When the process ends, however it does, its sockets close, on which engines abort. ``ray.kill`` and the driver's end
    do that at once. ``__ray_terminate__`` lets running calls finish first (in Ray 2.60; 2.40 does not wait); ``close``
    before it ends them early, and their callers get partials.

    Args:
        urls: As for ``RolloutClient``.
        **client_options: As for ``RolloutClient``. A wrong one is an ``ActorDiedError`` at the first call, with our
            words in it.
    """

    def __init__(self, urls: str | Iterable[str], **client_options: Any) -> None:
        self.client = RolloutClient(urls, **client_options)

    def __ray_shutdown__(self) -> None:
        """Ray calls it when the actor ends in an orderly way."""
        self.client.close()

    # --- making samples: the default group ---

    def generate(self, batch: Any, sampling_params: Any = None, **options: Any) -> list[Sample]:
        """``RolloutClient.generate``; shows no progress bar, as an actor has no terminal.

        ``ray.cancel`` of the call aborts its own requests within a second, and Ray throws its samples away; use
        ``abort_until_idle`` to get them. Where Ray is too old to tell the actor (no ``RuntimeContext.is_canceled``, as
        in 2.40), the call runs on.
        """
        with self.client.start(batch, sampling_params, **{**options, "progress": False}) as job:
            while not job.wait(_CANCEL_POLL_S):
                if _canceled():
                    job.abort()
            return job.result()

    def collect(self, prompts: Any, sampling_params: Any = None, **options: Any) -> Collected:
        """``RolloutClient.collect``, with a list of prompts and without ``executor``; shows no progress bar.

        ``accept`` is pickled and runs in the actor, in this call's thread. A ``CollectError`` brings counts alone.
        ``ray.cancel`` does not end it: ``abort_until_idle`` does, and it returns what there is.
        """
        return self.client.collect(prompts, sampling_params, **{**options, "progress": False})

    def map(self, episode: Any, items: Any, **options: Any) -> list[Episode]:
        """``RolloutClient.map``; the function is pickled and runs in the actor's process. Shows no progress bar.

        ``ray.cancel`` does not end it: ``abort_until_idle`` does, and it returns what there is.
        """
        return self.client.map(episode, items, **{**options, "progress": False})

    # --- between steps ---

    @in_group("control")
    def abort_until_idle(self, timeout: float = 60.0, **options: Any) -> DrainReport:
        """``RolloutClient.abort_until_idle``: ``generate`` calls that run meanwhile return their partials."""
        return self.client.abort_until_idle(timeout, **options)

    @in_group("control")
    def pause(self, mode: str = "abort") -> None:
        """``RolloutClient.pause``."""
        self.client.pause(mode)

    @in_group("control")
    def resume(self) -> None:
        """``RolloutClient.resume``."""
        self.client.resume()

    @in_group("control")
    def flush_cache(self) -> None:
        """``RolloutClient.flush_cache``."""
        self.client.flush_cache()

    @in_group("control")
    def release_memory(self, tags: Iterable[str] | None = None) -> None:
        """``RolloutClient.release_memory``."""
        self.client.release_memory(tags)

    @in_group("control")
    def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        """``RolloutClient.resume_memory``."""
        self.client.resume_memory(tags)

    @in_group("control")
    def update_weights_from_disk(
        self, path: str, version: str | int | None = None, mode: str = "abort", **options: Any
    ) -> UpdateReport:
        """``RolloutClient.update_weights_from_disk``.

        ``weight_update``, ``quiesced`` and ``init_group`` are missing: blocks and futures don't travel. A method of a
        subclass uses them through ``self.client``.
        """
        return self.client.update_weights_from_disk(path, version, mode, **options)

    @in_group("control")
    def weight_versions(self) -> dict[str, str | None]:
        """``RolloutClient.weight_versions``."""
        return self.client.weight_versions()

    @in_group("control")
    def control(self, path: str, json: Any = None, *, method: str = "POST") -> dict[str, Any]:
        """``RolloutClient.control``."""
        return self.client.control(path, json, method=method)

    # --- engines and counts ---

    @in_group("control")
    def add_engine(self, url: str) -> None:
        """``RolloutClient.add_engine``."""
        self.client.add_engine(url)

    @in_group("control")
    def remove_engine(self, url: str) -> None:
        """``RolloutClient.remove_engine``."""
        self.client.remove_engine(url)

    @in_group("control")
    def loads(self) -> dict[str, LoadReading]:
        """``RolloutClient.loads``."""
        return self.client.loads()

    @in_group("look")
    def engines(self) -> list[EngineStatus]:
        """``RolloutClient.engines``."""
        return self.client.engines()

    @in_group("look")
    def stats(self) -> Stats:
        """``RolloutClient.stats``."""
        return self.client.stats()

    @in_group("look")
    def audit(self) -> Audit:
        """``RolloutClient.audit``."""
        return self.client.audit()

    @in_group("look")
    def dump(self) -> str:
        """``RolloutClient.dump``."""
        return self.client.dump()

    # --- the end ---

    @in_group("control")
    def close(self, timeout: float = 5.0) -> list[str]:
        """``RolloutClient.close``: ``generate`` calls that run return, and no verb works any more."""
        return self.client.close(timeout)


def _canceled() -> bool:
    """Whether ``ray.cancel`` was called for the task of this thread; never, where Ray cannot tell."""
    ask = getattr(ray.get_runtime_context(), "is_canceled", None) if ray.is_initialized() else None
    try:
        return ask is not None and bool(ask())
    except RuntimeError:  # not inside a task: somebody uses the plain class
        return False


RolloutActor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS, max_concurrency=MAX_CONCURRENCY)(RolloutWorker)
