"""Fixtures of the fault tests: clients with their default settings, and the warnings that they log."""

from __future__ import annotations

from tests.client.conftest import client_to, make_client, warnings

__all__ = ["client_to", "make_client", "warnings"]
