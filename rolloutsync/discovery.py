"""Asking a router who its workers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import Call
from rolloutsync.dialects.every import BY_NAME
from rolloutsync.endpoint import Endpoint
from rolloutsync.errors import (
    EngineHTTPError,
    EngineUnavailableError,
    RolloutError,
    TransportError,
    UnsupportedError,
    WrongServerError,
)
from rolloutsync.routers import LISTS, Listing, read_listing

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rolloutsync.clock import Clock
    from rolloutsync.config import ClientConfig
    from rolloutsync.transport import Transport

_POLL_S = 0.25
_NO_KEY = {401, 403}


class Discovery:
    """Asks one router. Thread-safe.

    Args:
        url: Of the router.
        transport: Makes the exchanges.
        config: Of the client: its keys, its timeouts.
        clock: Time.
        rest: Blocks for the seconds given, less when the client closes.
    """

    def __init__(
        self, url: str, transport: Transport, config: ClientConfig, clock: Clock, rest: Callable[[float], object]
    ) -> None:
        self._url = url
        self._endpoint = Endpoint(url, transport, BY_NAME["sglang"], config, clock)
        self._two_keys = config.admin_api_key is not None and config.api_key is not None
        self._wait_s = config.timeouts.engine_wait_s
        self._clock = clock
        self._rest = rest

    def ask(self) -> Listing:
        """Ask once for the workers, by each path that routers have. Blocks for ``Timeouts.control_s`` for each.

        Raises:
            EngineUnavailableError: There are none.
            WrongServerError: Not a router.
            TransportError, EngineHTTPError, ProtocolError, UnsupportedError: As it went; see ``read_listing``.
        """
        for path in LISTS:
            try:
                answer = self._get(path)
            except UnsupportedError:
                continue
            listing = self._read(answer)
            if listing.workers:
                return listing
            raise EngineUnavailableError("the router lists no workers", engine=self._url)
        words = f"{self._url} has no list of workers ({', '.join(LISTS)}), so it is no router"
        raise WrongServerError(f"{words}: give engines to RolloutClient(urls)", engine=self._url)

    def _read(self, answer: Any) -> Listing:
        try:
            return read_listing(answer)
        except RolloutError as error:
            error.engine = self._url
            raise

    def await_workers(self) -> Listing:
        """Ask until there are workers; not again after ``Timeouts.engine_wait_s``. Errors as for ``ask``.

        Raises:
            EngineUnavailableError: Nobody answered, or there was no worker; says which.
        """
        deadline = Deadline.after(self._clock, self._wait_s)
        while True:
            try:
                return self.ask()
            except (TransportError, EngineUnavailableError, EngineHTTPError) as error:
                if isinstance(error, EngineHTTPError) and error.status < 500:
                    raise
                if deadline.within(_POLL_S) < _POLL_S:
                    words = f"no worker from the router within {self._wait_s:g} s: {error.message}"
                    raise EngineUnavailableError(words, engine=self._url) from error
            self._rest(_POLL_S)

    def _get(self, path: str) -> Any:
        """With the admin key where there is one; a router may have the engines' key instead."""
        try:
            return self._endpoint.call(Call(method="GET", path=path, admin=True))
        except EngineHTTPError as error:
            if error.status not in _NO_KEY or not self._two_keys:
                raise
        return self._endpoint.call(Call(method="GET", path=path))
