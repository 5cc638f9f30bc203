"""`redis+cluster://user:password@host:port,host:port?ttl=600&value_bytes=2MiB`: a Redis Cluster; `rediss+cluster://` (TLS).

The hosts are some of its nodes, and name the others. Values are those of `redis.py`. All of a block lie in one slot, and
blocks spread over the slots by their keys, which are digests. Each node gets its share of an operation at the same time as
the others, and only that share fails with it.

A command that a node refuses because its slot is elsewhere (MOVED, ASK) is sent there, once. The map of the slots is
fetched again after that, and after a node failed.
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

from pdserve.errors import SetupError
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connectors.redis_connector import Command, RedisConnector, Server
from pdserve.kv_transfer.url import split, without_password

_MATCH_KEYS = 256  # asked for at a time: a match ends with the first key that is not there
_LOOK_EVERY_S = 1.0
_FAULTS: tuple[type[Exception], ...] = (*RedisConnector.faults, RedisClusterException)
_NO_MAP: tuple[type[Exception], ...] = (*_FAULTS, IndexError)  # the last: redis-py met no slots

T = TypeVar("T")


class _Node(Server):
    """A node that may send us to another one."""

    def __init__(self, cluster: "RedisClusterConnector", host: str, port: int) -> None:
        super().__init__(cluster.pool_of(host, port), cluster.names, cluster.complain)
        self.name = f"{host}:{port}"
        self._host = host
        self._cluster = cluster

    def call(self, *commands: Command, at_once: int = 0) -> Iterator[Any]:
        # Strict, so that the answers are asked for their end: the connection is given back then.
        for answer, command in zip(super().call(*commands, at_once=at_once), commands, strict=True):
            if isinstance(answer, AskError):
                yield from self._follow(answer, command)
            else:
                yield answer

    def _follow(self, error: AskError, command: Command) -> Iterator[Any]:
        """The one answer. The connection is held until the next is asked for."""
        there = self._cluster.node_at(error.host or self._host, error.port)
        if isinstance(error, MovedError):
            self._cluster.look_again()
            yield from Server.call(there, command)
        else:
            yield from islice(Server.call(there, ("ASKING",), command, at_once=1), 1, None)


class RedisClusterConnector(RedisConnector):
    scheme: ClassVar[str] = "redis+cluster"
    faults = _FAULTS

    def open(self) -> None:
        self.names = self._names()
        self.complain = self._complain
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._making = threading.Lock()
        self._stale, self._looked = False, time.monotonic()
        self._hosts = [(one.hostname or "", one.port or 6379) for one in map(split, self._addresses)]
        try:
            self._map: Any = self._fetch_map()  # untyped in redis-py
        except _NO_MAP as error:
            raise SetupError(f"No Redis Cluster answers at {without_password(self.url)}: {error}.") from error
        self._threads = ThreadPoolExecutor(16 * self.threads, thread_name_prefix="kv-redis-cluster")

    def shut(self) -> None:
        self._threads.shutdown()
        self._map.disconnect_connection_pools()
        for node in self._nodes.values():
            node.pool.disconnect()

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        milliseconds = self._milliseconds(lease_s)
        self._share(blocks, _key_of, lambda node, share: node.put(share, milliseconds))

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        self._share(blocks, _key_of, lambda node, share: node.get(share))

    def contains_many(self, keys: Sequence[bytes]) -> Iterator[bool]:
        for start in range(0, len(keys), _MATCH_KEYS):
            chunk, there = keys[start : start + _MATCH_KEYS], set[bytes]()

            def ask(node: _Node, share: Sequence[bytes], there: set[bytes] = there) -> None:
                there.update(key for key, found in zip(share, node.contains(share), strict=True) if found)

            self._share(chunk, bytes, ask)
            yield from (key in there for key in chunk)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._share(keys, bytes, lambda node, share: node.delete(share))

    def look_again(self) -> None:
        """Have the map of the slots fetched before the next operation."""
        self._stale = True

    def node_at(self, host: str, port: int) -> _Node:
        with self._making:
            if (host, port) not in self._nodes:
                self._nodes[host, port] = _Node(self, host, port)
            return self._nodes[host, port]

    def pool_of(self, host: str, port: int) -> redis.ConnectionPool:
        named = split(self._addresses[0])
        login, at, _ = named.netloc.rpartition("@")
        return self._pool(f"{named.scheme}://{login}{at}{f'[{host}]' if ':' in host else host}:{port}")

    def _share(self, items: Sequence[T], key_of: Callable[[T], bytes], work: Callable[[_Node, list[T]], None]) -> None:
        """Does the work on all nodes at once, on each with its share of the items. What fails on a node stays undone."""
        self._refresh()
        shares: dict[_Node, list[T]] = {}
        for item in items:
            node = self._node_of(key_of(item))
            if node is not None:
                shares.setdefault(node, []).append(item)
        done = [self._threads.submit(self._try, work, node, share) for node, share in shares.items()]
        wait(done)
        for one in done:
            one.result()

    def _try(self, work: Callable[[_Node, list[T]], None], node: _Node, share: list[T]) -> None:
        try:
            work(node, share)
        except self.faults as fault:
            self.look_again()
            self._complaints.add(f"{node.name} failed: {type(fault).__name__}: {fault}", kind=node.name)

    def _node_of(self, key: bytes) -> _Node | None:
        try:
            node = self._map.get_node_from_key(self.names.tag(key))
        except RedisClusterException as error:  # nobody has this slot
            self.look_again()
            self._complaints.add(str(error), kind="slot")
            return None
        return self.node_at(node.host, node.port)

    def _refresh(self) -> None:
        now = time.monotonic()
        if not self._stale or now < self._looked + _LOOK_EVERY_S:
            return
        self._stale, self._looked = False, now
        try:
            self._map.nodes_manager.initialize(additional_startup_nodes_info=self._hosts)
        except _NO_MAP as error:
            self.look_again()
            self._complaints.add(f"the map of the slots cannot be fetched: {error}", kind="map")

    def _fetch_map(self) -> RedisCluster:
        """redis-py's client, for the map of the slots only. It sends by itself what must not be sent twice."""
        patience = self.timeout / 4  # it may ask several nodes, and the operation that waits has a deadline
        return RedisCluster(
            url=self._addresses[0],
            startup_nodes=[ClusterNode(host, port) for host, port in self._hosts[1:]],
            require_full_coverage=False,
            socket_timeout=patience,
            socket_connect_timeout=patience,
            protocol=2,
            **self._login(),
        )


def _key_of(block: Incoming | Outgoing) -> bytes:
    return block.key
