"""What an engine's weights are made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

INITIAL = "initial"


@dataclass
class Weights:
    """The content behind the version's label: engines that loaded the same have the same checksums."""

    digest: str = INITIAL

    def load(self, source: Any) -> None:
        """Replaces them by what is at one place."""
        self.digest = hashlib.sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def mix(self, source: Any) -> None:
        """Changes some of them."""
        self.load([self.digest, source])

    def checksum(self, name: str) -> str:
        """Returns 64 hex digits that depend on the weights and a name."""
        return hashlib.sha256(f"{self.digest}/{name}".encode()).hexdigest()
