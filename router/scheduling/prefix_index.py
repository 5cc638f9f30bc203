"""Which instance has which block keys in its pool, as the instances tell it: a hint for policies, never a promise.

One table for all instances, a bit for each in the value, so that one walk along a prompt's keys finds the longest cached
prefix of every instance. It takes about 0.15 KB for a block, which is a thousandth of the block's own KV or less, and no
instance can have more blocks in it than it has in its pool.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import and_


@dataclass
class _Instance:
    bit: int
    keys: set[bytes] = field(default_factory=set)


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # block key → the bits of those that have it
        self._instances: dict[str, _Instance] = {}
        self._names: dict[int, str] = {}  # by bit
        self._all = 0  # their bits

    def add(self, instance_id: str, keys: Iterable[bytes]) -> None:
        """The instance has these. It may be a new one."""
        instance = self._instances.get(instance_id)
        if instance is None:
            bit = ~self._all & (self._all + 1)  # the lowest that nobody has
            instance = self._instances[instance_id] = _Instance(bit)
            self._names[bit] = instance_id
            self._all |= bit
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | instance.bit
            instance.keys.add(key)

    def remove(self, instance_id: str, keys: Iterable[bytes]) -> None:
        """The instance has these no longer. What is not known is left alone."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        for key in keys:
            if key in instance.keys:
                instance.keys.discard(key)
                self._clear(key, instance.bit)

    def forget(self, instance_id: str) -> None:
        """The instance has gone, with all it had."""
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            del self._names[instance.bit]
            self._all ^= instance.bit
            for key in instance.keys:
                self._clear(key, instance.bit)

    def blocks(self, instance_id: str) -> int:
        """How many blocks of an instance are known."""
        instance = self._instances.get(instance_id)
        return 0 if instance is None else len(instance.keys)

    def match(self, keys: Iterable[bytes]) -> dict[str, int]:
        """How many leading keys each instance has; those that lack the first are left out."""
        found: dict[str, int] = {}
        having, length = self._all, 0
        holders = map(self._holders.get, keys, repeat(0))
        for length, still in enumerate(accumulate(holders, and_, initial=having)):
            if still != having:
                self._note(found, having ^ still, length - 1)
                having = still
                if not having:
                    break
        self._note(found, having, length)
        return found

    def _note(self, found: dict[str, int], bits: int, length: int) -> None:
        """Writes the length down for each bit's instance, unless it is 0."""
        while bits and length:
            bit = bits & -bits
            found[self._names[bit]] = length
            bits ^= bit

    def _clear(self, key: bytes, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
