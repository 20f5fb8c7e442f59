"""RolloutClient: the public verbs, each a few lines that read top-down."""

from rolloutsync.client.client import RolloutClient

__all__ = ["RolloutClient"]
