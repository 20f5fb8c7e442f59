"""The verbs about routers: who is behind one, and who has come or gone there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rolloutsync.config import parse_url
from rolloutsync.discovery import Discovery
from rolloutsync.errors import RolloutError, UnsupportedError
from rolloutsync.owner import CoreOwner
from rolloutsync.routed import RoutedEngine, Router, peers_of
from rolloutsync.routers import Listing, check_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rolloutsync.core import Core

R = TypeVar("R", bound="Routed")


@dataclass(frozen=True, slots=True)
class MemberChanges:
    """What a ``refresh`` changed. False in a condition if that is nothing.

    Attributes:
        added: URLs of the engines that are members now.
        removed: URLs of those that are not any more.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class Routed(CoreOwner):
    """Verbs about routers. Thread-safe."""

    # Guarded by _lock, as the URLs are.
    _router_url: str | None = None
    _listing: Listing = Listing()

    @classmethod
    def from_router(cls: type[R], url: str, **options: Any) -> R:  # noqa: PYI019 - typing.Self is 3.11
        """A client of the engines behind a router, which is asked once who they are.

        From then on the engines are spoken to directly, so that everything works that works without a router: aborts by
        id, proofs of idle, weights, routed experts. The router gets no traffic of this client and its retries are
        not in the way. An engine that the router takes for unhealthy is a member too: the router's word may be minutes
        old; this client looks by itself. ``url@rank`` entries of one engine are one engine with several ranks.

        Where engines are disaggregated (some prefill, others decode) nobody but the router can make them generate.
        Then generates go through it, with an ``X-SMG-Routing-Key`` for each group or session (the router's policy
        "manual" heeds it), and ``Sample.engine`` is the router; loads, aborts, pauses and weights go to every
        engine. Requests are counted at the engines that have room for them, wherever the router sends them. What
        follows from that:

        - What the router drops without a word is refused: routed experts, every field and sampling parameter that
          sglang-router up to 0.3.2 does not know. (smg 1.13 passes fields on, so routed experts work there.)
        - The router sends a request again by itself, under the same id: "one copy at a time" does not hold. Start it
          with ``--disable-retries``.
        - Nobody can keep it from using an engine with stale weights, so one of them takes them all out of service
          until the next update.

        Blocks until the router lists workers: for at most ``Timeouts.engine_wait_s``, and ``Timeouts.control_s`` more
        where it is silent. No engine is dialled yet.
        The admin key is tried first where there is one, then the other. See ``refresh`` for later changes.

        Args:
            url: Of the router: sglang-router 0.2 and 0.3, smg.
            **options: All that ``RolloutClient`` takes, except ``urls``.

        Raises:
            ValueError, TypeError: An argument is wrong.
            EngineUnavailableError: Nobody answers there in time, or no worker is listed.
            WrongServerError: That is no router.
            UnsupportedError: Its workers cannot be driven: several models, gRPC, disaggregated ones that are not
                SGLang.
            EngineHTTPError, ProtocolError: It refuses (a key is missing), or answers nonsense.
        """
        make: Callable[..., R] = cls
        client = make(parse_url(url), **options)
        client._follow()  # noqa: SLF001 - its own class
        return client

    def _follow(self) -> None:
        """Exchange the router's URL for those of its workers."""
        (self._router_url,) = self._urls
        self._urls = []
        core = self._open()
        try:
            listing = self._discovery(core).await_workers()
        except BaseException:
            self.close()
            raise
        self._adopt(core, listing)

    def _discovery(self, core: Core) -> Discovery:
        assert self._router_url is not None
        return Discovery(self._router_url, core.transport, self._config, core.clock, core.fleet.nap)

    def refresh(self) -> MemberChanges:
        """Ask the router again who its engines are. New ones get requests; at those that are gone requests finish.

        Engines that were added by hand stay. So does one that this client holds paused, which a router may have lost
        sight of for that; the next call looks again. A router's membership settles late: trust the next answer. One
        without any worker changes nothing: a router that was just started has none.

        Blocks for at most ``Timeouts.control_s``, and while new engines are asked what they are.

        Raises:
            RolloutError: The client was not made by ``from_router``.
            EngineUnavailableError: The router lists no worker.
            TransportError, EngineHTTPError, ProtocolError, WrongServerError, UnsupportedError: It could not be asked;
                see ``from_router``. Nothing was changed.
        """
        core = self._open()
        core.check_open()
        if self._router_url is None:
            raise RolloutError("refresh() needs a router: make the client by RolloutClient.from_router(url)")
        listing = self._discovery(core).ask()
        if listing.disaggregated != self._listing.disaggregated:
            raise UnsupportedError("the router's engines were rearranged (prefill and decode): make a new client")
        changes = self._adopt(core, listing)
        if changes.added:
            core.ready()
            core.workers.grow()
        return changes

    def _adopt(self, core: Core, listing: Listing) -> MemberChanges:
        """Follow a new listing. Engines are let go and taken in outside of the lock."""
        with self._lock:
            absent = [url for url in self._listing.urls if url in self._urls and url not in listing.urls]
            held = {url for url in absent if core.fleet.is_paused(url)}
            gone = [url for url in absent if url not in held]
            new = [url for url in listing.urls if url not in self._urls]
            self._urls = [url for url in self._urls if url not in gone] + new
            kept = tuple(worker for worker in self._listing.workers if worker.url in held)
            self._listing = Listing((*listing.workers, *kept), listing.forwards_all)
        self._join(core, new)
        for url in gone:
            core.fleet.remove(url)
        return MemberChanges(tuple(new), tuple(gone))

    # --- the engines of a core ---

    def _join(self, core: Core, urls: Iterable[str]) -> None:
        """Make engines members: those of a disaggregated fleet generate through its router."""
        workers = {w.url: w for w in self._listing.workers} if self._listing.disaggregated else {}
        for url in urls:
            if url in workers:
                router = self._front(core)
                peers = peers_of(router.url, core.fleet)
                core.fleet.add(RoutedEngine(workers[url], router, peers, core.transport, self._config, core.clock))
            else:
                core.add(url)

    def _front(self, core: Core) -> Router:
        """One for all, so that the members of a group bear one key wherever they are counted."""
        for engine in core.fleet.engines():
            if isinstance(engine, RoutedEngine):
                return engine.router
        url, forwards_all = str(self._router_url), self._listing.forwards_all
        return Router(url, core.transport, self._config, core.clock, forwards_all=forwards_all)

    def _check_kept(self, fields: Mapping[str, Any], sampling: Iterable[str]) -> None:
        """Refuse what the router drops, where requests go through one."""
        if self._listing.disaggregated:
            check_kept(fields, sampling, router=str(self._router_url), forwards_all=self._listing.forwards_all)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "router": (self._router_url, self._listing)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._router_url, self._listing = state["router"]
        super().__setstate__(state)
