"""Processes of a large fleet, for `fleet.py`: real routers, and mock instances (`mock_fleet.py`) attached to all of them."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import report

import router
from pdserve.errors import SetupError

MOCKS = Path(__file__).parent / "mock_fleet.py"
TIMEOUT_S = 600.0
POLL_S = 0.05


class RouterProcess:
    """A router, with methods for what one may see of it from outside."""

    def __init__(self, http_port: int, control_port: int, lease_seconds: float) -> None:
        self.port, self.control_port = http_port, control_port
        self._command = [
            *router.router_command(http_port, control_port, http_port),
            "--instance-timeout-seconds",
            str(lease_seconds),
        ]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=TIMEOUT_S)
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        return report.cpu_seconds([self.pid])

    @property
    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    @property
    def num_attached(self) -> int:
        return int(self.get("/ready").json().get("instances", 0))

    @property
    def num_keys(self) -> int:
        """Number of block keys in the prefix index, summed over instances."""
        return sum(one["cached_blocks"] for one in self.get("/debug/instances").json()["instances"])

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def wait_alive(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self.get("/health")
                return
            except httpx.TransportError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise SetupError(f"the router does not serve; try {' '.join(self._command)}") from None
                time.sleep(POLL_S)

    def wait_attached(self, num_instances: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (attached := self.num_attached) != num_instances:
            _poll(deadline, f"{attached} of {num_instances} instances are attached")

    def wait_indexed(self, num_keys: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (known := self.num_keys) != num_keys:
            _poll(deadline, f"{known} of {num_keys} block keys are known")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait()


def _poll(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise SetupError(f"{why} after {TIMEOUT_S:g} s; the machine may be too slow for this fleet")
    time.sleep(POLL_S)


class Mocks:
    """A process with mock instances."""

    def __init__(self, routers: list[RouterProcess], first: int, count: int) -> None:
        addresses = ",".join(f"127.0.0.1:{one.control_port}" for one in routers)
        command = [sys.executable, str(MOCKS), addresses, str(first), str(count)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> dict[str, int]:
        """Send a command and return the totals."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        totals: dict[str, int] = json.loads(self._process.stdout.readline())
        return totals

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()


@dataclass
class Fleet:
    """Routers and mock instances of one case."""

    routers: list[RouterProcess]
    mocks: list[Mocks]
    num_instances: int

    def tell(self, line: str) -> dict[str, int]:
        return dict(sum((Counter(one.tell(line)) for one in self.mocks), Counter()))

    def measure(self, seconds: float) -> dict[str, float]:
        """Return rates over this time: of each router, in the mean."""
        started, before, totals = time.perf_counter(), self._cpu_s(), self.tell("totals")
        time.sleep(seconds)
        elapsed, cpu, later = time.perf_counter() - started, self._cpu_s() - before, self.tell("totals")
        rate = 1 / elapsed / len(self.routers)
        heartbeats, keys = (later.get(name, 0) - totals.get(name, 0) for name in ("heartbeats", "keys"))
        return {"cpu": cpu * rate, "heartbeats": heartbeats * rate, "keys": keys / elapsed}

    def _cpu_s(self) -> float:
        return sum(one.cpu_s for one in self.routers)


@contextmanager
def running_routers(count: int, lease_seconds: float) -> Iterator[list[RouterProcess]]:
    """Start routers, and yield them once they answer."""
    ports = router.free_ports(2 * count)
    with ExitStack() as stack:
        routers = []
        for http, control in zip(ports[:count], ports[count:], strict=True):
            routers.append(RouterProcess(http, control, lease_seconds))
            stack.callback(routers[-1].stop)
        for one in routers:
            one.wait_alive()
        yield routers


@contextmanager
def attached(routers: list[RouterProcess], num_instances: int) -> Iterator[Fleet]:
    """Attach mock instances to all routers, and yield the fleet once they are."""
    half = num_instances // 4 * 2  # whole pairs
    with ExitStack() as stack:
        mocks = []
        for first, count in ((0, half), (half, num_instances - half)):
            if count:
                mocks.append(Mocks(routers, first, count))
                stack.callback(mocks[-1].stop)
        for one in routers:
            one.wait_attached(num_instances)
        yield Fleet(routers, mocks, num_instances)
