"""Base of connectors around another connector: everything that they do not change passes to it."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from pdserve.kv_transfer.connector import Capabilities, Connector, PoolMemory, Result, Stats


class ForwardingConnector(Connector):
    """Passes all calls on to `inner`, of which it has the scheme and the capabilities."""

    scheme = "forwarding"

    def __init__(self, inner: Connector) -> None:
        self.scheme = inner.scheme  # type: ignore[misc]  # a class attribute in other connectors
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, but for what a subclass would have to pass on by a method of its own."""
        return replace(self._inner.capabilities, stores_growing=False)

    def attach(self, memory: PoolMemory) -> None:
        self._inner.attach(memory)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> Future[Result]:
        return self._inner.store(keys, block_ids, lease_s=lease_s)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> Future[Result]:
        return self._inner.load(keys, block_ids, tickets=tickets)

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> Future[Result]:
        return self._inner.follow(keys, block_ids, patience_s=patience_s)

    def match(self, keys: Sequence[bytes]) -> Future[int]:
        return self._inner.match(keys)

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self._inner.release(keys, tickets=tickets)

    def release_blocks(self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()) -> None:
        self._inner.release_blocks(keys, block_ids, tickets=tickets)

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None:
        self._inner.prolong(keys, lease_s=lease_s, tickets=tickets)

    def stats(self) -> Stats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()
