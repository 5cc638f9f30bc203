"""Deployment of the chaos benchmark: two prefill and two decode instances, a router, and a store that can be restarted.

One instance runs in a separate network namespace, if the permissions allow it.
"""

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import stores
from adapters import make_adapter
from island import NetworkNamespace

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.supervisor import Child
from pdserve.config import CONNECTOR_VARIABLE, UpConfig, parse_size
from pdserve.errors import SetupError
from pdserve.kv_transfer.connectors.shm.connector import count_leases

ON_ISLAND = "decode-1"
STORE_BYTES = parse_size("64MiB")
TIER_BYTES = parse_size("2MiB")  # little, so that blocks leave each tier
LEASE_S = 30.0  # of blocks in the store; leases of killed instances end only by expiry

Make = Callable[[UpConfig, Callable[[str], None]], Deployment]


class ChaosDeployment(Deployment):
    """A deployment with one instance in a network namespace, if there is one. `pids` are all processes ever started."""

    island: NetworkNamespace | None = None
    pids: set[int]

    def settle(self, island: NetworkNamespace | None) -> None:
        """Assign the namespace; must be called before the start."""
        self.island, self.pids = island, set()
        # Instances restart in less, also those that have failed repeatedly and wait, on a busy machine.
        self.child("router").arguments += ["--handover-timeout-seconds", "10", "--no-instance-timeout", "100"]
        for child in self.instances:
            child.arguments += ["--drain-seconds", "10"]
        if island is not None:
            router, there = self.child("router"), self.child(ON_ISLAND)
            router.arguments += ["--control-host", "0.0.0.0"]
            there.arguments = [word.replace("127.0.0.1", island.host) for word in there.arguments]
            there.environment |= {CONNECTOR_VARIABLE: self.connector.replace("127.0.0.1", island.host)}

    @property
    def instances(self) -> list[Child]:
        return [child for child in self.children if child.name != "router"]

    def stop_all(self) -> None:
        for child in self.instances:
            if child.running:
                os.kill(child.pid, signal.SIGCONT)  # a stopped process reacts to no other signal
        super().stop_all()

    def _start(self, child: Child) -> None:
        super()._start(child)
        self.pids.add(child.pid)

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
        if self.island is None or ON_ISLAND not in arguments:
            return super()._spawn(arguments, environment)
        with self.island.entered():
            return Deployment._spawn(self, arguments, environment)


@dataclass
class Stage:
    """The deployment and its environment.

    Attributes:
        store: the server to restart, if any.
        leases: returns the current number of leases in the store.
        said: every line that a process has printed.
        left_out: unavailable kinds of faults, with the reason.
    """

    deployment: ChaosDeployment
    store: stores.RedisServer | None
    leases: Callable[[], int]
    log_lines: list[str]
    left_out: dict[str, str]

    @property
    def followers(self) -> set[int]:
        """Processes of all further ranks ever started."""
        return {int(pid) for line in self.log_lines for pid in re.findall(r"in processes (\d+)$", line)}

    def left(self) -> dict[str, int]:
        """Counts that must be 0 after the last request."""
        segments = re.findall(r"shm://([^?,]+)", self.deployment.connector)
        return {
            "processes": sum(Path(f"/proc/{pid}").exists() for pid in self.deployment.pids | self.followers),
            "segments of shared memory": sum(name in file for file in os.listdir("/dev/shm") for name in segments),
        }


@contextmanager
def stage(
    kind: str, dtype: str, make: Make, ranks: int = 1, model: str = "", adapters: int = 0, **of_instances: Any
) -> Iterator[Stage]:
    """`kind` of store: redis, shm or tiered; `ranks` of each instance; `model`: a checkpoint, or "" for a random one;
    `adapters`: how many random ones there are, called a0 and so on, with slots for a third of them.
    """
    left_out: dict[str, str] = {} if ranks > 1 else {"rank": "instances have one rank"}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        island = store = None
        try:
            island = stack.enter_context(NetworkNamespace())
        except SetupError as error:
            left_out["cut"] = str(error)
        urls, leased = list[str](), list[Callable[[], int]]()
        if kind in ("shm", "tiered"):
            urls.append(stack.enter_context(stores.shm(STORE_BYTES if kind == "shm" else TIER_BYTES)))
            leased.append(partial(count_leases, urls[0]))
        if kind == "tiered":
            urls.append(f"file://{folder}/kv?max_bytes={TIER_BYTES}")
        if kind == "shm":
            left_out["store"] = f"--store {kind} has no server"
        else:
            size = STORE_BYTES if kind == "redis" else 4 * TIER_BYTES
            store = stores.RedisServer(folder, size, "127.0.0.1", *([island.host] if island else []))
            stack.callback(store.kill)
            urls.append(f"redis://127.0.0.1:{store.port}/0?timeout=2")
            leased.append(store.count_permanent)
        path = Path(model) if model else checkpoints.make(checkpoints.TINY, Path(folder) / "model")
        made = [make_adapter(Path(folder) / f"a{i}", path, 4 << i % 3, i) for i in range(adapters)]
        config = UpConfig(
            model=str(path),
            lora_modules=",".join(f"{one.name}={one}" for one in made),
            max_loras=max(1, adapters // 3),
            dtype=dtype,
            tensor_parallel_size=ranks,
            **of_instances,
            port=free_port(),
            prefill=2,
            decode=2,
            num_blocks=256,
            max_num_batched_tokens=128,
            threads=1,
            connector=urls[0] if len(urls) == 1 else ",".join(["tiered://?buffer=1MiB", *urls]),
            lease_seconds=LEASE_S,
        )
        log_lines: list[str] = []
        deployment = make(config, log_lines.append)
        assert isinstance(deployment, ChaosDeployment)
        deployment.settle(island)
        stack.enter_context(deployment)
        deployment.wait_ready()
        yield Stage(deployment, store, lambda: sum(one() for one in leased), log_lines, left_out)
