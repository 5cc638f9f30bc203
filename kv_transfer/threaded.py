"""Base class for connectors over a plain key-value transport, one value at a time: `connectors/memory.py` is its example."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.blocks import Incoming, Outgoing
from pdserve.kv_transfer.connector import Capabilities, Outcome
from pdserve.kv_transfer.header import HEADER_BYTES, Buffer


class Full(Exception):
    """Raised by `put`: the store has no space for this value."""


class ThreadedConnector(BatchedConnector):
    """Base for connectors over a plain key-value transport: implement `put`, `get`, `contains` and `delete`.

    Names are text: 32 hex digits of namespace, a slash, 32 hex digits of key. A value is one header and one payload (which a
    codec may make shorter than a block), returned by `get` as one run of bytes. All four hooks may block; they raise one of
    `faults` if the store does not respond. Set a timeout below `self.timeout` on the transport itself, so that a worker
    thread returns in time.
    """

    @abstractmethod
    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        """Store a value atomically, completely or not at all. Raises `Full` if there is no space."""

    def renew(self, name: str, lease_s: float) -> bool:
        """Extend the lease of a stored value. If it returns False, the default, the value is put again."""
        return False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the base class. Leases can be prolonged if `renew` is implemented."""
        return replace(super().capabilities, prolongs=type(self).renew is not ThreadedConnector.renew)

    @abstractmethod
    def get(self, name: str) -> Buffer | None:
        """Return the value, or None. It is copied into the pool once, directly from the returned buffer."""

    @abstractmethod
    def contains(self, name: str) -> bool:
        """Return True if `get` would find the value now."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a value. No error if there is none."""

    def put_many(self, blocks: Sequence[Outgoing], lease_s: float) -> None:
        for block in blocks:
            name = self._name(block.key)
            if self.renew(name, lease_s):
                block.present()
                continue
            try:
                self.put(name, *block.read(), lease_s)
                block.stored()
            except Full:
                block.failed(Outcome.FULL)

    def prolong_many(self, keys: Sequence[bytes], lease_s: float) -> None:
        for key in keys:
            self.renew(self._name(key), lease_s)

    def get_many(self, blocks: Sequence[Incoming]) -> None:
        for block in blocks:
            value = self.get(self._name(block.key))
            if value is None:
                block.missing()
            else:
                view = memoryview(value)
                block.accept(bytes(view[:HEADER_BYTES]), [view[HEADER_BYTES:]])

    def contains_many(self, keys: Sequence[bytes]) -> Iterable[bool]:
        return (self.contains(self._name(key)) for key in keys)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.delete(self._name(key))

    def delete_corrupt(self, blocks: Sequence[Incoming]) -> None:
        """Delete what is still corrupt."""
        for block in blocks:
            view = memoryview(self.get(self._name(block.key)) or b"")
            header = bytes(view[:HEADER_BYTES])
            if not self.is_sound(block.key, header, view[HEADER_BYTES:]):
                self.delete(self._name(block.key))

    def _name(self, key: bytes) -> str:
        return f"{self.namespace.hex()}/{key.hex()}"
