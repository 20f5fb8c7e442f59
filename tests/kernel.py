"""What the kernel knows of sockets, and what it can be told: states of client ends, and a peer that hears nothing."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator

_STATES = {"01": "ESTABLISHED", "02": "SYN_SENT", "06": "TIME_WAIT", "08": "CLOSE_WAIT", "0A": "LISTEN"}
_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # the BPF instruction that says how many bytes of a packet to keep


def client_states(port: int) -> list[str]:
    """TCP states of the client ends of all connections to a loopback port."""
    return sorted(state for remote, state in _tcp_table() if remote == port and state not in {"TIME_WAIT", "LISTEN"})


def _tcp_table() -> Iterator[tuple[int, str]]:
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123
        for line in table.readlines()[1:]:
            _, _, remote, state = line.split()[:4]
            yield int(remote.rpartition(":")[2], 16), _STATES.get(state, state)


def deafen(sock: socket.socket) -> None:
    """From now on the kernel drops whatever comes in here, unacknowledged: for the other side the host has vanished.

    On a listener: connects hang. On a connection: it is half-open.
    """
    keep_nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(keep_nothing))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
