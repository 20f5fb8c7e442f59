"""The prefill of one rank: prompts are computed in chunks, one forward pass after the other."""

from __future__ import annotations

from rolloutsync.sim.request import SimRequest


class Prefill:
    """The requests that are being prefilled, in order; only the last of a pass can need another one."""

    def __init__(self, chunk_tokens: int, tokens_per_second: float) -> None:
        self.requests: list[SimRequest] = []
        self.end = 0.0
        self.running = False
        self._chunk_tokens = chunk_tokens
        self._tokens_per_second = tokens_per_second

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def has_room(self) -> bool:
        """Whether the next pass can take tokens of one more request."""
        return sum(request.to_prefill for request in self.requests) < self._chunk_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens in the KV cache, those of the running pass included."""
        return sum(request.size - request.to_prefill + request.in_pass for request in self.requests)

    def start(self, at: float, extra_s: float) -> tuple[int, float]:
        """Starts a pass; returns how many tokens it computes and how long that takes."""
        room = self._chunk_tokens
        for request in self.requests:
            request.in_pass = min(room, request.to_prefill)
            room -= request.in_pass
        taken = self._chunk_tokens - room
        busy = taken / self._tokens_per_second + extra_s
        self.end, self.running = at + busy, True
        return taken, busy

    def finish(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """Ends the pass; returns the requests that are computed, and those that an abort ends in between."""
        for request in self.requests:
            request.to_prefill -= request.in_pass
            request.in_pass = 0
        done = [request for request in self.requests if not request.to_prefill]
        aborted = [request for request in self.requests if request.to_prefill and request.aborted]
        self.requests = [request for request in self.requests if request.to_prefill and not request.aborted]
        self.running = False
        return done, aborted

    def abort(self, request: SimRequest) -> None:
        """Ends a request behind its pass if it needs another one; one in its last pass, with the token of that."""
        if request.in_pass < request.to_prefill:
            request.aborted = True
        else:
            request.end_soon()

    def remove(self, request: SimRequest) -> None:
        """Ends a request in the middle of its pass; a pass without requests is over."""
        self.requests.remove(request)
        request.to_prefill = request.in_pass = 0
        self.running = self.running and bool(self.requests)

    def drop(self) -> list[SimRequest]:
        """Gives all requests back, as if their prefill had never begun."""
        dropped, self.requests, self.running = self.requests, [], False
        for request in dropped:
            request.to_prefill = request.in_pass = 0
        return dropped
