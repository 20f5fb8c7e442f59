"""Servers that a test scripts: they take an engine's place, as modules of the names that engines are started by.

A folder with ``sglang/launch_server.py`` goes in front of the child's ``PYTHONPATH``; the real command line starts it.
"""

from __future__ import annotations

from pathlib import Path

# Serves /health with the status that a file beside it holds (503 at first where there is none), and says what it got.
SERVER = """
import argparse, http.server, json, os, signal, subprocess, sys, time

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--port", type=int)
known, rest = parser.parse_known_args()
print(json.dumps({"argv": sys.argv[1:], "env": os.environ.get("GREETING"), "pid": os.getpid()}), flush=True)
HERE = os.environ["SCRIPT_FOLDER"]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = 200
        if os.path.exists(HERE + "/status"):
            status = int(open(HERE + "/status").read())
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def note(name, pid):
    fresh = f"{HERE}/{name}.{os.getpid()}"  # several servers may share the folder
    with open(fresh, "w") as file:
        file.write(str(pid))
    os.rename(fresh, f"{HERE}/{name}")


SLEEP = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
if "--child" in rest:  # in a session of its own, deaf, and left behind by its parent
    middle = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,"
        " stdout=subprocess.PIPE); child.stdout.readline(); print(child.pid)"
    )
    told = subprocess.run([sys.executable, "-c", middle, SLEEP], stdout=subprocess.PIPE, text=True, check=True)
    note("child", told.stdout.strip())
if "--shared" in rest:
    from multiprocessing import resource_tracker, shared_memory

    block = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(block._name, "shared_memory")
    import _multiprocessing

    semaphore = _multiprocessing.SemLock(1, 1, 1, f"/rolloutsync-{os.getpid()}", False)
    note("shared", f"{block.name} sem.rolloutsync-{os.getpid()}")
if "--deaf" in rest:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--mute" in rest:
    note("up", os.getpid())
    time.sleep(600)
if "--fail" in rest:
    print("\\n".join(f"line {n}" for n in range(200)))
    sys.exit("no such model, with many words about why")
server = http.server.ThreadingHTTPServer(("127.0.0.1", known.port), Handler)
note("up", os.getpid())
server.serve_forever()
"""


class Script:
    """A scripted server's folder: what it is told, and what it tells.

    Args:
        folder: Empty, the test's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for module in ("sglang/launch_server.py", "vllm/entrypoints/openai/api_server.py"):
            path = folder / "modules" / module
            path.parent.mkdir(parents=True)
            path.write_text(SERVER)
            for parent in path.relative_to(folder / "modules").parents:
                (folder / "modules" / parent / "__init__.py").touch()

    @property
    def env(self) -> dict[str, str]:
        """What the child needs to find it."""
        return {"PYTHONPATH": str(self.folder / "modules"), "SCRIPT_FOLDER": str(self.folder)}

    def answers(self, status: int) -> None:
        """What ``/health`` says from now on."""
        fresh = self.folder / "status.new"
        fresh.write_text(str(status))
        fresh.rename(self.folder / "status")

    def told(self, name: str) -> str:
        """What the server wrote under this name."""
        return (self.folder / name).read_text()

    def has_told(self, name: str) -> bool:
        return (self.folder / name).exists()
