"""Conversion between layouts: every value at its place in the target pool, and nothing written elsewhere."""

import time
import uuid
from collections import abc
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.decode.layout_converter import LayoutConverter
from pdserve.engine.sequence import Sequence
from pdserve.keys import Layout, root_key, token_array
from pdserve.kv_transfer.connector import Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import host_rows
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from tests.examples import examples
from tests.stream_order import StreamChecker, WatchedCopies, rows_of, watching

LAYERS, HEADS, DIM = 2, 3, 4
UNTOUCHED = -7.0
TIMEOUT = 0.02  # of a store that hangs


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
    """Return random KV: [layers, 2, heads, tokens, dim]."""
    return torch.randn((LAYERS, 2, HEADS, num_tokens, DIM), generator=torch.Generator().manual_seed(num_tokens))


def sequence_of(num_tokens: int, block_size: int) -> Sequence:
    tokens, root = token_array(range(num_tokens)), root_key(model_digest=layout_of(1).model_digest)
    return Sequence.new("r", tokens, num_tokens, num_tokens, SamplingParams(), root, block_size)


def store(url: str, layout: Layout, kv: torch.Tensor, without: frozenset[int] = frozenset()) -> None:
    """Store a prompt's KV as an instance with this layout does, except for the blocks `without`."""
    num_tokens = kv.shape[3]
    seq = sequence_of(num_tokens, layout.block_size)
    keys = seq.kv.initial_keys
    shape = (len(keys), LAYERS, 2, kv.shape[2], layout.block_size, DIM)
    pool = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
    for token in range(num_tokens):
        pool[token // layout.block_size, :, :, :, token % layout.block_size] = kv[:, :, :, token]
    connector = connect(url)
    connector.attach(PoolMemory(host_rows(pool), layout))
    indices = [index for index in range(len(keys)) if index not in without]
    assert connector.store([keys[i] for i in indices], indices, lease_s=60).result(600).leading == len(indices)
    connector.close()


@pytest.fixture
def url() -> Iterator[str]:
    url = f"memory://test-{uuid.uuid4().hex}?timeout=600"
    yield url
    memory.unlink(url)


SIZES = st.sampled_from([1, 4, 8, 16, 24, 32, 64])


@settings(max_examples=examples(1), deadline=None)
@given(source_size=SIZES, target_size=SIZES, num_tokens=st.integers(1, 150), data=st.data())
def test_every_token_is_copied_to_its_place(
    source_size: int, target_size: int, num_tokens: int, data: st.DataObject
) -> None:
    url = f"memory://test-{uuid.uuid4().hex}?timeout=600"
    kv, source, target = kv_of(num_tokens), layout_of(source_size), layout_of(target_size)
    lost = data.draw(st.frozensets(st.integers(0, (num_tokens - 1) // source_size), max_size=2))
    store(url, source, kv, without=lost)
    pool = pool_of(target, 160)
    converter, seq = LayoutConverter(pool, target, url), sequence_of(num_tokens, target_size)
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(source)))
    keys = seq.kv.initial_keys
    first = data.draw(st.integers(0, len(keys) - 1))
    stop = data.draw(st.integers(first + 1, len(keys)))
    blocks = data.draw(st.permutations(range(160)))[: stop - first]

    outcomes = prompt.load(keys[first:stop], blocks).result(600).outcomes

    expected = pool_of(target, 160)
    for number, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True), first):
        tokens = range(number * target_size, min((number + 1) * target_size, num_tokens))
        whole = not lost & {token // source_size for token in tokens}
        assert outcome is (Outcome.OK if whole else Outcome.MISSING)
        for token in tokens:
            if token // source_size not in lost:
                expected[block, :, :, :, token % target_size] = kv[:, :, :, token]
    assert torch.equal(pool, expected), "a value is wrong, or was written outside of the requested blocks"
    converter.close()
    memory.unlink(url)


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 32), (32, 16), (24, 16), (16, 1), (4, 64)])
def test_blocks_on_a_gpu_are_filled_beside_the_model(
    source_size: int, target_size: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few blocks at a time, behind the steps that may still write to them, and without a wait for the model."""
    kv, source, target, checker = kv_of(150), layout_of(source_size), layout_of(target_size), StreamChecker()
    monkeypatch.setattr("pdserve.decode.target_blocks.PIECE_BYTES", 3 * target.block_bytes)
    store(url, source, kv)
    pool, seq = pool_of(target, 160), sequence_of(150, target_size)
    blocks = [5 + 2 * i if target_size > 1 else i for i in range(len(seq.kv.initial_keys))]
    with watching(checker):
        converter = LayoutConverter(pool, target, url, copies=lambda at: WatchedCopies(pool, checker))
        prompt = converter.open_prompt(seq, pb.Layout(**asdict(source)))
        checker.launch("a late step", [], rows_of(pool, blocks))
        loading = prompt.load(seq.kv.initial_keys, blocks)
        checker.launch("a step", [], rows_of(pool, {*range(160)} - {*blocks}))
        assert loading.result(600).leading == len(blocks)
        checker.launch("a step", rows_of(pool, blocks), [])
        converter.close()
    assert checker.errors == []
    expected = pool_of(target, 160)
    expected[blocks] = 0
    for token in range(150):
        expected[blocks[token // target_size], :, :, :, token % target_size] = kv[:, :, :, token]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("source_ranks", "target_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1), (8, 2), (2, 8), (8, 1), (1, 8)]
)
def test_every_head_is_copied_to_its_rank(url: str, source_ranks: int, target_ranks: int) -> None:
    """Four heads, between any numbers of ranks; of eight, two have the same head each."""
    heads, num_tokens = 4, 40
    whole = torch.randn((LAYERS, 2, heads, num_tokens, DIM))
    source, target = (replace(layout_of(size), num_kv_heads=heads) for size in (16, 32))
    for rank in range(source_ranks):
        layout = replace(source, rank=rank, ranks=source_ranks)
        store(url, layout, whole[:, :, layout.heads.start : layout.heads.stop])
    for rank in range(target_ranks):
        layout = replace(target, rank=rank, ranks=target_ranks)
        pool, seq = torch.zeros((2, LAYERS, 2, len(layout.heads), 32, DIM)), sequence_of(num_tokens, 32)
        converter = LayoutConverter(pool, layout, url)
        prompt = converter.open_prompt(seq, pb.Layout(**asdict(replace(source, ranks=source_ranks))))
        assert prompt.exact and prompt.load(seq.kv.initial_keys, [1, 0]).result(600).leading == 2
        own = whole[:, :, layout.heads.start : layout.heads.stop]
        assert torch.equal(pool[1], own[:, :, :, :32]) and torch.equal(pool[0, :, :, :, :8], own[:, :, :, 32:])
        converter.close()


def test_a_block_without_all_of_its_slices_is_missing(url: str) -> None:
    kv, source = kv_of(32)[:, :, :2], replace(layout_of(16), num_kv_heads=2, ranks=2)
    store(url, source, kv[:, :, :1])
    store(url, replace(source, rank=1), kv[:, :, 1:], without=frozenset([1]))
    target, seq = replace(layout_of(16), num_kv_heads=2), sequence_of(32, 16)
    converter = LayoutConverter(torch.zeros((2, LAYERS, 2, 2, 16, DIM)), target, url)
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(source)))
    assert prompt.load(seq.kv.initial_keys, [0, 1]).result(600).outcomes == [Outcome.OK, Outcome.MISSING]
    converter.close()


@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16", "float16"])
def test_values_are_rounded_to_the_dtype_of_the_pool(url: str, source_dtype: str, target_dtype: str) -> None:
    kv, source, target = kv_of(40), layout_of(16, source_dtype), layout_of(32, target_dtype)
    store(url, source, kv)
    pool, seq = pool_of(target, 2), sequence_of(40, 32)
    converter = LayoutConverter(pool, target, url)
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(source)))
    assert prompt.exact == (source_dtype == target_dtype)
    assert prompt.load(seq.kv.initial_keys, [1, 0]).result(600).leading == 2
    right = kv.to(getattr(torch, source_dtype)).to(getattr(torch, target_dtype))
    assert torch.equal(pool[1], right[:, :, :, :32]) and torch.equal(pool[0, :, :, :, :8], right[:, :, :, 32:])
    stats = converter.stats()
    assert stats is not None and stats.blocks["load"] == 3
    converter.close()


@pytest.mark.parametrize(
    ("source_size", "target_size", "num_tokens", "covered"),
    [
        (16, 64, 200, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4]),  # 12.5 source blocks, 3.1 target blocks
        (64, 16, 200, [0, 4, 8, 12, 13]),
        (16, 24, 48, [0, 0, 1, 2]),
        (32, 16, 10, [0, 1]),
    ],
)
def test_blocks_are_covered_by_whole_tokens(
    url: str, source_size: int, target_size: int, num_tokens: int, covered: list[int]
) -> None:
    converter = LayoutConverter(pool_of(layout_of(target_size), 1), layout_of(target_size), url)
    prompt = converter.open_prompt(sequence_of(num_tokens, target_size), pb.Layout(**asdict(layout_of(source_size))))
    assert [prompt.num_complete_blocks(blocks) for blocks in range(len(covered))] == covered
    converter.close()


def test_a_prompt_larger_than_the_staging_rows_is_loaded_in_batches(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, kv = layout_of(16), layout_of(64), kv_of(150)
    monkeypatch.setattr("pdserve.decode.layout_converter.STAGING_BYTES", 3 * source.block_bytes)
    store(url, source, kv)
    pool, seq = pool_of(target, 3), sequence_of(150, 64)
    converter = LayoutConverter(pool, target, url)
    assert (
        converter.open_prompt(seq, pb.Layout(**asdict(source))).load(seq.kv.initial_keys, [0, 1, 2]).result(600).leading
        == 3
    )
    assert torch.equal(pool[1], kv[:, :, :, 64:128])
    converter.close()


def test_an_unreachable_store_fails_all_blocks(caplog: pytest.LogCaptureFixture) -> None:
    target, seq = layout_of(32), sequence_of(40, 32)
    pool = pool_of(target, 2)
    converter = LayoutConverter(pool, target, "redis://127.0.0.1:1/0")
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(layout_of(16))))
    for _ in range(2):
        assert prompt.load(seq.kv.initial_keys, [0, 1]).result(600).outcomes == [Outcome.UNAVAILABLE] * 2
    assert (pool == UNTOUCHED).all()
    stats = converter.stats()
    assert stats is not None and stats.failures == {("load", Outcome.UNAVAILABLE): 6}
    assert sum("is computed instead: No Redis answers" in record.getMessage() for record in caplog.records) == 1
    prompt.release(seq.kv.initial_keys)
    converter.close()


class TimedOut(Future[Result]):
    """Times out in vain while a caller waits for it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._blocks = blocks

    def result(self, timeout: float | None = None) -> Result:
        if not self.done():
            time.sleep(TIMEOUT)
            self.set_result(Result([Outcome.UNAVAILABLE] * self._blocks, TIMEOUT))
        return super().result(timeout)


class HangingConnector(Connector):
    """Its loads time out, and its matches, the probes of the breaker, wait for the test."""

    scheme = "hanging"
    capabilities = Capabilities(timeout_s=TIMEOUT)

    def __init__(self) -> None:
        self.hangs = True
        self.num_loads = 0
        self.probes: list[Future[int]] = []

    def attach(self, memory: PoolMemory) -> None: ...

    def load(self, keys: abc.Sequence[bytes], block_ids: abc.Sequence[int], *, tickets: Any = ()) -> Future[Result]:
        self.num_loads += 1
        future = TimedOut(len(keys))
        if not self.hangs:
            future.set_result(Result([Outcome.OK] * len(keys), 0.0))
        return future

    def match(self, keys: abc.Sequence[bytes]) -> Future[int]:
        self.probes.append(Future())
        return self.probes[-1]

    def store(self, *_: Any, **__: Any) -> Future[Result]:
        raise NotImplementedError

    def release(self, keys: abc.Sequence[bytes], *, tickets: Any = ()) -> None: ...

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None:
        time.sleep(TIMEOUT)
        for probe in self.probes:
            if not probe.done():
                probe.set_result(0)


def test_a_hanging_store_delays_the_first_two_loads_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = HangingConnector()
    monkeypatch.setattr("pdserve.decode.layout_converter.connect", lambda url: store)
    target, seq = layout_of(32), sequence_of(40, 32)
    converter = LayoutConverter(pool_of(target, 2), target, "hanging://")
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(layout_of(16))))

    def load() -> list[Outcome]:
        return prompt.load(seq.kv.initial_keys, [0, 1]).result(600).outcomes

    def is_out() -> bool:
        stats = converter.stats()
        return stats is not None and stats.is_out

    for _ in range(5):
        assert load() == [Outcome.UNAVAILABLE] * 2
    assert store.num_loads == 2
    assert is_out()
    store.probes[0].set_result(1)
    store.hangs = False
    assert load() == [Outcome.OK] * 2
    assert not is_out()

    store.hangs = True
    load(), load()
    converter.close()  # which ends the probe in vain, and must not begin another
    assert len(store.probes) == 2
    assert not [record for record in caplog.records if record.name == "concurrent.futures"]


class RefusingConnector(HangingConnector):
    """Its loads end at once, in vain until the test says otherwise."""

    capabilities = Capabilities(timeout_s=600)  # so that a refusal on a busy machine is not taken for a time-out
    refuses = True

    def load(self, keys: abc.Sequence[bytes], block_ids: abc.Sequence[int], *, tickets: Any = ()) -> Future[Result]:
        future = Future[Result]()
        future.set_result(Result([Outcome.UNAVAILABLE if self.refuses else Outcome.MISSING] * len(keys), 0.0))
        return future


def test_a_store_that_refused_is_found_again_without_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RefusingConnector()
    monkeypatch.setattr("pdserve.decode.layout_converter.connect", lambda url: store)
    target, seq = layout_of(32), sequence_of(40, 32)
    converter = LayoutConverter(pool_of(target, 2), target, "refusing://")
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(layout_of(16))))

    def is_out() -> bool:
        stats = converter.stats()
        return stats is not None and stats.is_out

    for _ in range(2):
        prompt.load(seq.kv.initial_keys, [0, 1]).result(600)
    give_up = time.monotonic() + 600
    while not is_out():  # the circuit breaker counts a failure after its caller has the result
        time.sleep(0.001)
        assert time.monotonic() < give_up
    store.refuses = False
    while is_out():
        converter.probe()
        time.sleep(0.001)
        assert time.monotonic() < give_up
    converter.close()


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 32), (64, 16)])
def test_numbers_of_8_bits_are_copied_with_their_scales(url: str, source_size: int, target_size: int) -> None:
    kv = kv_of(40).mul(40).to(torch.int8)
    source, target = layout_of(source_size, "int8"), layout_of(target_size, "int8")
    store(url, source, kv)
    pool, seq = pool_of(target, 8), sequence_of(40, target_size)
    converter = LayoutConverter(pool, target, url)
    prompt = converter.open_prompt(seq, pb.Layout(**asdict(source)))
    blocks = [*range(len(seq.kv.initial_keys))]
    assert set(prompt.load(seq.kv.initial_keys, blocks).result(600).outcomes) == {Outcome.OK} and prompt.exact
    assert torch.equal(pool[blocks].movedim(0, 3).flatten(3, 4)[:, :, :, :40], kv)
    for other in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match="of another model, and cannot be converted"):
            converter.open_prompt(seq, pb.Layout(**asdict(layout_of(source_size, other))))
    converter.close()


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
def test_layouts_of_other_models_are_rejected(url: str, change: dict[str, Any]) -> None:
    source = replace(layout_of(16), **change)
    converter = LayoutConverter(pool_of(layout_of(32), 1), layout_of(32), url)
    with pytest.raises(ValueError, match="of another model, and cannot be converted"):
        converter.open_prompt(sequence_of(40, 32), pb.Layout(**asdict(source)))
    assert not converter.loaders


def test_conversion_is_disabled_by_default() -> None:
    converter = LayoutConverter(pool_of(layout_of(32), 1), layout_of(32), None)
    with pytest.raises(ValueError, match="started without --convert-kv"):
        converter.open_prompt(sequence_of(40, 32), pb.Layout(**asdict(layout_of(16))))
