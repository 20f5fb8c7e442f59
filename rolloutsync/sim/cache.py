"""The prefix cache of one rank: which contexts it has computed before."""

from __future__ import annotations

from rolloutsync.sim.tokens import Hashes


class PrefixCache:
    """Remembers the hash of every prefix it has seen, in two generations of half the capacity each."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def add(self, prefixes: Hashes) -> None:
        """Remembers prefixes of a context."""
        if len(self._young) + len(prefixes) > self._half:
            self._old, self._young = self._young, set()
        self._young.update(prefixes.tolist())

    def match(self, prefixes: Hashes) -> int:
        """Returns the length of the longest remembered prefix."""
        low, high = 0, len(prefixes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            known = int(prefixes[middle])
            if known in self._young or known in self._old:
                low = middle
            else:
                high = middle - 1
        return low

    def clear(self) -> None:
        """Forgets everything."""
        self._young.clear()
        self._old.clear()
