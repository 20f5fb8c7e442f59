"""A fleet: the verbs of one client, carried out by several actors, on one node or many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

try:
    import ray
except ImportError as missing:
    raise ImportError(f"rolloutsync.ray_fleet needs Ray ({missing}): pip install 'rolloutsync[ray]'") from missing

from rolloutsync.client import RolloutClient
from rolloutsync.config import check_bool, check_count, check_number
from rolloutsync.errors import shown
from rolloutsync.fleet_core import FleetCore
from rolloutsync.lane import Lane
from rolloutsync.ray_link import FleetActor, RayLink, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rolloutsync.core import Core

_DEFAULTS = {"num_cpus": 1, "max_restarts": -1}


class RolloutFleet(RolloutClient):
    """Drives rollout engines through several Ray actors. Thread-safe; every verb of ``RolloutClient`` works.

    One process has one interpreter, one network stack and one memory: where engines bring more than it takes in, actors
    share the work. Samples are made by actors; this process decides who makes what, keeps the books, and speaks
    to engines itself for all that concerns them as a whole (aborts, proofs of idle, pauses, weights), while no actor
    sends. So these are fleet-wide transactions, with the promises that ``RolloutClient`` gives for them.

    An order goes to the actor with the lowest load for its engines' limits; members of a group stay together. Samples
    come back as they finish; their arrays are read-only views of Ray's object store, without a copy. An actor that
    dies costs its unfinished samples their attempt: what it left at engines is aborted and they are made elsewhere, in
    ``retry.max_attempts`` actors at most. Ray restarts it; its own engines are aborted and proven idle before
    it gets its first task. One that stays away for ``actor_wait_s`` is given up, and its engines go to others.

    Actors are made by the first verb and ended by ``close``, or with this process. A fleet does not pickle. ``map`` and
    ``collect`` run their functions here. Disaggregated engines behind a router are refused.

    Args:
        urls: As for ``RolloutClient``. Engines on a node's own address go to an actor there, as far as shares are even.
        actors: How many actors, spread over the nodes.
        actors_per_node: How many on each node that is alive now; 1 if neither is given. Without ``share_engines`` there
            are never more actors than engines.
        share_engines: False: each engine is one actor's. True: every actor uses every engine, with its share of the
            limit. Then more actors than engines make sense; but a restarted actor leaves what its predecessor
            had sent in its last moments to the engines' own notice.
        actor_options: Ray's options for each actor: ``num_cpus`` (1 unless given), ``resources``, ``runtime_env``,
            ``max_restarts`` (-1, without end, unless given), ``scheduling_strategy``, ...
        actor_wait_s: Seconds that an actor may take to start, or to come back.
        **client_options: As for ``RolloutClient``; limits and budgets hold for each actor.

    Raises:
        ValueError, TypeError: An argument is wrong; names it and its value.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        actors: int | None = None,
        actors_per_node: int | None = None,
        share_engines: bool = False,
        actor_options: Mapping[str, Any] | None = None,
        actor_wait_s: float = 300.0,
        **client_options: Any,
    ) -> None:
        for name, count in (("actors", actors), ("actors_per_node", actors_per_node)):
            if count is not None:
                check_count(name, count)
        if actors is not None and actors_per_node is not None:
            raise ValueError(f"give actors={actors} or actors_per_node={actors_per_node}, not both")
        check_bool("share_engines", share_engines)
        check_number("actor_wait_s", actor_wait_s)
        if actor_options is not None and not isinstance(actor_options, Mapping):
            raise TypeError(f"actor_options must be a mapping of Ray's options, got {shown(actor_options)}")
        self._count = actors
        self._per_node = actors_per_node or 1
        self._shared = share_engines
        self._options = {**_DEFAULTS, **(actor_options or {})}
        FleetActor.options(**self._options)  # Ray names what it does not know
        self._wait_s = actor_wait_s
        self.actors: list[Any] = []
        super().__init__(urls, **client_options)

    def _make_core(self) -> Core:
        return FleetCore(
            [],
            self._config,
            self._session,
            recruit=self._recruit,
            shared=self._shared,
            actor_wait_s=self._wait_s,
        )

    def _recruit(self, urls: list[str]) -> list[Lane]:
        """Ask Ray for actors, each with its engines; does not wait for them."""
        if not ray.is_initialized():
            ray.init()  # as Ray itself does when it is first used
        places = self._places()
        places = places if self._shared else places[: max(1, len(urls))]
        parts = [list(urls) for _ in places] if self._shared else partition(urls, [host for host, _ in places])
        made: list[Any] = []
        try:
            for (_, options), part in zip(places, parts, strict=True):
                made.append(self._hire(options, part, len(places)))
        except Exception:
            for actor in made:
                ray.kill(actor)
            raise
        self.actors = made
        return [
            Lane(RayLink(f"actor-{number}", actor, self._wait_s, part), host, part)
            for number, (actor, (host, _), part) in enumerate(zip(made, places, parts, strict=True))
        ]

    def _hire(self, options: dict[str, Any], urls: list[str], count: int) -> Any:
        settings = settings_of(self._config, self._session)
        kind = FleetActor.options(**{**options, **self._options})
        return kind.remote(urls, count if self._shared else 1, settings)

    def _places(self) -> list[tuple[str, dict[str, Any]]]:
        """(host, Ray's options) of each actor."""
        if self._count is not None:
            return [("", {"scheduling_strategy": "SPREAD"})] * self._count
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return [
            (node["NodeManagerAddress"], {"scheduling_strategy": _near(node["NodeID"])})
            for _, node in itertools.product(range(self._per_node), nodes)
        ]

    def __repr__(self) -> str:
        return f"RolloutFleet({self._urls!r})"

    def __getstate__(self) -> NoReturn:
        raise TypeError("a RolloutFleet does not pickle: its actors belong to this process")


def _near(node: str) -> Any:
    """There if possible; elsewhere when the node is gone, so that a restart finds a place."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415 - not in ray itself

    return NodeAffinitySchedulingStrategy(node, soft=True)


def partition(urls: list[str], hosts: list[str]) -> list[list[str]]:
    """The engines of each actor, in even shares: those on its own host, as far as they reach.

    None is left without any, unless there are fewer engines than actors.
    """
    parts: list[list[str]] = [[] for _ in hosts]
    share = math.ceil(len(urls) / len(hosts))
    for left, url in zip(range(len(urls), 0, -1), _near_first(urls, hosts), strict=True):
        empty = [number for number, part in enumerate(parts) if not part]
        open_ = empty if left <= len(empty) else [number for number, part in enumerate(parts) if len(part) < share]
        near = [number for number in open_ if hosts[number] == urlsplit(url).hostname] or open_
        parts[min(near, key=lambda number: len(parts[number]))].append(url)
    return parts


def _near_first(urls: list[str], hosts: list[str]) -> list[str]:
    return sorted(urls, key=lambda url: urlsplit(url).hostname not in hosts)
