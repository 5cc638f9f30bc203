"""Masks of a worker: those that are computed here, and what happens to a grammar whose masks take too long."""

import json
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.grammars.compile_server import Loaded
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.formats import specified, tag
from pdserve.grammars.limits import CompileLimits, GrammarTooComplex
from pdserve.grammars.mask_client import Follower, LoadedGrammar, MaskRow, fill_masks
from pdserve.grammars.mask_worker import new_matcher
from pdserve.grammars.specification import lark_grammar

SPECS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"enum": ["x", 5]}, "b": {"type": "number"}}, "required": ["a"]}},
    {"regex": r"[ab]{3,7}-\d{4}"},
    {"choice": ["Paris", 'Bonn "am\nRhein" é']},
    {"grammar": 'root ::= "x" | "(" inner ")"\ninner ::= "y" | "[z]"'},
    {"format": tag("<tool_call>\n", specified({"json": {"type": "boolean"}}), "\n</tool_call>")},
]
# After `Q`, letters may be grouped in any way, so that the time for each token grows with the square of their number; all
# masks before take milliseconds.
BOMB = {"grammar": 'root ::= [a-z]{600} "Q" s\ns ::= s s s | s s | [a-z]'}
NUM_WORDS = 20_000


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has many long words, as those of real models have."""
    folder = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(checkpoint("llama"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, choose = tokenizer["model"]["vocab"], random.Random(0).choices
    while len(vocab) < NUM_WORDS:
        vocab.setdefault("".join(choose(string.ascii_lowercase, k=8)), len(vocab))
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def vocab(model: Path) -> dict[str, int]:
    ids: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return ids


@pytest.fixture(scope="module")
def compiler(model: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(str(model), NUM_WORDS, [0], CompileLimits(cpu_s=600, elapsed_s=600))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def local_mask(model: Path) -> Callable[[dict[str, Any], list[int]], torch.Tensor]:
    """Computes the mask of a grammar after an output in this process."""
    loaded = Loaded(str(model), NUM_WORDS, [0])

    def compute(spec: dict[str, Any], output: list[int]) -> torch.Tensor:
        matcher = new_matcher(loaded.tokenizer, lark_grammar(spec, loaded.special))
        assert all(map(matcher.consume_token, output))
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        return words[: NUM_WORDS // 32]

    return compute


def follow(compiler: GrammarCompiler, spec: dict[str, Any]) -> Follower:
    return Follower(LoadedGrammar(compiler, compiler.compile(json.dumps(spec))))


def row_of(follower: Follower, output: list[int]) -> MaskRow:
    return MaskRow(follower, list(output), torch.full((NUM_WORDS // 32,), -1, dtype=torch.int32))


def allowed(mask_W: torch.Tensor) -> list[int]:
    return [i for i in range(NUM_WORDS) if int(mask_W[i // 32]) >> i % 32 & 1]


def test_masks_are_those_that_are_computed_in_this_process(
    compiler: GrammarCompiler, local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor]
) -> None:
    choose = random.Random(1).choice
    followers, outputs = [follow(compiler, spec) for spec in SPECS], [list[int]() for _ in SPECS]
    for _ in range(30):
        rows = [row_of(*one) for one in zip(followers, outputs, strict=True)]
        fill_masks(rows)
        for spec, row, output in zip(SPECS, rows, outputs, strict=True):
            assert row.follower.failure is None
            assert torch.equal(row.mask_W, local_mask(spec, output))
            if 0 not in output:
                output.append(choose(allowed(row.mask_W)))


def test_a_mask_that_takes_too_long_fails_its_sequence_only(
    compiler: GrammarCompiler,
    vocab: dict[str, int],
    local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor],
) -> None:
    bomb, other = follow(compiler, BOMB), follow(compiler, SPECS[1])
    goods = [other, Follower(bomb.grammar)]
    output, good_outputs = [vocab["a"]] * 600, [[vocab["a"]] * 3, [vocab["a"]] * 2]
    fill_masks([row_of(bomb, output), *map(row_of, goods, good_outputs)])
    assert bomb.failure is None
    long = [*output, vocab["Q"], *[vocab["a"]] * 800]
    rows = [row_of(goods[0], good_outputs[0]), row_of(bomb, long), row_of(goods[1], good_outputs[1])]
    fill_masks(rows)
    assert isinstance(bomb.failure, GrammarTooComplex) and "takes more than 0.25 s of CPU time" in str(bomb.failure)
    for row, spec in ((rows[0], SPECS[1]), (rows[2], BOMB)):
        assert row.follower.failure is None and torch.equal(row.mask_W, local_mask(spec, row.output))


def test_sequences_that_have_ended_are_forgotten(compiler: GrammarCompiler) -> None:
    follower = follow(compiler, SPECS[1])
    for _ in range(5):
        follower = Follower(follower.grammar)
        fill_masks([row_of(follower, [])])
        assert len(follower.grammar.worker._ended) <= 1


def test_masks_go_on_without_the_compile_server(compiler: GrammarCompiler) -> None:
    follower = follow(compiler, SPECS[1])
    fill_masks([row_of(follower, [])])
    assert compiler.server_pid is not None
    os.killpg(compiler.server_pid, 9)
    fill_masks([row_of(follower, [])])
    assert follower.failure is None
