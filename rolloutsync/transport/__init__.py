"""The transport: one HTTP exchange, fully read, closed on any error. The only place that knows requests and urllib3."""

from rolloutsync.transport.exchange import Lane
from rolloutsync.transport.pending import Landed, Pending
from rolloutsync.transport.transport import Reply, Transport

__all__ = ["Landed", "Lane", "Pending", "Reply", "Transport"]
