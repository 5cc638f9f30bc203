"""The choice of `?codec=auto`: alone, with made-up times, and behind a connector over a slow and a fast link."""

import time

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.codec import Auto
from pdserve.kv_transfer.codec_choice import CodecChoice
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.threaded import ThreadedConnector

LAYOUT = Layout(
    model_fingerprint="a", num_layers=4, num_kv_heads=4, head_dim=128, block_size=32, dtype="float16", itemsize=2
)
BLOCKS = 8


def choice(lz4_seconds: float = 2e-9) -> CodecChoice:
    chosen = CodecChoice(("none", "lz4", "zstd"))
    chosen.record_trial("lz4", lz4_seconds, 0.9)
    chosen.record_trial("zstd", 6e-9, 0.6)
    return chosen


@pytest.mark.parametrize(("bytes_per_s", "fastest"), [(5e9, "none"), (2e8, "none"), (1e8, "zstd"), (5e7, "zstd")])
def test_the_least_time_for_a_byte_wins(bytes_per_s: float, fastest: str) -> None:
    chosen = choice()
    assert chosen.fastest == "none", "nothing is measured"
    for i in range(1, 20):
        chosen.record_transfer("store", i * 1000, 1e-4 + i * 1000 / bytes_per_s, now=float(i))
    assert chosen.fastest == fastest


def test_a_cheap_codec_wins_between_a_slow_and_a_fast_link() -> None:
    chosen = choice(0.1e-9)
    for i in range(1, 20):
        chosen.record_transfer("store", i * 1000, i * 1000 / 5e8, now=float(i))
    assert chosen.fastest == "lz4"


def test_loads_count_and_links_change() -> None:
    chosen = choice()
    chosen.record_transfer("store", 10**6, 10**6 / 5e9, now=0.0)
    assert chosen.fastest == "none"
    chosen.record_transfer("load", 10**6, 10**6 / 2e7, now=1.0)
    assert chosen.fastest == "zstd"
    for i in range(100):
        chosen.record_transfer("load", 10**6, 10**6 / 5e9, now=2.0 + i)
    assert chosen.fastest == "none"


class Link(ThreadedConnector):
    """Stores values in a dict, at so many bytes per second; 0: at once."""

    scheme = "link"
    bytes_per_s = 0.0

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.values: dict[str, bytes] = {}

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if self.bytes_per_s:
            time.sleep(len(payload) / self.bytes_per_s)
        self.values[name] = header + payload

    def get(self, name: str) -> Buffer | None:
        return self.values.get(name)

    def contains(self, name: str) -> bool:
        return name in self.values

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


@pytest.mark.parametrize(("bytes_per_s", "filled"), [(1e7, 0.5), (0.0, 1.0)])
def test_blocks_are_compressed_where_the_link_is_slow(bytes_per_s: float, filled: float) -> None:
    one = Link("link://?codec=auto")
    one.bytes_per_s = bytes_per_s
    numbers = np.random.default_rng(1).standard_normal((BLOCKS, LAYOUT.block_bytes // 2)).astype(np.float16)
    numbers[:, int(filled * LAYOUT.block_bytes / 2) :] = 0
    rows = np.concatenate((numbers, np.zeros_like(numbers))).view(np.uint8)
    one.attach(PoolMemory(rows, LAYOUT))
    try:
        lengths = set[int]()
        for turn in range(6):
            keys = [bytes([turn, i]) * 8 for i in range(BLOCKS)]
            assert one.store(keys, range(BLOCKS), lease_s=60).result(600).leading == BLOCKS
            assert one.load(keys, range(BLOCKS, 2 * BLOCKS)).result(600).outcomes == [Outcome.OK] * BLOCKS
            np.testing.assert_array_equal(rows[BLOCKS:], rows[:BLOCKS])
            lengths = {len(value) - 64 for value in one.values.values()}
        assert max(lengths) == LAYOUT.block_bytes, "at first nothing is known of the link"
        last = one.values[one._name(keys[-1])]
        assert (len(last) - 64 < LAYOUT.block_bytes * 0.6) is (bytes_per_s > 0)
        assert isinstance(one.codec, Auto)
        for offset in (64, 65, len(last) - 1):
            flipped = bytearray(last)
            flipped[offset] ^= 1
            one.values[one._name(keys[-1])] = bytes(flipped)
            assert one.load(keys[-1:], [BLOCKS]).result(600).outcomes == [Outcome.CORRUPT]
    finally:
        one.close()
