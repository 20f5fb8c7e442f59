"""Runs a command that cannot outlive its parent: `python guard.py PARENT_PID COMMAND [ARGUMENT ...]`.

The kernel's parent-death signal survives exec, so the command becomes this process and dies with the parent by SIGKILL.
Linux only. The signal follows the parent's *thread*: start from a thread that stays, such as the main one.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Binds this process to `parent`, then becomes `command`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"guard: parent {parent} was gone before {command[0]} started")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
