"""Sequence: block keys, progress, KV bookkeeping and finish reasons."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.memory.block_pool import BlockPool
from pdserve.engine.sequence import Sequence, SwappedKV
from pdserve.keys import token_array
from pdserve.request import SamplingParams

BLOCK = 4
ROOT = Path(__file__).parents[2]
FIELDS = {field.name for field in fields(Sequence)}
LISTS = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}  # methods that change a list
SHARED_FIELDS = {"keys", "rank", "tokens"}  # other classes have them too: only checked on variables named seq


def sequence(prompt: int, output: int = 0, initial: int | None = None, **sampling: Any) -> Sequence:
    tokens = token_array(range(prompt + output))
    params = SamplingParams(**{"max_tokens": 3, **sampling})
    return Sequence("r", tokens, prompt, initial or prompt, params, b"root", BLOCK, stop_token_ids=frozenset({9}))


def test_keys_cover_full_blocks_and_grow_with_the_tokens() -> None:
    seq = sequence(10)
    first = list(seq.full_keys())
    assert len(first) == 2
    seq.extend([10, 11])
    assert seq.full_keys()[:2] == first and len(seq.full_keys()) == 3


def test_initial_keys_include_the_partial_block_but_no_later_output() -> None:
    seq = sequence(6, output=4, initial=7)
    assert seq.initial_keys() == [seq.full_keys()[0], *seq.prefix_keys([7])]
    assert sequence(8).initial_keys() == sequence(8).full_keys()


def test_dropped_blocks_are_not_held() -> None:
    seq = sequence(12)
    seq.take_blocks(1, [6], [7])
    assert seq.held_blocks == seq.blocks(1, 3) == [6, 7]
    with pytest.raises(AssertionError, match="was dropped"):
        seq.blocks(0, 2)


@pytest.mark.parametrize(
    ("seq", "reason"),
    [
        (sequence(10), None),
        (sequence(8, output=1), None),
        (sequence(8, output=2), "stop"),
        (sequence(8, output=2, min_tokens=3), None),
        (sequence(4, output=3), "length"),
    ],
    ids=["prompt that ends with a stop token", "running", "stop token", "before min_tokens", "max_tokens"],
)
def test_finish_reason(seq: Sequence, reason: str | None) -> None:
    assert seq.finish_reason() == reason


def loaded(num_tokens: int, prompt: int) -> tuple[BlockPool, Sequence]:
    """Return a sequence with blocks for its prompt and one more token, of which `num_tokens` have KV."""
    pool, seq = BlockPool(8, BLOCK), sequence(prompt)
    seq.take_blocks(0, [], pool.allocate(pool.blocks_for(prompt + 1)))
    seq.mark_loaded(num_tokens)
    seq.register_full_blocks(pool)
    return pool, seq


def test_reopened_prompt_computes_its_last_token_again() -> None:
    pool, seq = loaded(6, prompt=6)
    seq.reopen_prompt()
    assert (seq.num_computed, seq.num_loaded, seq.num_registered, seq.num_uncomputed) == (5, 5, 1, 1)
    assert seq.copy_on_write(pool) is None and pool.num_held == len(seq.block_ids) == 2


def test_reopened_prompt_copies_a_full_last_block_that_is_registered() -> None:
    """Another sequence may find it by its key and read it: it must not be written to."""
    pool, seq = loaded(8, prompt=8)
    first, full, spare = seq.block_ids
    seq.reopen_prompt()
    assert (seq.num_computed, seq.num_loaded, seq.num_uncomputed, seq.blocks_needed(pool)) == (7, 7, 1, 1)
    copied = seq.copy_on_write(pool)
    assert copied == (full, seq.block_ids[1]) and full not in seq.block_ids and seq.num_registered == 1
    assert seq.copy_on_write(pool) is None and pool.num_held == 3 and seq.block_ids[2] == spare
    seq.mark_computed(1)
    seq.register_full_blocks(pool)
    assert pool.match(seq.full_keys()) == [first, full]
    pool.check_integrity()


def test_reopened_prompt_computes_its_last_token_in_a_block_that_nobody_finds() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(8)
    seq.take_blocks(0, [], pool.allocate(3))
    seq.mark_loaded(8)
    seq.reopen_prompt()
    seq.register_full_blocks(pool)
    assert seq.copy_on_write(pool) is None and seq.num_registered == 1


def test_blocks_before_the_first_one_are_neither_held_nor_counted() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(18)
    seq.take_blocks(2, pool.allocate(1), pool.allocate(2))
    assert (seq.num_computed, seq.num_registered, pool.num_held) == (12, 3, 3)
    seq.mark_loaded(18)
    assert (seq.num_unneeded, seq.num_local_hit, seq.num_loaded) == (8, 4, 6)
    seq.reopen_prompt()
    assert (seq.num_unneeded, seq.num_local_hit, seq.num_loaded) == (8, 4, 5)
    seq.register_full_blocks(pool)
    assert pool.match(seq.full_keys()[3:]) == seq.blocks(3, 4), "the hit, block 2, would be registered already"


def test_blocks_that_are_given_up_count_as_nothing() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(18)
    seq.take_blocks(2, pool.allocate(1), pool.allocate(2))
    seq.give_up_blocks(pool)
    seq.mark_loaded(0)
    assert (seq.num_unneeded, seq.num_local_hit, seq.num_loaded) == (0, 0, 0)
    assert (seq.num_computed, seq.num_dropped, len(seq.block_ids), pool.num_held) == (0, 0, 0, 0)


def test_tokens_count_as_loaded_or_hit_only_at_first_admission() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(12)
    (hit,) = pool.allocate(1)
    seq.take_blocks(0, [hit], pool.allocate(2))
    seq.mark_loaded(8)
    assert (seq.num_local_hit, seq.num_loaded, seq.num_computed) == (4, 4, 8)
    seq.preempt(pool, None, is_stored=True)
    assert seq.take_refetch() and not seq.take_refetch()
    seq.take_blocks(0, [], pool.allocate(3))
    seq.mark_loaded(12)
    assert (seq.num_local_hit, seq.num_loaded, seq.num_computed) == (4, 4, 12)


def test_uncacheable_blocks_are_not_registered() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(8)
    seq.take_blocks(0, [], pool.allocate(2))
    seq.forbid_caching()
    seq.mark_computed(8)
    seq.register_full_blocks(pool)
    assert pool.match(seq.full_keys()) == []


def test_fork_copies_only_what_it_writes_to_and_has_no_swapped_kv() -> None:
    pool, seq = loaded(6, prompt=6)
    seq.swapped = SwappedKV(0, 4, [1])
    fork = seq.fork(pool, "fork", seq.sampling)
    assert fork.swapped is None and fork.block_ids == seq.block_ids and fork.blocks_needed(pool) == 1
    copied = fork.copy_on_write(pool)
    assert copied == (seq.block_ids[1], fork.block_ids[1]) and fork.block_ids[0] == seq.block_ids[0]
    assert fork.copy_on_write(pool) is None
    fork.release_blocks(pool)
    seq.release_blocks(pool)
    assert pool.num_held == 0


def writes_to_sequences(source: str) -> Iterator[str]:
    """Yield the statements that change a field of a sequence, as far as the names tell."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LISTS:
            targets = [node.func.value]
        for target in targets:
            place = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(place, ast.Attribute) and place.attr in FIELDS:
                owner = ast.unparse(place.value).rpartition(".")[2]
                if owner == "seq" or (owner != "self" and place.attr not in SHARED_FIELDS):
                    yield ast.unparse(node)


def test_only_sequence_writes_its_state() -> None:
    folders = ("pdserve", "prefill", "decode")  # no other may import the engine
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.stem != "sequence"]
    assert len(paths) > 40
    assert not {str(path): found for path in paths if (found := list(writes_to_sequences(path.read_text())))}


@pytest.mark.parametrize(
    "source",
    [
        "seq.num_computed += 1",
        "job.seq.admitted = True",
        "victim.block_ids.pop()",
        "state.job.seq.block_ids[2] = 3",
        "fork.num_dropped, x = pair",
        "seq.tokens.append(1)",
        "del seq.keys[1]",
    ],
)
def test_writes_to_sequences_are_found(source: str) -> None:
    assert list(writes_to_sequences(source)) == [source]
    assert not list(writes_to_sequences("job.keys = seq.keys\nself.tokens -= 1\nx = seq.num_computed"))
