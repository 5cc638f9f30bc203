"""Blocks of one layout in the pool of another: every number where it belongs, and nothing anywhere else."""

import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.decode.layout_converter import LayoutConverter
from pdserve.engine.sequence import Sequence
from pdserve.keys import Layout, root_key
from pdserve.kv_transfer.connector import Outcome, PoolMemory
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import host_rows
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams

LAYERS, HEADS, DIM = 2, 3, 4
UNTOUCHED = -7.0


def layout_of(block_size: int, dtype: str = "float32") -> Layout:
    return Layout(
        model_fingerprint="a model",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_size=block_size,
        dtype=dtype,
        itemsize=getattr(torch, dtype).itemsize,
    )


def pool_of(layout: Layout, blocks: int) -> torch.Tensor:
    shape = (blocks, LAYERS, 2, HEADS, layout.block_size, DIM)
    return torch.full(shape, UNTOUCHED, dtype=getattr(torch, layout.dtype))


def kv_of(num_tokens: int) -> torch.Tensor:
    """[layers, 2, heads, tokens, dim], every number another."""
    return torch.randn((LAYERS, 2, HEADS, num_tokens, DIM), generator=torch.Generator().manual_seed(num_tokens))


def sequence_of(num_tokens: int, block_size: int) -> Sequence:
    tokens, root = list(range(num_tokens)), root_key(weights=layout_of(1).weights)
    return Sequence("r", tokens, num_tokens, num_tokens, SamplingParams(), root, block_size)


def store(url: str, layout: Layout, kv: torch.Tensor, without: frozenset[int] = frozenset()) -> int:
    """Stores a prompt's KV as an instance of this layout does, but for some blocks. How many blocks there are."""
    num_tokens = kv.shape[3]
    seq = sequence_of(num_tokens, layout.block_size)
    keys = seq.given_keys()
    pool = torch.zeros((len(keys), LAYERS, 2, HEADS, layout.block_size, DIM), dtype=getattr(torch, layout.dtype))
    for token in range(num_tokens):
        pool[token // layout.block_size, :, :, :, token % layout.block_size] = kv[:, :, :, token]
    connector = connect(url)
    connector.attach(PoolMemory(host_rows(pool), layout))
    some = [number for number in range(len(keys)) if number not in without]
    assert connector.store([keys[n] for n in some], some, lease_s=60).result(600).leading == len(some)
    connector.close()
    return len(keys)


@pytest.fixture
def url() -> Iterator[str]:
    url = f"memory://test-{uuid.uuid4().hex}?timeout=600"
    yield url
    memory.unlink(url)


SIZES = st.sampled_from([1, 4, 8, 16, 24, 32, 64])


@settings(max_examples=60, deadline=None)
@given(theirs=SIZES, ours=SIZES, num_tokens=st.integers(1, 150), data=st.data())
def test_tokens_arrive_where_they_belong(theirs: int, ours: int, num_tokens: int, data: st.DataObject) -> None:
    url = f"memory://test-{uuid.uuid4().hex}?timeout=600"
    kv, writer, own = kv_of(num_tokens), layout_of(theirs), layout_of(ours)
    lost = data.draw(st.frozensets(st.integers(0, (num_tokens - 1) // theirs), max_size=2))
    store(url, writer, kv, without=lost)
    pool = pool_of(own, 160)
    layout_converter, seq = LayoutConverter(pool, own, url), sequence_of(num_tokens, ours)
    prompt = layout_converter.prompt(seq, pb.Layout(**asdict(writer)))
    keys = seq.given_keys()
    first = data.draw(st.integers(0, len(keys) - 1))
    stop = data.draw(st.integers(first + 1, len(keys)))
    blocks = data.draw(st.permutations(range(160)))[: stop - first]

    outcomes = prompt.load(keys[first:stop], blocks).result(600).outcomes

    expected = pool_of(own, 160)
    for number, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True), first):
        tokens = range(number * ours, min((number + 1) * ours, num_tokens))
        whole = not lost & {token // theirs for token in tokens}
        assert outcome is (Outcome.OK if whole else Outcome.MISSING)
        for token in tokens:
            if token // theirs not in lost:
                expected[block, :, :, :, token % ours] = kv[:, :, :, token]
    assert torch.equal(pool, expected), "a number is wrong, or one that nobody asked for was written"
    layout_converter.close()
    memory.unlink(url)


@pytest.mark.parametrize("theirs", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ours", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_to_the_pool_s_dtype(url: str, theirs: str, ours: str) -> None:
    kv, writer, own = kv_of(40), layout_of(16, theirs), layout_of(32, ours)
    store(url, writer, kv)
    pool, seq = pool_of(own, 2), sequence_of(40, 32)
    layout_converter = LayoutConverter(pool, own, url)
    prompt = layout_converter.prompt(seq, pb.Layout(**asdict(writer)))
    assert prompt.exact == (theirs == ours)
    assert prompt.load(seq.given_keys(), [1, 0]).result(600).leading == 2
    right = kv.to(getattr(torch, theirs)).to(getattr(torch, ours))
    assert torch.equal(pool[1], right[:, :, :, :32]) and torch.equal(pool[0, :, :, :, :8], right[:, :, :, 32:])
    stats = layout_converter.stats()
    assert stats is not None and stats.blocks["load"] == 3
    layout_converter.close()


@pytest.mark.parametrize(
    ("theirs", "ours", "num_tokens", "covered"),
    [
        (16, 64, 200, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4]),  # 12.5 blocks of theirs, 3.1 of ours
        (64, 16, 200, [0, 4, 8, 12, 13]),
        (16, 24, 48, [0, 0, 1, 2]),
        (32, 16, 10, [0, 1]),
    ],
)
def test_blocks_are_covered_by_whole_tokens(
    url: str, theirs: int, ours: int, num_tokens: int, covered: list[int]
) -> None:
    layout_converter = LayoutConverter(pool_of(layout_of(ours), 1), layout_of(ours), url)
    prompt = layout_converter.prompt(sequence_of(num_tokens, ours), pb.Layout(**asdict(layout_of(theirs))))
    assert [prompt.covered(blocks) for blocks in range(len(covered))] == covered
    layout_converter.close()


def test_more_than_fits_into_the_rows_comes_in_turns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, own, kv = layout_of(16), layout_of(64), kv_of(150)
    monkeypatch.setattr("pdserve.decode.layout_converter.ROWS_BYTES", 3 * writer.block_bytes)
    store(url, writer, kv)
    pool, seq = pool_of(own, 3), sequence_of(150, 64)
    layout_converter = LayoutConverter(pool, own, url)
    assert (
        layout_converter.prompt(seq, pb.Layout(**asdict(writer))).load(seq.given_keys(), [0, 1, 2]).result(600).leading
        == 3
    )
    assert torch.equal(pool[1], kv[:, :, :, 64:128])
    layout_converter.close()


def test_a_store_that_cannot_be_had_leaves_everything_to_be_computed(caplog: pytest.LogCaptureFixture) -> None:
    own, seq = layout_of(32), sequence_of(40, 32)
    pool = pool_of(own, 2)
    layout_converter = LayoutConverter(pool, own, "redis://127.0.0.1:1/0")
    prompt = layout_converter.prompt(seq, pb.Layout(**asdict(layout_of(16))))
    for _ in range(2):
        assert prompt.load(seq.given_keys(), [0, 1]).result(20).outcomes == [Outcome.UNAVAILABLE] * 2
    assert (pool == UNTOUCHED).all()
    stats = layout_converter.stats()
    assert stats is not None and stats.failures == {("load", Outcome.UNAVAILABLE): 6}
    assert sum("is computed: No Redis answers" in record.getMessage() for record in caplog.records) == 1
    prompt.release(seq.given_keys())
    layout_converter.close()


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "another"},
        {"num_layers": LAYERS + 1},
        {"num_kv_heads": 1},
        {"head_dim": 2 * DIM},
        {"version": 99},
        {"block_size": 0},
        {"dtype": "int64", "itemsize": 8},
        {"dtype": "float32", "itemsize": 2},
        {"dtype": "os", "itemsize": 2},
    ],
)
def test_what_is_no_layout_of_these_weights_is_refused(url: str, change: dict[str, Any]) -> None:
    writer = replace(layout_of(16), **change)
    layout_converter = LayoutConverter(pool_of(layout_of(32), 1), layout_of(32), url)
    with pytest.raises(ValueError, match="of another model, and cannot be converted"):
        layout_converter.prompt(sequence_of(40, 32), pb.Layout(**asdict(writer)))
    assert layout_converter.stats() is None


def test_nothing_is_converted_unless_it_was_asked_for() -> None:
    layout_converter = LayoutConverter(pool_of(layout_of(32), 1), layout_of(32), None)
    with pytest.raises(ValueError, match="started without --convert-kv"):
        layout_converter.prompt(sequence_of(40, 32), pb.Layout(**asdict(layout_of(16))))
