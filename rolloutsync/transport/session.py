"""The one shared ``requests.Session``, and the adapter that gives each engine its two lanes."""

from __future__ import annotations

import socket
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.poolmanager import PoolManager

from rolloutsync.transport.connection import current_exchange
from rolloutsync.transport.exchange import Lane
from rolloutsync.transport.pools import POOL_CLASSES

_POOLS = 4096  # engines for which pools are kept; urllib3 would close the least recently used beyond it


def socket_options(half_open_s: float) -> list[tuple[int, int, int]]:
    """TCP options that end a half-open connection after ``half_open_s`` seconds, idle or sending."""
    probes = 3
    every = max(1, round(half_open_s / (probes + 1)))
    wanted = {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": probes}
    wanted["TCP_USER_TIMEOUT"] = max(1, round(half_open_s * 1000))
    options = [
        (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)
    ]
    defaults = list(HTTPConnection.default_socket_options)
    return [*defaults, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]


class LaneAdapter(HTTPAdapter):
    """An adapter with two pool managers, so that control calls have sockets of their own.

    ``send`` is inherited on purpose: ``responses`` and its like patch ``HTTPAdapter.send``. Thread-safe.
    """

    def __init__(self, pool_size: int, options: list[tuple[int, int, int]]) -> None:
        self._options = options
        super().__init__(pool_connections=_POOLS, pool_maxsize=pool_size, max_retries=0)
        self._control = self._manager(pool_size)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: Any) -> None:  # noqa: ARG002
        """Called by the base class."""
        self.poolmanager = self._manager(maxsize)

    def _manager(self, maxsize: int) -> PoolManager:
        manager = PoolManager(num_pools=_POOLS, maxsize=maxsize, block=False, socket_options=self._options)
        manager.pool_classes_by_scheme = POOL_CLASSES
        return manager

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """A proxy's manager, with tracked connections too."""
        manager = super().proxy_manager_for(proxy, **kwargs)
        manager.pool_classes_by_scheme = POOL_CLASSES
        return manager

    def get_connection_with_tls_context(
        self, request: requests.PreparedRequest, verify: Any, proxies: Any = None, cert: Any = None
    ) -> Any:
        """The pool of the current exchange's lane."""
        exchange = current_exchange()
        if exchange is None or exchange.lane is Lane.DATA or proxies:
            return super().get_connection_with_tls_context(request, verify, proxies=proxies, cert=cert)
        host, pool_kwargs = self.build_connection_pool_key_attributes(request, verify, cert)
        return self._control.connection_from_host(**host, pool_kwargs=dict(pool_kwargs))

    def close(self) -> None:
        """Close the pools of both lanes."""
        super().close()
        self._control.clear()


def make_session(given: requests.Session | None, adapter: LaneAdapter) -> requests.Session:
    """The session to use. The user's is never changed.

    None: our own. A plain ``requests.Session``: a twin of it that shares its headers, auth, TLS settings, proxies and
    own adapters, with ours in place of the stock ones. Both are deaf to the environment (proxies, netrc, whose logins
    would replace the API key). A session of another class: itself, as it is.
    """
    if given is not None and type(given) is not requests.Session:
        return given
    session = requests.Session()
    session.trust_env = False
    if given is not None:
        _copy_settings(given, session)
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    for prefix in ("http://", "https://"):
        if given is None or type(given.get_adapter(prefix)) is HTTPAdapter:
            session.mount(prefix, adapter)
    return session


def _copy_settings(source: requests.Session, target: requests.Session) -> None:
    for name in ("headers", "auth", "params", "verify", "cert", "proxies", "hooks", "max_redirects"):
        setattr(target, name, getattr(source, name))
    for prefix, adapter in source.adapters.items():
        target.mount(prefix, adapter)
    target.cookies.update(source.cookies)
