"""RolloutClient: the public verbs, each a few lines that read top-down."""

from rolloutsync.client.client import RolloutClient
from rolloutsync.client.routed import MemberChanges

__all__ = ["MemberChanges", "RolloutClient"]
