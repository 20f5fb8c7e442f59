"""Runs a command, ends all that it started, and outlives nobody.

``python -I launch_guard.py PARENT_PID STATUS_FD GRACE_S COMMAND [ARGUMENT ...]`` starts the command, writes its process
id as a line to STATUS_FD, and ends as the command ends: with its exit code, or by its signal. Where STATUS_FD is a
pipe, its end comes when all is gone. A program of its own that is run by its path; it needs the standard library alone,
and Linux.

There are two of it: ``outer``, the child of whoever started this, and ``inner``, which starts the command. Each is the
sub-reaper of what is below it, so that a child whose parent ended, or that has a session of its own, is still found.
Whichever of the two is killed, the other one ends the rest.

Told by            the command and all below it
=================  ======================================================================
SIGTERM            the command gets SIGTERM, and what still runs after GRACE_S is killed
SIGINT, SIGHUP     all are killed
end of the parent  all are killed
end of the command what it leaves behind gets ``_ORPHANS_S`` to end by itself, then is killed
SIGUSR2            nothing; the files in /dev/shm that they use are noted, to be removed at the
                   end, and a line is written to STATUS_FD
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_S = 2.0  # Python's resource tracker needs a moment to remove what its program left in /dev/shm
_KILL_S = 30.0  # a process inside a driver call cannot be killed before that call returns
_POLL_S = 0.5  # where the kernel sent no signal
_LOOK_S = 60.0
_SHARED = Path("/dev/shm")  # noqa: S108 - the engines chose it
_NOT_RUN = 127


class Watch:
    """What happens to this process: told by signals, or its parent ends, or a child does."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.told: set[int] = set()
        self.ended: dict[int, int] = {}  # exit code, or negative signal, by process id
        self._wakes, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a thread of our parent's may have had some blocked
        _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)  # sent when that thread ends; whether the process did is then asked
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    @property
    def is_orphan(self) -> bool:
        """Whether the parent ended."""
        return os.getppid() != self._parent

    @property
    def is_hurried(self) -> bool:
        """Whether all is to be killed at once."""
        return self.is_orphan or not self.told.isdisjoint({signal.SIGINT, signal.SIGHUP})

    def wait(self, seconds: float) -> None:
        """Block until something happened, for at most so long and never for more than half a second; note it."""
        if select.select([self._wakes], [], [], max(0.0, min(seconds, _POLL_S)))[0]:
            self.told.update(os.read(self._wakes, 4096))
        self.reap()

    def reap(self) -> None:
        """Take note of the children that ended."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return


class SharedFiles:
    """The files in /dev/shm that are this engine's: a killed one leaves them there, and they are memory.

    They are told apart by inode: a semaphore's creator has it mapped under a name that is gone.
    """

    def __init__(self) -> None:
        self._foreign = _shared_files()
        self._seen: set[tuple[Path, int]] = set()

    def look(self) -> None:
        """Note those that our descendants have mapped and that were not there before them."""
        mapped = mapped_inodes(descendants())
        self._seen |= {(path, inode) for path, inode in _shared_files() - self._foreign if inode in mapped}

    def remove(self) -> None:
        """Remove what was noted and is still there, unless another process uses it."""
        left = self._seen & _shared_files()
        used = mapped_inodes(_parents()) if left else set()
        for path, inode in left:
            if inode not in used:
                path.unlink(missing_ok=True)


def main(parent: int, status: int, grace: float, command: list[str]) -> None:
    """Be ``outer``, and let a fork be ``inner``. Ends the process."""
    os.set_inheritable(status, False)
    me = os.getpid()
    inner = os.fork()
    if inner == 0:
        guard(me, status, grace, command)
    watch = Watch(parent)
    while inner not in watch.ended and not watch.is_orphan:
        watch.wait(_POLL_S)
        for number in watch.told - {signal.SIGCHLD, signal.SIGUSR1}:
            _send(inner, number)
        watch.told.clear()
    kill_all(watch)
    end_as(watch.ended.get(inner, 1))


def guard(parent: int, status: int, grace: float, command: list[str]) -> None:
    """Be ``inner``. Ends the process."""
    watch = Watch(parent)
    shared = SharedFiles()
    child = start(command)
    os.write(status, b"%d\n" % child)
    serve(watch, shared, child, status)
    shared.look()
    if signal.SIGTERM in watch.told:
        _send(child, signal.SIGTERM)
        await_end(watch, grace, lambda: child in watch.ended)
    if child in watch.ended:
        await_end(watch, _ORPHANS_S, lambda: not descendants())
    shared.look()
    kill_all(watch)
    shared.remove()
    end_as(watch.ended.get(child, 1))


def start(command: list[str]) -> int:
    """Start the command, which is killed if this process is, and return its process id."""
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()  # so that what it sends to its group does not come here
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == me:
            os.execvp(command[0], command)  # noqa: S606 - to run it is what this program is for
    except OSError as error:
        say(f"cannot run {command[0]}: {error}")
    finally:
        os._exit(_NOT_RUN)


def serve(watch: Watch, shared: SharedFiles, child: int, status: int) -> None:
    """Wait until the command ends, or is to end."""
    look_at = time.monotonic() + _LOOK_S
    while child not in watch.ended and not watch.is_hurried and signal.SIGTERM not in watch.told:
        watch.wait(_POLL_S)
        asked = signal.SIGUSR2 in watch.told
        if asked or time.monotonic() > look_at:
            watch.told.discard(signal.SIGUSR2)
            look_at = time.monotonic() + _LOOK_S
            shared.look()
        if asked:
            os.write(status, b"noted\n")


def await_end(watch: Watch, seconds: float, is_over: Callable[[], bool]) -> None:
    """Wait until something is over, for so long at most, or until there is no time for it any more."""
    deadline = time.monotonic() + seconds
    while not is_over() and not watch.is_hurried and (left := deadline - time.monotonic()) > 0:
        watch.wait(min(left, 0.05))


def kill_all(watch: Watch) -> None:
    """Kill everything below this process and see it gone."""
    deadline = time.monotonic() + _KILL_S
    while left := descendants():
        for pid in left:
            _send(pid, signal.SIGKILL)
        watch.wait(0.02)
        if time.monotonic() > deadline:
            say(f"killed, but not gone after {_KILL_S:.0f} s: {sorted(left)}")
            return
    watch.reap()


def end_as(code: int) -> None:
    """End this process as a child of it ended, so that whoever waits for this one sees what became of that one."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def descendants() -> set[int]:
    """The processes below this one, zombies too."""
    parents = _parents()
    below: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    ask = [os.getpid()]
    while ask:
        children = below.get(ask.pop(), [])
        found.update(children)
        ask.extend(children)
    return found


def say(words: str) -> None:
    """Write a line to standard error, which is the engine's log."""
    os.write(2, f"launch_guard: {words}\n".encode(errors="replace"))


def _parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - asked often
        try:
            if name.isdigit():
                found[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:  # it ended
            continue
    return found


def mapped_inodes(pids: set[int] | dict[int, int]) -> set[int]:
    """The inodes of the files in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except OSError:  # it ended, or is somebody else's
            continue
        found |= {int(line.split(None, 5)[4]) for line in lines if b" /dev/shm/" in line}
    return found


def _shared_files() -> set[tuple[Path, int]]:
    """This user's files in /dev/shm, with their inodes."""
    found = set()
    for path in _SHARED.iterdir() if _SHARED.is_dir() else ():
        try:
            facts = path.lstat()
        except OSError:  # removed meanwhile
            continue
        if facts.st_uid == os.getuid():
            found.add((path, facts.st_ino))
    return found


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
