"""A loopback of our own for the session: SGLang opens a listener on all interfaces, and here nobody can reach it.

The pytest process itself moves into a new, empty network namespace, so servers that it starts and the tests share one
private loopback. Needs the right to do so (root in most containers); without it the suite runs in the network it has.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
IFREQ = struct.Struct("16sh22x")


class Namespace:
    """Moves the calling thread, and what it starts from now on, into an empty network namespace and back.

    Call both methods from the main thread. Threads and processes that already run stay where they are.
    """

    def __init__(self) -> None:
        self._outside: int | None = None

    def enter(self) -> None:
        """Enters a namespace that has a loopback and nothing else.

        Raises:
            OSError: Not permitted here; nothing has changed then.
        """
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _checked("unshare", _libc().unshare(CLONE_NEWNET))
        except OSError:
            os.close(outside)
            raise
        self._outside = outside
        _bring_up_loopback()

    def leave(self) -> None:
        """Goes back to the first namespace; does nothing if it was never left."""
        if self._outside is None:
            return
        outside, self._outside = self._outside, None
        try:
            _checked("setns", _libc().setns(outside, CLONE_NEWNET))
        finally:
            os.close(outside)


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, SIOCGIFFLAGS, IFREQ.pack(b"lo", 0))
        flags = IFREQ.unpack(answer)[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, IFREQ.pack(b"lo", flags | IFF_UP))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(call: str, answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
