"""Sequence: its parts, its finish reason, and that nothing else changes its state."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.sequence_kv import SequenceKV
from pdserve.engine.sequence import Sequence, SequenceOutput
from pdserve.keys import token_array
from pdserve.request import SamplingParams

BLOCK = 4
ROOT = Path(__file__).parents[2]
FIELDS = {field.name for part in (Sequence, SequenceKV, SequenceOutput) for field in fields(part)}
OWNERS = ("seq", "seq.kv", "seq.output")
LISTS = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}  # methods that change a list
# Other classes have them too: only checked on what is named like a sequence or its parts.
SHARED_FIELDS = {"block_size", "failure", "keys", "output", "rank", "sampling", "tokens"}


def sequence(prompt: int, output: int = 0, initial: int | None = None, **sampling: Any) -> Sequence:
    tokens = token_array(range(prompt + output))
    params = SamplingParams(**{"max_tokens": 3, **sampling})
    return Sequence.new("r", tokens, prompt, initial or prompt, params, b"root", BLOCK, stop_token_ids=frozenset({9}))


def test_initial_keys_include_the_partial_block_but_no_later_output() -> None:
    kv = sequence(6, output=4, initial=7).kv
    assert kv.initial_keys == [kv.full_keys()[0], *kv.prefix_keys([7])]
    kv = sequence(8).kv
    assert kv.initial_keys == kv.full_keys()
    rootless = Sequence.new("r", token_array(range(8)), 8, 8, SamplingParams(), b"", BLOCK)
    assert rootless.kv.initial_keys == []  # those of the warm-up, thousands of tokens for each simulated instance


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
    assert seq.output.finish_reason() == reason


def test_the_parts_of_a_sequence_and_of_its_copies_have_the_same_tokens() -> None:
    pool, seq = BlockPool(8, BLOCK), sequence(6)
    sibling = seq.sibling("sibling", seq.sampling, None)
    seq.kv.take_blocks(0, [], pool.allocate(2))
    seq.kv.mark_computed(6)
    fork = seq.fork(pool, "fork", SamplingParams(max_tokens=1), ())
    sibling.share(seq, pool)
    for one, token in ((seq, 7), (sibling, 8), (fork, 10)):
        one.output.append(token)
    for one, token in ((seq, 7), (sibling, 8), (fork, 10)):
        assert one.kv.tokens.tolist() == one.output.tokens.tolist() == [*range(6), token]
        assert one.kv.num_uncomputed == one.output.num_generated == 1 and one.output.generated.tolist() == [token]
    assert [one.output.finish_reason() for one in (seq, sibling, fork)] == [None, None, "length"]


def writes_to_sequences(source: str) -> Iterator[str]:
    """Yield the statements that change a field of a sequence, as far as the names tell."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LISTS:
            targets = [node.func.value] if not ast.unparse(node.func.value).endswith(".output") else []
        for target in targets:
            place = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(place, ast.Attribute) and place.attr in FIELDS:
                owner = ast.unparse(place.value)
                is_sequence = any(owner == name or owner.endswith(f".{name}") for name in OWNERS)
                if is_sequence or (owner != "self" and place.attr not in SHARED_FIELDS):
                    yield ast.unparse(node)


def test_only_sequence_writes_its_state() -> None:
    folders = ("pdserve", "prefill", "decode")  # no other may import the engine
    paths = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.stem not in ("sequence", "sequence_kv")
    ]
    assert len(paths) > 40
    assert not {str(path): found for path in paths if (found := list(writes_to_sequences(path.read_text())))}


@pytest.mark.parametrize(
    "source",
    [
        "seq.kv.num_computed += 1",
        "job.seq.kv.admitted = True",
        "victim.kv.block_ids.pop()",
        "state.job.seq.kv.block_ids[2] = 3",
        "fork.num_dropped, x = pair",
        "seq.output.tokens.append(1)",
        "del seq.kv.keys[1]",
        "job.seq.rank = 3",
        "one.seq.output = None",
    ],
)
def test_writes_to_sequences_are_found(source: str) -> None:
    assert list(writes_to_sequences(source)) == [source]
    assert not list(
        writes_to_sequences("job.keys = seq.kv.keys\nself.tokens -= 1\nseq.output.append(seq.kv.num_computed)")
    )
