"""Rarer steps for the scripts of ``tests.wire``: peers that go deaf, read slowly, never finish, cut what they pack."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable
from typing import TypeVar

from tests.kernel import deafen
from tests.wire import Left, Peer, Request, Script, Step, drip, head_of, send, silence


def half_open(peer: Peer) -> None:
    """The host vanishes without a word: nothing that the client sends on this connection is acknowledged any more."""
    deafen(peer.sock)
    peer.server.closing.wait()
    raise Left


def patient(seconds: float) -> Step:
    """From now on closes the connection when nothing comes for so long: a server's keep-alive."""
    return lambda peer: peer.sock.settimeout(seconds)


def read_slowly(total: int, pieces: int, every_s: float) -> Step:
    """Takes so many bytes of a request in pieces, pausing before each; no more than that lies in the kernel unread."""

    def step(peer: Peer) -> None:
        for _ in range(pieces):
            if peer.server.closing.wait(every_s):
                raise Left
            peer.take(total // pieces)

    return step


def answer_packed(body: bytes, *, cut: int = 0) -> Step:
    """Answers compressed; the last ``cut`` bytes of the packed body never existed, and its length does not tell."""
    packed = gzip.compress(body)
    packed = packed[: len(packed) - cut]
    return send(head_of(packed, "200 OK", "Content-Encoding: gzip") + packed)


T = TypeVar("T")


def in_turn(*stories: Callable[[Request, int], T]) -> Callable[[Request, int], T]:
    """A story for the first request, one for the second, ...; the last one is for all that follow."""
    return lambda request, number: stories[min(number, len(stories) - 1)](request, number)


def once(*first: Step, then: Step) -> Step:
    """These steps the first time, on whatever connection, and another step ever after."""
    turns = itertools.chain([first], itertools.repeat((then,)))

    def step(peer: Peer) -> None:
        for inner in next(turns):
            inner(peer)

    return step


_BODY = b"x" * 1000
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

NEVER_ENDING: dict[str, Script] = {
    "silence": [silence],
    "header drip": [drip(head_of(_BODY) + _BODY, 0.1)],
    "body drip": [send(head_of(_BODY)), drip(_BODY, 0.1)],
    "close-delimited drip": [send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"), drip(_BODY, 0.1)],
    "chunk drip": [send(_CHUNKED), drip(b"1\r\nx\r\n" * 100, 0.1)],
    "a length that lies": [send(head_of(_BODY) + _BODY[:60]), silence],
    "interim drip": [drip(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, 0.05)],
}
