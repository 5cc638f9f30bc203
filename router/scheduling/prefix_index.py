"""Prefix index: maps block keys to the instances whose pools hold them, built from the instances' KV events.

It is a hint for policies and may lag behind the pools.

There is one table for all instances, with a bitmap of holders per key, so that one walk along a prompt's keys finds the
longest cached prefix of every instance. A block takes about 0.15 KB, at most a thousandth of the size of its KV, and an
instance never has more entries than blocks in its pool.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import and_

from pdserve.keys import KEY_BYTES, group_key


@dataclass
class _Holder:
    """One instance in the index: its bit in the bitmaps, and its keys."""

    bit: int
    keys: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Block keys by instance, with a longest-prefix match over all instances."""

    def __init__(self) -> None:
        self._bitmaps: dict[bytes, int] = {}  # block key → bits of the instances that hold it
        self._holders: dict[str, _Holder] = {}  # by instance id
        self._ids: dict[int, str] = {}  # bit → instance id
        self._all_bits = 0

    def update(self, instance_id: str, removed: bytes, added: bytes) -> int:
        """Record an instance's KV events, joined keys, and return how many keys it then holds."""
        self.remove(instance_id, _split(removed))
        self.add(instance_id, _split(added))
        return len(self._holders[instance_id].keys)

    def add(self, instance_id: str, keys: Iterable[bytes]) -> None:
        """Record that the instance holds these keys. An unknown instance is added."""
        holder = self._holders.get(instance_id)
        if holder is None:
            bit = ~self._all_bits & (self._all_bits + 1)  # the lowest free bit
            holder = self._holders[instance_id] = _Holder(bit)
            self._ids[bit] = instance_id
            self._all_bits |= bit
        for key in keys:
            others = self._bitmaps.get(key)
            # Sole holders share the number of their bit: with a thousand instances it takes 160 bytes.
            self._bitmaps[key] = holder.bit if others is None else others | holder.bit
            holder.keys.add(key)

    def remove(self, instance_id: str, keys: Iterable[bytes]) -> None:
        """Record that the instance no longer holds these keys. Unknown instances and keys are ignored."""
        holder = self._holders.get(instance_id)
        if holder is None:
            return
        for key in keys:
            if key in holder.keys:
                holder.keys.discard(key)
                self._clear_bit(key, holder.bit)

    def forget(self, instance_id: str) -> None:
        """Remove the instance with all of its keys, if it is known."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            del self._ids[holder.bit]
            self._all_bits ^= holder.bit
            for key in holder.keys:
                self._clear_bit(key, holder.bit)

    def num_blocks(self, instance_id: str) -> int:
        """Return the number of keys recorded for an instance; 0 for an unknown one."""
        holder = self._holders.get(instance_id)
        return 0 if holder is None else len(holder.keys)

    def match(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Return instance id → number of leading `keys` that it holds. Instances without the first key are left out."""
        matches: dict[str, int] = {}
        matching, length = self._all_bits, 0
        bitmaps = map(self._bitmaps.get, keys, repeat(0))
        for length, still_matching in enumerate(accumulate(bitmaps, and_, initial=matching)):
            if still_matching != matching:
                self._record_matches(matches, matching ^ still_matching, length - 1)
                matching = still_matching
                if not matching:
                    break
        self._record_matches(matches, matching, length)
        return matches

    def usable(self, instance_id: str, keys: Sequence[bytes], count: int, windows: Sequence[int], size: int) -> int:
        """Return of how many of the first `count` keys, which it holds, an instance can use the blocks.

        Args:
            windows: of the further groups of its pool, in tokens, all of whose blocks the next token needs.
            size: tokens of a block.
        """
        held = self._holders[instance_id].keys
        while count:
            for at, window in enumerate(windows, 1):
                reached = range(count - 1, max(0, count * size + 1 - window) // size - 1, -1)
                missing = next((i for i in reached if group_key(keys[i], at) not in held), None)
                if missing is not None:
                    count = missing
                    break
            else:
                return count
        return 0

    def _record_matches(self, matches: dict[str, int], bits: int, length: int) -> None:
        """Set the match of each instance in `bits` to `length`, unless that is 0."""
        while bits and length:
            bit = bits & -bits
            matches[self._ids[bit]] = length
            bits ^= bit

    def _clear_bit(self, key: bytes, bit: int) -> None:
        bits = self._bitmaps[key] & ~bit
        if bits:
            self._bitmaps[key] = bits
        else:
            del self._bitmaps[key]


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
