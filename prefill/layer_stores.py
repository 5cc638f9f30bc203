"""Stores of the blocks that a step fills, which begin while the model computes it.

plan ─► growing stores of the blocks that it completes ─► each layer's KV is written: what is final moves
     ─► the step is about to end: decode is told to follow ─► the last layer: the blocks get visible in the store
"""

from collections.abc import Callable, Sequence

from pdserve.kv_transfer.connector import GrowingStore

FOLLOW_S = 0.1  # before the expected end of a step, decode follows: in that time it copies what is there


class LayerStores:
    """Tells the stores of one step which bytes of their blocks are final, and decode when it is to follow.

    Args:
        final_bytes: of each layer, see `KVMemory`.
        range_bytes: of a block, by which stores advance.
        announce: lets decode follow. Called once, shortly before the expected end of the step.
        now: monotonic clock in seconds.
    """

    def __init__(
        self,
        stores: Sequence[GrowingStore],
        final_bytes: Sequence[int],
        range_bytes: int,
        announce: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._stores = stores
        self._final_bytes = final_bytes
        self._range_bytes = self._next_bytes = range_bytes
        self._announce = announce
        self._now = now
        self._began_at = now()
        self._has_announced = False

    def __call__(self, layer: int) -> None:
        """Handle that a layer has written its KV."""
        size, whole = self._final_bytes[layer], self._final_bytes[-1]
        if size >= min(self._next_bytes, whole):
            self._next_bytes = size + self._range_bytes
            for store in self._stores:
                store.advance(size)
        if not self._has_announced:
            begun = layer + 1
            rest = (len(self._final_bytes) - begun) / begun * (self._now() - self._began_at)
            if rest < FOLLOW_S:
                self._has_announced = True
                self._announce()
