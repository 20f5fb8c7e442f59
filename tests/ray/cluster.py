"""A local Ray of the test session: small, without its dashboard, its files in a folder that goes away with it.

Ray cannot be told to listen on one address: its GCS, raylet and workers bind to all interfaces (the node address only
says where to find them), and on its way up it asks the kernel which way 8.8.8.8 would lie, without sending anything.
Hence the session moves to a private loopback, where that is permitted, and a token of this session guards the ports.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

STORE_BYTES = 100 * 2**20
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


@contextmanager
def local_ray() -> Iterator[ModuleType]:
    """Ray, running: started here, unless another fixture of the session has it running already.

    Drivers in child processes find it by ``RAY_ADDRESS`` when they call ``ray.init()``.
    """
    running = sys.modules.get("ray")
    if running is not None and running.is_initialized():
        yield running
    else:
        yield from _started()


def _started() -> Iterator[ModuleType]:
    folder = tempfile.mkdtemp(prefix="rs-ray-", dir="/tmp")  # short: sockets go there, and their paths are limited
    settings = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    before = {name: os.environ.get(name) for name in (*settings, "RAY_ADDRESS")}
    os.environ.update(settings)
    import ray  # reads some of these once, when it is imported

    try:
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            configure_logging=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
        yield ray
    finally:
        ray.shutdown()
        _restore(before)
        shutil.rmtree(folder, ignore_errors=True)


def _restore(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
