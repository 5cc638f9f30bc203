"""`redis+cluster://user:password@host:port,host:port?ttl=600&value_bytes=2MiB`: a Redis Cluster; `rediss+cluster://` (TLS).

The hosts are some of the cluster's nodes, from which the others are discovered. Values are those of `connector.py`. All
values of a block are in one slot, and blocks are distributed over the slots by their keys, which are digests. The nodes work
on their shares of an operation in parallel, and when a node fails, only its share fails.

A command that a node redirects (MOVED, ASK) is sent once more, to the node named. The slot map is fetched again after MOVED,
and after a node failed.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, ClassVar, TypeVar

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import AskError, MovedError, RedisClusterException

from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connectors.redis.connector import Command, RedisConnector, RedisServer
from pdserve.kv_transfer.url import split

_MATCH_KEYS = 256  # per query: a match ends with the first missing key
_REFRESH_INTERVAL_S = 1.0  # minimum time between two fetches of the slot map
_FAULTS: tuple[type[Exception], ...] = (*RedisConnector.faults, RedisClusterException)
# redis-py raises IndexError if no slot is assigned.
_SLOT_MAP_FAULTS: tuple[type[Exception], ...] = (*_FAULTS, IndexError)

T = TypeVar("T")


class _Node(RedisServer):
    """A node of the cluster. Follows its redirections to other nodes."""

    def __init__(self, cluster: "RedisClusterConnector", host: str, port: int) -> None:
        super().__init__(cluster.create_node_pool(host, port), cluster.names, cluster.log_error)
        self.name = f"{host}:{port}"
        self._host = host
        self._cluster = cluster

    def call(self, *commands: Command, batch_commands: int = 0) -> Iterator[Any]:
        # Strict, so that the replies are exhausted, which returns the connection to the pool.
        for reply, command in zip(super().call(*commands, batch_commands=batch_commands), commands, strict=True):
            if isinstance(reply, AskError):
                yield from self._redirect(reply, command)
            else:
                yield reply

    def _redirect(self, error: AskError, command: Command) -> Iterator[Any]:
        """Yield the reply of the node named by a MOVED or ASK error. Holds its connection until resumed."""
        target = self._cluster.node_at(error.host or self._host, error.port)
        if isinstance(error, MovedError):
            self._cluster.invalidate_slot_map()
            yield from RedisServer.call(target, command)
        else:
            yield from islice(RedisServer.call(target, ("ASKING",), command, batch_commands=1), 1, None)


class RedisClusterConnector(RedisConnector):
    """Stores blocks on the nodes of a Redis Cluster."""

    scheme: ClassVar[str] = "redis+cluster"
    faults = _FAULTS

    def open(self) -> None:
        self.names = self._block_names()
        self.log_error = self._log_error
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._nodes_lock = threading.Lock()
        self._is_map_stale, self._map_fetched_at = False, time.monotonic()
        self._hosts = [(parts.hostname or "", parts.port or 6379) for parts in map(split, self._addresses)]
        self._slot_map: Any = None  # untyped in redis-py; None until a node has answered
        try:
            self._slot_map = self._fetch_slot_map()
        except _SLOT_MAP_FAULTS as error:
            self._fail_to_open("Redis Cluster", error.__cause__ if isinstance(error.__cause__, Exception) else error)
            self.invalidate_slot_map()
        self._threads = ThreadPoolExecutor(16 * self.threads, thread_name_prefix="kv-redis-cluster")

    def shut(self) -> None:
        self._threads.shutdown()
        if self._slot_map is not None:
            self._slot_map.disconnect_connection_pools()
        for node in self._nodes.values():
            node.pool.disconnect()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        milliseconds = self._ttl_ms(lease_s)
        self._run_on_nodes(blocks, _key_of, lambda node, share: node.put(share, milliseconds))

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._run_on_nodes(blocks, _key_of, lambda node, share: node.get(share))

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _MATCH_KEYS):
            chunk, stored = keys[start : start + _MATCH_KEYS], set[bytes]()

            def query(node: _Node, share: Sequence[bytes], stored: set[bytes] = stored) -> None:
                stored.update(key for key, found in zip(share, node.contains(share), strict=True) if found)

            self._run_on_nodes(chunk, bytes, query)
            yield from (key in stored for key in chunk)

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        milliseconds = self._ttl_ms(lease_s)
        self._run_on_nodes(keys, bytes, lambda node, share: node.prolong(share, milliseconds))

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._run_on_nodes(keys, bytes, lambda node, share: node.delete(share))

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        self._run_on_nodes(blocks, _key_of, lambda node, share: node.delete_corrupt(share))

    def invalidate_slot_map(self) -> None:
        """Have the slot map fetched again before the next operation."""
        self._is_map_stale = True

    def node_at(self, host: str, port: int) -> _Node:
        with self._nodes_lock:
            if (host, port) not in self._nodes:
                self._nodes[host, port] = _Node(self, host, port)
            return self._nodes[host, port]

    def create_node_pool(self, host: str, port: int) -> redis.ConnectionPool:
        parts = split(self._addresses[0])
        login, at, _ = parts.netloc.rpartition("@")
        return self._create_pool(f"{parts.scheme}://{login}{at}{f'[{host}]' if ':' in host else host}:{port}")

    def _run_on_nodes(
        self, items: Sequence[T], key_of: Callable[[T], bytes], work: Callable[[_Node, list[T]], None]
    ) -> None:
        """Run `work` on all nodes in parallel, each with its share of the items. Faults of a node are logged, not raised."""
        self._refresh_slot_map()
        shares: dict[_Node, list[T]] = {}
        for item in items:
            node = self._node_of(key_of(item))
            if node is not None:
                shares.setdefault(node, []).append(item)
        futures = [self._threads.submit(self._run_on_node, work, node, share) for node, share in shares.items()]
        wait(futures)
        for future in futures:
            future.result()

    def _run_on_node(self, work: Callable[[_Node, list[T]], None], node: _Node, share: list[T]) -> None:
        try:
            work(node, share)
        except self.faults as fault:
            self.invalidate_slot_map()
            self._limited_log.warning(f"{node.name} failed: {type(fault).__name__}: {fault}", kind=node.name)

    def _node_of(self, key: bytes) -> _Node | None:
        if self._slot_map is None:
            return None
        try:
            node = self._slot_map.get_node_from_key(self.names.hash_tag(key))
        except RedisClusterException as error:  # no node has this slot
            self.invalidate_slot_map()
            self._limited_log.warning(str(error), kind="slot")
            return None
        return self.node_at(node.host, node.port)

    def _refresh_slot_map(self) -> None:
        now = time.monotonic()
        if not self._is_map_stale or now < self._map_fetched_at + _REFRESH_INTERVAL_S:
            return
        self._is_map_stale, self._map_fetched_at = False, now
        try:
            if self._slot_map is None:
                self._slot_map = self._fetch_slot_map()
            else:
                self._slot_map.nodes_manager.initialize(additional_startup_nodes_info=self._hosts)
        except _SLOT_MAP_FAULTS as error:
            self.invalidate_slot_map()
            self._limited_log.warning(f"the slot map cannot be fetched: {error}", kind="map")

    def _fetch_slot_map(self) -> RedisCluster:
        """Create redis-py's client, used for its slot map only: it retries commands that must not be sent twice."""
        timeout = self.timeout / 4  # it may query several nodes before the operation's deadline
        return RedisCluster(
            url=self._addresses[0],
            startup_nodes=[ClusterNode(host, port) for host, port in self._hosts[1:]],
            require_full_coverage=False,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            protocol=2,
            **self._login(),
        )


def _key_of(block: Incoming | Outgoing) -> bytes:
    return block.key
