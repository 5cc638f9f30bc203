"""KV events over ZMQ, read by a subscriber with structs of its own, written from vLLM's published format."""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.cli.deployment import free_port
from pdserve.errors import SetupError
from pdserve.instance.kv_events_config import KVEventsConfig
from pdserve.interop import vllm_kv_events
from pdserve.interop.zmq_publisher import ZmqPublisher
from pdserve.keys import STATE_WINDOW, KeyChain, block_keys, root_key
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.kv_events.sources import KVEventsSource
from pdserve.router.kv_events.subscriber import STORE, Subscriber
from pdserve.router.scheduling.prefix_index import PrefixIndex

BLOCK = 16
TIMEOUT_MS = 60_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Mirror:
    """The blocks of a pool, and those of the store, by the events: key → (parent, tokens)."""

    def __init__(self) -> None:
        self.media: dict[str, dict[Any, tuple[Any, tuple[int, ...]]]] = {"GPU": {}, "STORAGE": {}}
        self.blocks, self.stored = self.media.values()
        self.next_number = self.num_removed = 0
        self.salted: set[Any] = set()  # the first blocks of prompts that have a salt

    def apply(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next_number
        self.next_number += 1
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, BlockStored):
                assert event.medium is not None and event.block_size == BLOCK
                blocks, parent = self.media[event.medium], event.parent_block_hash
                if event.extra_keys:
                    assert parent is None and len(event.extra_keys) == len(event.block_hashes)
                    assert event.extra_keys[0] and not any(event.extra_keys[1:])
                    self.salted.add(event.block_hashes[0])
                for i, key in enumerate(event.block_hashes):
                    assert key not in blocks
                    blocks[key] = parent, tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK])
                    parent = key
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                self.num_removed += len(event.block_hashes)
                for key in event.block_hashes:
                    del self.media[event.medium][key]
            else:
                self.blocks.clear()

    def prompt_of(self, key: Any) -> list[int]:
        """Return the tokens from the start to the end of a block."""
        parent, tokens = self.blocks[key]
        return [*(self.prompt_of(parent) if parent is not None else []), *tokens]


@contextmanager
def connected(kind: int, port: int) -> Iterator[Any]:
    client: Any = zmq.Context.instance().socket(kind)
    client.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield client
    finally:
        client.close(linger=0)


def replay(port: int, first: int, mirror: Mirror, expected_topic: bytes = b"kv") -> None:
    """Apply the kept batches from number `first` on."""
    with connected(zmq.DEALER, port) as client:
        client.send_multipart((b"", first.to_bytes(8, "big")))
        while client.poll(TIMEOUT_MS):
            _, topic, number, payload = client.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            assert topic == expected_topic
            mirror.apply(number, payload)
    raise AssertionError("the replay has no end")


def catch_up(port: int, mirror: Mirror, keys: dict[bytes, None], stored: Iterable[bytes] = ()) -> None:
    """Replay what is missing until the blocks equal `keys`, and the store has `stored`: batches may still be queued."""
    for _ in range(600):
        replay(port, mirror.next_number, mirror)
        if mirror.blocks.keys() == keys.keys() and mirror.stored.keys() >= set(stored):
            return
    known = f"{len(mirror.blocks)} blocks in the pool and {len(mirror.stored)} in the store"
    raise AssertionError(f"{known} by the events, {len(keys)} in the pool")


async def follow(source: KVEventsSource, root: bytes, num_blocks: int) -> PrefixIndex:
    """Return the index of a router that has followed a publisher until it knows of so many blocks in the store."""
    index = PrefixIndex()
    subscriber = Subscriber(source, index, lambda: root, lambda outcome, n: None)
    task = asyncio.create_task(subscriber.run())
    async with asyncio.timeout(60):
        while index.num_blocks(STORE) < num_blocks:
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return index


def test_events_equal_the_pool(checkpoint: Any, make_instance: Callable[..., Any]) -> None:
    path = checkpoint("llama", dtype="float32")
    driver = make_instance(
        model=str(path), connector="memory://zmq-events", num_blocks=12, block_size=BLOCK, device="cpu"
    )
    instance, (port, replay_port) = driver.instance, (free_port(), free_port())
    config: dict[str, Any] = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}", "topic": "kv"}
    instance.publish_events(KVEventsConfig(enable_kv_cache_events=True, **config))
    news = instance.kv_events.subscribe()
    keys: dict[bytes, None] = {}

    def generate(name: str, prompt: list[int], salt: str = "") -> None:
        driver.submit(name, prompt, 20, pb.BOTH, salt=salt)
        driver.run_until(lambda _: len(driver.tokens(name)) == 20)
        driver.run_until_idle()
        removed, added = news.pop_batch(1000)
        keys.update(dict.fromkeys(added))
        for key in removed:
            keys.pop(key, None)

    live, late = Mirror(), Mirror()
    prompts = [[start + i for i in range(3 * BLOCK + 1)] for start in (10, 30, 50, 70, 90)]
    generate("unheard", prompts[0])  # nobody has subscribed
    with connected(zmq.SUB, port) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        for i in itertools.count():
            generate(str(i), prompts[1 + i % 4])
            if i % 4 == 3 and subscriber.poll(100):  # from now on it misses nothing
                break
        catch_up(replay_port, live, keys)  # all are kept: the whole history
        assert set(live.blocks) == set(keys) and live.num_removed > 0
        assert any(live.prompt_of(key) == prompts[-1][: 3 * BLOCK] for key in live.blocks)
        generate("last", prompts[0])
        num_replayed = live.next_number
        while live.blocks.keys() != keys.keys() and subscriber.poll(TIMEOUT_MS):
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(number, "big") >= live.next_number:
                live.apply(number, payload)
    assert live.next_number > num_replayed, "nothing came by the subscription"
    root = root_key(model_digest=instance.engine.layout.model_digest)
    expected = {key for prompt in prompts for key in block_keys(root, prompt, BLOCK)}
    catch_up(replay_port, late, keys, expected)
    assert late.blocks == live.blocks and set(live.blocks) == set(keys)

    stored = set(late.stored)
    source = KVEventsSource(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{replay_port}")
    index = asyncio.run(follow(source, root, len(stored)))
    assert all(index.match([key]) for key in stored) and index.num_blocks(STORE) == len(stored)
    instance.transfers.listener.on_missing([b"never published.", *stored])
    generate("after", prompts[1])
    again = block_keys(root, prompts[1], BLOCK)
    catch_up(replay_port, late, keys, again)
    assert set(late.stored) <= {*again, *keys} and set(late.stored) < stored, (
        "withdrawn, and stored again by the last prompt"
    )

    assert not late.salted
    generate("salted", prompts[1], "of a tenant")
    salted = root_key(model_digest=instance.engine.layout.model_digest, salt="of a tenant")
    catch_up(replay_port, late, keys, block_keys(salted, prompts[1], BLOCK))
    assert late.salted == {block_keys(salted, prompts[1], BLOCK)[0]}

    with pytest.raises(SetupError, match=f"{port}: Address already in use"):
        instance.publish_events(KVEventsConfig(enable_kv_cache_events=True, **config))


def test_a_router_follows_an_instance(
    deploy: Callable[..., Any],
    complete: Callable[..., Any],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
) -> None:
    port, replay_port = free_port(), free_port()
    published = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    followed = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}"}
    flags = {
        "prefill": ["--kv-events-config", json.dumps(published)],
        "router": ["--kv-events-subscribe", json.dumps([followed])],
    }
    with deploy(flags=flags) as deployment:

        def batches(outcome: str) -> float:
            return metric(deployment, "kv_event_batches_followed_total", endpoint=followed["endpoint"], outcome=outcome)

        for start in (10, 200):
            before = batches("applied")
            complete(deployment, prompt=[start + i for i in range(3 * BLOCK)], max_tokens=2)
            wait_until(lambda before=before: batches("applied") > before, "the events of a prompt")
        assert batches("refused") == batches("lost") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"port": 1}', "port: unknown key"),
        ('{"hwm": 0}', "hwm: Input should be greater"),
        ('{"endpoint": "tcp://*:1"}', 'add "enable_kv_cache_events": true; without it'),
    ],
)
def test_invalid_settings(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        KVEventsConfig.load_setting(text)


@pytest.mark.parametrize("kind", [b"DEALER", b"SUB"])
def test_large_messages_end_their_connection(kind: bytes) -> None:
    port, replay_port = free_port(), free_port()
    config = KVEventsConfig(endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay_port}")
    publisher = ZmqPublisher(config, BLOCK, b"root", lambda: None)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    large = b"\x02" + (1 << 20).to_bytes(8, "big")  # the head of a frame
    try:
        with socket.create_connection(("127.0.0.1", replay_port if kind == b"DEALER" else port), 60) as client:
            client.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready + large)
            client.settimeout(0.1)
            while not is_closed(client):  # a PUB socket reads subscriptions as it sends
                publisher.remove(b"key")
                publisher.flush()
        replay(replay_port, 0, Mirror(), b"")
    finally:
        publisher.close()


def is_closed(client: socket.socket) -> bool:
    try:
        return not client.recv(65_536)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_events_name_the_groups_of_blocks() -> None:
    """Of a pool with windows and states; those of a pool of one group have no such fields."""
    tokens, found = [*range(BLOCK)], list[list[tuple[object, ...]]]()
    for windows in ([None, 128, STATE_WINDOW], [None]):
        config = KVEventsConfig(endpoint=f"tcp://*:{free_port()}")
        publisher = ZmqPublisher(config, BLOCK, b"root", lambda: None, windows)
        for group in range(len(windows)):
            publisher.store(b"key", None, tokens, group)
        publisher.remove(b"key", len(windows) - 1)
        found.append(
            [
                (
                    getattr(event, "group_idx", 0),
                    getattr(event, "kv_cache_spec_kind", ""),
                    getattr(event, "kv_cache_spec_sliding_window", 0),
                )
                for event in publisher._events
            ]
        )
        publisher.close()
    assert found[0] == [(0, "full_attention", None), (1, "sliding_window", 128), (2, "mamba", None), (2, "", 0)]
    assert found[1] == [(None, None, None), (None, "", 0)]


def test_the_block_in_which_an_adapter_begins_has_extra_keys() -> None:
    """Else readers that know blocks by their tokens would take it for the base's; those behind it have it as their parent."""
    tokens, root = [*range(5 * BLOCK)], bytes(16)
    base, activated = KeyChain(root), KeyChain(root, adapter=b"a" * 16, start=2 * BLOCK + 3)
    publisher = ZmqPublisher(KVEventsConfig(endpoint=f"tcp://*:{free_port()}"), BLOCK, root, lambda: None)
    for chain in (base, activated):
        keys = chain.block_keys(tokens, BLOCK)
        for i, key in enumerate(keys):
            if chain is base or i >= 2:
                publisher.store(key, keys[i - 1] if i else None, tokens[i * BLOCK : (i + 1) * BLOCK])
    first, second = publisher._events
    publisher.close()
    assert isinstance(first, vllm_kv_events.BlockStored) and isinstance(second, vllm_kv_events.BlockStored)
    assert first.extra_keys is None and len(first.block_hashes) == 5
    assert second.parent_block_hash == first.block_hashes[1]
    assert second.block_hashes == keys[2:] and second.extra_keys == [[keys[2].hex()], None, None]
