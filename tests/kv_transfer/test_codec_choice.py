"""The choice of `?codec=auto`: alone, with made-up times, and behind a connector over a slow and a fast link."""

import time
from dataclasses import replace

import numpy as np
import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.codec import CODECS, Auto, Undecodable
from pdserve.kv_transfer.codec_choice import CodecChoice
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.threaded import Full, ThreadedConnector

LAYOUT = Layout(
    model_fingerprint="a", num_layers=4, num_kv_heads=4, head_dim=128, block_size=32, dtype="float16", itemsize=2
)
BLOCKS = 8


def play(chosen: CodecChoice, seconds_per_byte: dict[str, float], operations: int, at: float = 0.0) -> list[str]:
    """Store blocks of several sizes, at what each codec takes for a byte and for an operation; return the codecs."""
    names = list[str]()
    for i in range(operations):
        num_bytes = (1 + i % 5) << 18
        names.append(chosen.choose(num_bytes))
        chosen.record(names[-1], num_bytes, 1e-4 + num_bytes * seconds_per_byte[names[-1]], now=at + i * 0.01)
    return names


@pytest.mark.parametrize("fastest", ["none", "lz4", "zstd"])
def test_the_least_time_for_a_byte_wins_after_a_few_tries(fastest: str) -> None:
    chosen = CodecChoice(("none", "lz4", "zstd"))
    assert chosen.fastest == "none", "nothing is measured"
    names = play(chosen, {"none": 2e-9, "lz4": 2e-9, "zstd": 2e-9, fastest: 1e-9}, 1000)
    assert set(names[9:72]) == {fastest}, "after three tries each"
    assert names[9:].count(fastest) >= 0.98 * len(names[9:])


def test_a_link_that_becomes_slow_changes_the_choice() -> None:
    chosen = CodecChoice(("none", "lz4", "zstd"))
    assert play(chosen, {"none": 1e-9, "lz4": 3e-9, "zstd": 5e-9}, 100)[-1] == "none"
    assert play(chosen, {"none": 20e-9, "lz4": 21e-9, "zstd": 15e-9}, 400, at=100.0)[-1] == "zstd"


def test_small_operations_tell_nothing() -> None:
    chosen = CodecChoice(("none", "zstd"))
    assert {chosen.choose(1000) for _ in range(200)} == {"none"}
    chosen.record("zstd", 1000, 1e-9, now=0.0)
    assert chosen.fastest == "none"


class Link(ThreadedConnector):
    """Stores values in a dict, at so many bytes per second; 0: at once."""

    scheme = "link"
    bytes_per_s = 0.0
    full_after = 1 << 30  # values

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.values: dict[str, bytes] = {}

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        if len(self.values) >= self.full_after:
            raise Full
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
        for turn in range(12):
            keys = [bytes([turn, i]) * 8 for i in range(BLOCKS)]
            assert one.store(keys, range(BLOCKS), lease_s=60).result(600).leading == BLOCKS
            assert one.load(keys, range(BLOCKS, 2 * BLOCKS)).result(600).outcomes == [Outcome.OK] * BLOCKS
            np.testing.assert_array_equal(rows[BLOCKS:], rows[:BLOCKS])
            lengths = {len(value) - 64 for value in one.values.values()}
        assert max(lengths) == LAYOUT.block_bytes, "blocks as they are were tried"
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


def test_a_store_that_was_cut_short_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a store counts for its codec only if it stored every block, so that seconds and bytes belong together."""
    one = Link("link://?codec=auto")
    rows = np.random.default_rng(1).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    one.attach(PoolMemory(rows, LAYOUT))
    recorded: list[int] = []
    monkeypatch.setattr(one.codec, "record", lambda codec, num_blocks, seconds: recorded.append(num_blocks))
    try:
        keys = [bytes([i]) * 16 for i in range(2 * BLOCKS)]
        assert one.store(keys[:BLOCKS], range(BLOCKS), lease_s=60).result(600).leading == BLOCKS
        one.full_after = BLOCKS + 3
        outcomes = one.store(keys[BLOCKS:], range(BLOCKS), lease_s=60).result(600).outcomes
        assert outcomes == [Outcome.OK] * 3 + [Outcome.FULL] * (BLOCKS - 3)
    finally:
        one.close()
    assert recorded == [BLOCKS]


def test_a_payload_as_long_as_a_block_is_the_block() -> None:
    """So a compressed one must be shorter, also with its number before it."""
    layout = replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    auto, alone = Auto(layout), CODECS["zstd"](layout)
    chosen = next(codec for codec in (auto.choose(1 << 20) for _ in range(9)) if codec.name == "zstd")
    row, lengths = np.random.default_rng(1).integers(1, 256, layout.block_bytes, dtype=np.uint8), set[int]()
    for zeros in range(60):
        row[len(row) - zeros :] = 0
        payload = chosen.encode(row)
        lengths.add(len(alone.encode(row)))
        np.testing.assert_array_equal(auto.decode(payload.tobytes()), row)
        np.testing.assert_array_equal(alone.decode(alone.encode(row).tobytes()), row)
    assert {len(row) - 2, len(row) - 1, len(row)} <= lengths, "the boundary was met"


@pytest.mark.parametrize("number", [0, 3, 255])
def test_a_payload_of_no_codec_is_not_decoded(number: int) -> None:
    """Whoever writes to the store can give it a checksum that is right."""
    with pytest.raises(Undecodable):
        Auto(LAYOUT).decode(bytes([number, 1, 2, 3]))
