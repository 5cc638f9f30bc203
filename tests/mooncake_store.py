"""A Mooncake Store for tests: a real master, and a process that provides the memory."""

import importlib.util
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve.cli.deployment import free_port

HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 300 << 20, 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


class Mooncake:
    """A running Mooncake master, and a process that holds the stored data."""

    def __init__(self) -> None:
        self.port = free_port()
        metrics = free_port(exclude=self.port)
        self.url = f"mooncake://127.0.0.1:{self.port}"
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations is not None
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        program.chmod(0o755)
        self._command: list[Any] = [
            program,
            *(f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"),
            *("--default_kv_lease_ttl=500", "--client_ttl=3"),
            *("--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=4"),
        ]
        self.start()
        self.holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "0\n"

    def start(self) -> None:
        self.master = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError("the Mooncake master does not listen")

    def close(self) -> None:
        for process in (self.holder, self.master):
            process.kill()
            process.wait()
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.close()
        self.holder.stdout.close()
