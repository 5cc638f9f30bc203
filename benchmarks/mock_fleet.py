"""Many mock instances in one process, with pools whose block keys come and go, controlled by lines on stdin.

    python benchmarks/mock_fleet.py ROUTER[,ROUTER…] FIRST COUNT     instances number FIRST and up, prefill and decode in turn

    pool KEYS    each instance holds this many block keys from now on
    news RATE    each instance replaces its oldest keys by new ones, this many a second
    totals       changes nothing

Each line is answered by a line of JSON: heartbeats sent to all routers, and keys added and removed, since the start. A
prefill instance and the decode instance after it hold the same keys, as the KV of a prompt is in the pools of both.
"""

import asyncio
import json
import resource
import sys
from collections import deque

import uvloop
import xxhash
from mock_instance import MockInstance, hello

STEP_S = 0.0  # of the mocks: an answer at once
NEWS_INTERVAL_S = 0.1


class Pool:
    """The block keys of one instance. Instances with the same `seed` have the same keys."""

    def __init__(self, instance: MockInstance, seed: int) -> None:
        self._events, self._seed = instance.kv_events, seed
        self._keys: deque[bytes] = deque()
        self.num_made = 0

    def resize(self, num_keys: int) -> None:
        self.add(max(0, num_keys - len(self._keys)))
        while len(self._keys) > num_keys:
            self._events.remove(self._keys.popleft())

    def replace(self, num_keys: int) -> None:
        self.add(num_keys)
        for _ in range(num_keys):
            self._events.remove(self._keys.popleft())

    def add(self, num_keys: int) -> None:
        for number in range(self.num_made, self.num_made + num_keys):
            key = xxhash.xxh3_128_digest(number.to_bytes(8, "big"), self._seed)
            self._keys.append(key)
            self._events.store(key)
        self.num_made += num_keys


class MockFleet:
    """The instances of this process."""

    def __init__(self, routers: list[str], numbers: range) -> None:
        self._routers = routers
        self._instances = {f"{'decode' if i % 2 else 'prefill'}-{i}": MockInstance(STEP_S) for i in numbers}
        self._pools = [Pool(instance, i // 2) for i, instance in zip(numbers, self._instances.values(), strict=True)]
        self._news, self._changed = 0.0, 0

    async def run(self) -> None:
        """Run until stdin ends."""
        serving = [
            asyncio.create_task(instance.serve(self._routers, hello(name, name.partition("-")[0], "demo")))
            for name, instance in self._instances.items()
        ]
        serving.append(asyncio.create_task(self._replace_keys()))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            self._obey(*line.decode().split())
            print(json.dumps(self.totals()), flush=True)
        for task in serving:
            task.cancel()

    def totals(self) -> dict[str, int]:
        heartbeats = sum(instance.num_heartbeats for instance in self._instances.values())
        return {"heartbeats": heartbeats, "keys": self._changed}

    def _obey(self, command: str, amount: str = "0") -> None:
        if command == "news":
            self._news = float(amount)
        elif command == "pool":
            for pool in self._pools:
                pool.resize(int(amount))

    async def _replace_keys(self) -> None:
        """Replace keys at the rate of `news`, a part of all pools in each turn."""
        due, loop = 0.0, asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(NEWS_INTERVAL_S)
            now = loop.time()
            due += (now - last) * self._news
            last, count = now, int(due)
            due -= count
            for pool in self._pools:
                pool.replace(count)
            self._changed += 2 * count * len(self._pools)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    first = int(sys.argv[2])
    uvloop.run(MockFleet(sys.argv[1].split(","), range(first, first + int(sys.argv[3]))).run())
