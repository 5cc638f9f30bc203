"""Codecs alone, and behind every connector."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import lz4.block
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import SetupError
from pdserve.keys import Layout, Section
from pdserve.kv_transfer.codec import CODECS, Codec, Undecodable
from pdserve.kv_transfer.conformance import Verdict, check, rules_named
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.header import Buffer, payload_length
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.threaded import ThreadedConnector

Attach = Callable[..., Any]
NewKeys = Callable[[int], list[bytes]]
Rows = npt.NDArray[np.uint8]

LOSSLESS, LOSSY = ["lz4", "zstd"], ["fp8", "int8"]
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LAYERS, HEADS, TOKENS, DIM = 2, 3, 16, 8
SIGNIFICAND = {"float32": 24, "float16": 11, "bfloat16": 8}


def layout_of(dtype: str) -> Layout:
    return Layout(
        model_fingerprint="a model",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_size=TOKENS,
        dtype=dtype,
        itemsize=np.dtype(DTYPES[dtype]).itemsize,
    )


def codec_of(name: str, dtype: str = "float32") -> Codec:
    return CODECS[name](layout_of(dtype))


def row_of(values: npt.NDArray[np.float32], dtype: str) -> Rows:
    with np.errstate(over="ignore"):
        row: Rows = values.astype(DTYPES[dtype]).view(np.uint8).ravel()
    return row


def values_of(row: Rows, dtype: str) -> npt.NDArray[np.float64]:
    """[heads of both K and V in all layers, numbers]."""
    values: npt.NDArray[np.float64] = row.view(DTYPES[dtype]).astype(np.float64)
    return values.reshape(LAYERS * 2 * HEADS, TOKENS * DIM)


def special_rows(dtype: str) -> Rows:
    """Blocks of noise, of zeros, of repeated numbers, partly filled, tiny, huge, and with NaN, infinities and any bits."""
    rng = np.random.default_rng(3)
    shape = (LAYERS * 2 * HEADS, TOKENS, DIM)
    noise = rng.standard_normal(shape, np.float32) * np.exp(rng.standard_normal((shape[0], 1, 1), np.float32))
    partial, strange = noise.copy(), noise.copy()
    partial[:, 5:] = 0
    strange[0, 0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    strange[1, 0, 0], strange[2, 3, 1] = -np.nan, np.inf
    least = np.finfo(DTYPES[dtype]).smallest_subnormal if dtype != "bfloat16" else 2.0**-133
    tiny = np.float32(least) * rng.integers(-90, 90, shape).astype(np.float32)
    small = noise * np.float32(2.0**-20)  # among the subnormals of float16
    huge = np.sign(noise) * np.float32(6e4 if dtype == "float16" else 3e38)
    known = (noise, np.zeros(shape, np.float32), np.full(shape, 1.25, np.float32), partial, strange, tiny, small, huge)
    rows = [row_of(values, dtype) for values in known]
    any_bits = rng.integers(0, 256, len(rows[0]), dtype=np.uint8)
    return np.stack([*rows, any_bits])


@pytest.fixture
def scheme_url(url: str) -> Callable[[str], str]:
    return lambda codec: f"{url}{'&' if '?' in url else '?'}codec={codec}"


# Alone.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "auto", *LOSSLESS])
def test_lossless_codecs_are_bit_exact(name: str, dtype: str) -> None:
    codec = codec_of(name, dtype)
    for row in special_rows(dtype):
        payload = codec.encode(row)
        assert len(payload) in codec.payload_lengths
        np.testing.assert_array_equal(codec.decode(payload.tobytes()), row)
    assert not codec.lossy


@given(st.binary(min_size=3072, max_size=3072), st.sampled_from(LOSSLESS))
def test_lossless_codecs_restore_any_bytes(content: bytes, name: str) -> None:
    codec, row = codec_of(name, "float16"), np.frombuffer(content, np.uint8)
    np.testing.assert_array_equal(codec.decode(codec.encode(row).tobytes()), row)


@pytest.mark.parametrize("name", LOSSLESS)
def test_incompressible_blocks_are_stored_uncompressed(name: str) -> None:
    codec = codec_of(name)
    *_, zeros = row, _ = special_rows("float32")[:2]
    noise = np.random.default_rng(1).integers(0, 256, len(row), dtype=np.uint8)
    assert len(codec.encode(zeros)) < len(row) // 20
    assert codec.encode(noise) is noise


def test_no_codec_keeps_the_row_and_the_namespace() -> None:
    codec, row = codec_of("none"), special_rows("float32")[0]
    assert codec.encode(row) is row and codec.is_identity
    assert codec.namespace == layout_of("float32").namespace


def test_namespaces_of_codecs_differ() -> None:
    assert len({codec_of(name).namespace for name in CODECS}) == len(CODECS)
    assert codec_of("lz4", "float16").namespace != codec_of("lz4", "bfloat16").namespace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_have_one_shorter_length(name: str, dtype: str) -> None:
    codec, layout = codec_of(name, dtype), layout_of(dtype)
    heads = LAYERS * 2 * HEADS
    assert list(codec.payload_lengths) == [heads * TOKENS * DIM + heads * layout.itemsize]
    assert all(len(codec.encode(row)) == codec.payload_lengths[0] for row in special_rows(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_the_error_is_bounded_per_head(name: str, dtype: str) -> None:
    codec = codec_of(name, dtype)
    for row in special_rows(dtype)[:4]:
        right, seen = values_of(row, dtype), values_of(codec.decode(codec.encode(row).tobytes()), dtype)
        largest = np.abs(right).max(axis=1, keepdims=True)
        if name == "int8":
            bound = np.broadcast_to(largest / 127 / 2, right.shape)
        else:  # three bits of mantissa, and below 2**-6 of its range a fixed step
            bound = np.maximum(np.abs(right) * 2**-4, largest / 448 * 2**-10)
        own = np.abs(right) * 2.0 ** -SIGNIFICAND[dtype] + 1e-6 * largest  # of the pool's dtype, and of the arithmetic
        assert (np.abs(seen - right) <= bound + own).all()
        assert np.array_equal(np.abs(seen).max(axis=1), largest[:, 0]), "the largest number of a head is kept"
        assert (seen[right == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_each_section_is_encoded_as_if_it_were_alone(name: str, dtype: str) -> None:
    first = layout_of(dtype)
    other = Section(num_layers=1, num_kv_heads=1, head_dim=5)
    second = replace(first, **asdict(other))
    codec, alone = CODECS[name](replace(first, more=(other,))), [CODECS[name](each) for each in (first, second)]
    numbers = np.random.default_rng(5).standard_normal(first.block_numbers + second.block_numbers, np.float32)
    rows = [row_of(part, dtype) for part in np.split(numbers, [first.block_numbers])]
    payload = codec.encode(np.concatenate(rows))
    payloads = [each.encode(row) for each, row in zip(alone, rows, strict=True)]
    assert len(payload) in codec.payload_lengths and np.array_equal(payload, np.concatenate(payloads))
    decoded = [each.decode(one.tobytes()) for each, one in zip(alone, payloads, strict=True)]
    assert np.array_equal(codec.decode(payload.tobytes()), np.concatenate(decoded))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_encoding_a_decoded_block_changes_nothing(name: str, dtype: str) -> None:
    codec = codec_of(name, dtype)
    rng = np.random.default_rng(5)
    noise = rng.standard_normal((40, LAYERS * 2 * HEADS * TOKENS * DIM), np.float32)
    noise *= np.exp(3 * rng.standard_normal((40, 1), np.float32))
    for row in [*special_rows(dtype), *(row_of(values, dtype) for values in noise)]:
        once = codec.decode(codec.encode(row).tobytes())
        np.testing.assert_array_equal(codec.decode(codec.encode(once).tobytes()), once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_a_head_that_is_not_finite_is_decoded_as_nan_and_its_neighbours_are_unaffected(name: str, dtype: str) -> None:
    codec, (clean, _, _, _, strange, *_) = codec_of(name, dtype), special_rows(dtype)
    seen, right = (values_of(codec.decode(codec.encode(row).tobytes()), dtype) for row in (strange, clean))
    assert np.isnan(seen[:3]).all()
    np.testing.assert_array_equal(seen[3:], right[3:])


@given(st.sampled_from([*LOSSLESS, *LOSSY]), st.data())
def test_any_bytes_are_decoded_or_undecodable(name: str, data: Any) -> None:
    codec = codec_of(name, "bfloat16")
    size = data.draw(
        st.sampled_from(
            [
                codec.payload_lengths[0],
                codec.payload_lengths[len(codec.payload_lengths) // 9],
                codec.payload_lengths[-1],
            ]
        )
    )
    payload = data.draw(st.binary(min_size=size, max_size=size))
    if data.draw(st.booleans()):  # nearly valid
        real = codec.encode(special_rows("bfloat16")[data.draw(st.integers(0, 7))]).tobytes()
        at = data.draw(st.integers(0, len(real) - 1))
        payload = real[:at] + payload[: min(9, len(real) - at)] + real[at + 9 :]
    if len(payload) not in codec.payload_lengths:
        return
    try:
        row = codec.decode(payload)
    except Undecodable:
        return
    assert row.nbytes == layout_of("bfloat16").block_bytes


def test_a_payload_that_claims_a_huge_size_is_undecodable() -> None:
    block_bytes = layout_of("float32").block_bytes
    parts = zstandard.ZstdCompressor().compressobj(size=1 << 40)
    claim = parts.compress(b"x") + parts.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    for payload in (claim, zstandard.compress(bytes(block_bytes + 1)), zstandard.compress(bytes(block_bytes - 1))):
        with pytest.raises(Undecodable):
            codec_of("zstd").decode(payload)
    for length in (block_bytes - 1, block_bytes + 1, 1 << 20):
        with pytest.raises(Undecodable):
            codec_of("lz4").decode(lz4.block.compress(bytes(length), store_size=False))


# With connectors.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_blocks_pass_through_every_store(
    scheme_url: Callable[[str], str], attach: Attach, new_keys: NewKeys, name: str, dtype: str
) -> None:
    layout, codec, rows = layout_of(dtype), codec_of(name, dtype), special_rows(dtype)
    count = len(rows)
    source, target = (attach(scheme_url(name), layout, blocks=count) for _ in range(2))
    source.rows[:], target.rows[:] = rows, 9
    keys = new_keys(count)
    assert source.store(keys, range(count)).outcomes == [Outcome.OK] * count
    assert source.store(keys, range(count)).outcomes == [Outcome.OK] * count
    assert target.match(keys) == count
    assert target.load(keys, range(count)).outcomes == [Outcome.OK] * count
    np.testing.assert_array_equal(source.rows, rows)
    payloads = [codec.encode(row).tobytes() for row in rows]
    np.testing.assert_array_equal(target.rows, [codec.decode(payload) for payload in payloads])
    crossed = sum(map(len, payloads))
    assert source.connector.stats().bytes == {"store": crossed, "load": 0}
    assert target.connector.stats().bytes == {"store": 0, "load": crossed}
    assert crossed < rows.nbytes


def test_instances_with_different_codecs_do_not_share_blocks(
    scheme_url: Callable[[str], str], attach: Attach, new_keys: NewKeys
) -> None:
    keys = new_keys(2)
    instances = [attach(scheme_url(name), layout_of("float32")) for name in CODECS]
    for i, one in enumerate(instances):
        assert one.match(keys) == 0
        assert one.load(keys, [0, 1]).outcomes == [Outcome.MISSING] * 2
        one.rows[:2] = row_of(np.full(LAYERS * 2 * HEADS * TOKENS * DIM, i, np.float32), "float32")
        one.store(keys, [0, 1])
    for i, one in enumerate(instances):
        assert one.load(keys, [4, 5]).leading == 2
        assert (values_of(one.rows[4], "float32") == i).all()


@pytest.mark.parametrize("scheme", ["redis"], indirect=True)
def test_a_short_payload_in_many_pieces(scheme_url: Callable[[str], str], attach: Attach, new_keys: NewKeys) -> None:
    layout, rows = layout_of("float32"), special_rows("float32")
    keys = new_keys(len(rows))
    source, target = (attach(scheme_url("zstd") + "&value_bytes=1000", layout, blocks=len(rows)) for _ in range(2))
    source.rows[:] = rows
    assert source.store(keys, range(len(rows))).leading == len(rows)
    assert target.load(keys, range(len(rows))).leading == len(rows)
    np.testing.assert_array_equal(target.rows, rows)


@pytest.mark.parametrize("scheme", ["shm"], indirect=True)
def test_a_segment_has_more_slots_for_shorter_payloads(scheme_url: Callable[[str], str], attach: Attach) -> None:
    layout = Layout(
        model_fingerprint="a", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16", itemsize=2
    )
    slots = {}
    for name in ("none", "int8"):
        one = attach(scheme_url(name), layout)
        slots[name] = one.connector._slab.geometry.slots
        one.connector.close()
    assert slots["int8"] > 1.7 * slots["none"]


CODEC_RULES = ["round-trip", "flipped-bytes", "foreign-namespace", "older-layout", "counts"]


@pytest.mark.parametrize(
    ("scheme", "name", "rules"),
    [
        ("shm", "int8", CODEC_RULES),
        pytest.param("shm", "int8", [], marks=pytest.mark.slow),
        ("redis", "zstd", CODEC_RULES),
        ("memory", "lz4", CODEC_RULES),
        ("file", "auto", [rule for rule in CODEC_RULES if rule != "flipped-bytes"]),  # lengths are not known beforehand
        ("file", "fp8", CODEC_RULES),
        pytest.param("redis+cluster", "lz4", CODEC_RULES, marks=pytest.mark.slow),
    ],
    indirect=["scheme"],
)
def test_the_rules_hold_with_codecs(scheme_url: Callable[[str], str], name: str, rules: list[str]) -> None:
    """The rules that depend on codecs, with each codec and each kind of connector; at length all rules."""
    reports = list(check(scheme_url(name), rules_named(rules), seconds=0.5))
    assert not [one for one in reports if one.verdict is Verdict.BROKEN]
    assert {one.rule for one in reports if one.verdict is Verdict.HOLDS} >= set(rules or CODEC_RULES)


@pytest.fixture
def segment_size() -> str:
    return "64MiB"  # for blocks of 1.75 MiB


class DictConnector(ThreadedConnector):
    """Stores values in a dict. `changed` is called with a value that is being read, and may change it."""

    scheme = "kept"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.values: dict[str, bytearray] = {}

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        self.values[name] = bytearray(header + payload)

    def get(self, name: str) -> Buffer | None:
        return self.values.get(name)

    def contains(self, name: str) -> bool:
        return name in self.values

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


@pytest.fixture
def dict_connector() -> Iterator[Callable[[str], DictConnector]]:
    made: list[DictConnector] = []

    def attach(name: str) -> DictConnector:
        rows = np.repeat(special_rows("bfloat16")[3:4], 4, axis=0)
        made.append(DictConnector(f"dict_connector://?codec={name}"))
        made[-1].attach(PoolMemory(rows, layout_of("bfloat16")))
        return made[-1]

    yield attach
    for one in made:
        one.close()


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_undecodable_payload_with_a_valid_header_is_corrupt(
    dict_connector: Callable[[str], DictConnector], new_keys: NewKeys, name: str
) -> None:
    one, (key,) = dict_connector(name), new_keys(1)
    before = one.memory.rows.copy()
    payload = b"\xff" * 700
    one.values[one._name(key)] = bytearray(one.header_format.pack(key, payload) + payload)
    assert one.load([key], [1]).result(60).outcomes == [Outcome.CORRUPT]
    np.testing.assert_array_equal(one.memory.rows, before)
    assert not one.values, "removed"


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_every_flipped_byte_is_corrupt(
    dict_connector: Callable[[str], DictConnector], new_keys: NewKeys, name: str
) -> None:
    one, (key,) = dict_connector(name), new_keys(1)
    one.store([key], [0], lease_s=9).result(60)
    ((stored, value),) = one.values.items()
    assert payload_length(bytes(value[:64])) == len(value) - 64 < layout_of("bfloat16").block_bytes
    for at in range(0, len(value), 7):
        one.values[stored] = bytearray(value)
        one.values[stored][at] ^= 4
        assert one.load([key], [1]).result(60).outcomes == [Outcome.CORRUPT], at


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_the_decoded_bytes_are_those_that_were_verified(
    dict_connector: Callable[[str], DictConnector], new_keys: NewKeys, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process overwrites the stored payload right after its checksum was verified."""
    one, (key,) = dict_connector(name), new_keys(1)
    one.store([key], [0], lease_s=9).result(60)
    (value,) = one.values.values()
    decode, right = one.codec.decode, one.codec.decode(bytes(value[64:]))

    def late(payload: bytes) -> Rows:
        value[64:] = bytes(len(value) - 64)
        return decode(payload)

    monkeypatch.setattr(one.codec, "decode", late)
    assert one.load([key], [1]).result(60).outcomes == [Outcome.OK]
    np.testing.assert_array_equal(one.memory.rows[1], right)


# Errors.


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("memory://x?codec=gzip", "codec is invalid: 'gzip' is not one of none, lz4, zstd, auto, fp8, int8"),
        ("nixl://?codec=zstd", "nixl:// reads pools in place"),
    ],
)
def test_unsupported_codecs_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence):
        connect(url)


def test_a_lossy_codec_needs_floating_point_numbers() -> None:
    layout = Layout(
        model_fingerprint="a", num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, dtype="uint8", itemsize=1
    )
    with pytest.raises(SetupError, match="codec=int8 supports KV in float32, float16, bfloat16, not in uint8"):
        connect("memory://x?codec=int8").attach(PoolMemory(np.zeros((2, 16), np.uint8), layout))


@pytest.mark.parametrize(
    ("name", "package"), [("lz4", "lz4"), ("zstd", "zstandard"), ("fp8", "ml_dtypes"), ("int8", "ml_dtypes")]
)
def test_a_missing_library_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=rf"needs the package {package}, .* pip install -e '\.\[codecs\]'"):
        codec_of(name)
    codec_of("none")


@pytest.mark.parametrize("name", list(CODECS))
def test_a_lossy_codec_is_logged(
    dict_connector: Callable[[str], DictConnector], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        dict_connector(name)
    messages = [record.getMessage() for record in caplog.records]
    assert [f"lossy codec {name}" in line for line in messages] == ([True] if name in LOSSY else [])
