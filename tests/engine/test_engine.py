"""Engine: greedy float32 output equals transformers' generate, token for token."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.engine import Engine
from pdserve.engine.features import PromptScores, find
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.request import Request, SamplingParams

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]


def run(
    engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams], expected_held: int = 0
) -> list[list[int]]:
    seqs = [
        engine.new_sequence(str(i), Request(prompt=p, sampling=s))
        for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
    for seq in seqs:
        engine.add(seq)
    finish(engine, expected_held)
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


def finish(engine: Engine, expected_held: int = 0) -> None:
    steps = 0
    while engine.has_work:
        result = engine.step()
        assert result.advanced, "a step did nothing while there was work"
        done: list[Sequence] = [seq for seq in result.sampled if seq.output.finish_reason()]
        for seq in done:
            engine.remove(seq)
        engine.pool.check_integrity()
        steps += 1
    assert engine.pool.num_held == expected_held


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **kwargs)


@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "gemma2", "deepseek_v3"),  # over processes, too: tests/integration/test_token_identity.py
        *("qwen2", "qwen3", "mistral", "gemma3", "olmo2", "qwen3_moe"),
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
    ],
)
def test_equals_generate(
    architecture: str, checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    path = checkpoint(architecture)
    expected = generate(path, prompts, 32)
    roomy = Engine(EngineConfig(model=str(path), num_blocks=400, max_num_batched_tokens=256))
    assert run(roomy, prompts, [greedy(32)] * len(prompts)) == expected
    assert run(roomy, prompts, [greedy(32)] * len(prompts)) == expected, "with a warm prefix cache"
    assert roomy.scheduler.prefix_hits > 1000


def test_longrope_context_is_limited_to_the_original_positions(
    checkpoint: Callable[..., Path], generate: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    path, lengths = checkpoint("phi3"), (1, 10, 31, 48)
    prompts = [list(range(length)) for length in lengths]
    engine = Engine(EngineConfig(model=str(path), num_blocks=100, max_num_batched_tokens=16))
    assert engine.max_model_len == 64 and "the context is 64 of the model's 1024" in caplog.text
    assert run(engine, prompts, [greedy(16)] * len(prompts)) == generate(path, prompts, 16)
    with pytest.raises(ValueError, match="64 that fit"):
        engine.new_sequence("long", Request(prompt=list(range(60)), sampling=greedy(5)))


def test_equals_generate_with_blocks_of_one_token(
    checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    path, some = checkpoint("llama"), prompts[:9]
    engine = Engine(EngineConfig(model=str(path), num_blocks=600, block_size=1, max_num_batched_tokens=64))
    for _ in range(2):
        assert run(engine, some, [greedy(32)] * len(some)) == generate(path, some, 32)


def scores(seq: Sequence) -> PromptScores:
    found = find(PromptScores, seq)
    assert found is not None
    return found


def test_one_token_of_each_sequence_is_no_decode_step_if_one_belongs_to_a_scored_prompt(
    checkpoint: Callable[..., Path],
) -> None:
    """Its logits come behind those of the other sequences, here of one that joins after it."""
    settings: dict[str, Any] = {"block_size": 1, "num_blocks": 200, "max_num_batched_tokens": 64, "itl_target_ms": 1.0}
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), **settings))
    engine.scheduler.costs = Costs()  # a decode step is forecast to take 10 ms: prompts get one token beside it
    prompt = [9, 8, 7, 100, 200, 250, 40, 50, 60, 70]
    alone = engine.new_sequence("alone", Request(prompt=prompt, sampling=greedy(1, prompt_logprobs=2)))
    engine.add(alone)
    finish(engine)
    decoding, scored = (
        engine.new_sequence("d", Request(prompt=[5, 44], sampling=greedy(40))),
        engine.new_sequence("s", Request(prompt=prompt, sampling=alone.sampling)),
    )
    for seq in (decoding, scored):
        engine.add(seq)
        engine.step()
    while scored.kv.num_uncomputed > 2:
        fork = engine.fork(decoding, "f", greedy(40))
        result = engine.step()
        assert result.work == [(1, len(decoding) - 2), (1, scored.kv.num_computed - 1), (1, len(decoding) - 2)]
        assert result.outcome[fork] == result.outcome[decoding]
        engine.remove(fork)
    engine.remove(decoding)
    finish(engine)
    expected, found = (
        [of.scores[at].logprob for at in range(1, len(prompt))] for of in (scores(alone), scores(scored))
    )
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        ("llama", "auto"),
        ("mistral", "reference"),
        pytest.param("deepseek_v2", "reference", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "auto", marks=pytest.mark.slow),
        ("jamba", "auto"),
        ("lfm2", "auto"),
    ],
)
def test_equals_generate_while_preempting(
    architecture: str,
    kernel: str,
    swap_space: float,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
) -> None:
    """By recomputing, and by swapping at no cost; with a cold and with a warm prefix cache."""
    path, small = checkpoint(architecture), [p for p in prompts if 30 < len(p) <= 100]
    expected = generate(path, small, 32)
    settings: dict[str, Any] = {
        "num_blocks": 14 if architecture == "jamba" else 24,  # whose states take pages of three blocks
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "swap_space": swap_space,
        "kernel": kernel,
    }
    tight = Engine(EngineConfig(model=str(path), **settings))
    tight.scheduler.costs = Costs(prefill=(1, 1, 0), swap=(0, 0))
    for _ in range(2):
        before = tight.scheduler.num_preemptions
        assert run(tight, small, [greedy(32)] * len(small)) == expected
        assert tight.scheduler.num_preemptions > before
    assert tight.scheduler.swap_space.num_swaps == (tight.scheduler.num_preemptions if swap_space else 0)
    assert tight.scheduler.swap_space.pool is None or tight.scheduler.swap_space.pool.num_held == 0


@pytest.mark.parametrize(
    ("architecture", "blocks"), [("mistral", [4]), ("gemma2", [12, 4]), ("gpt_oss", [12, 4])], ids=lambda one: str(one)
)
def test_blocks_outside_of_a_window_are_released(
    architecture: str, blocks: list[int], checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    """A window of 48 tokens needs 4 blocks. The layers that attend to all tokens need every block of theirs."""
    path, prompt = checkpoint(architecture), next(prompt for prompt in prompts if len(prompt) == 100)
    (expected,) = generate(path, [prompt], 80)
    engine = Engine(EngineConfig(model=str(path), num_blocks=24, max_num_batched_tokens=64))
    seq = engine.new_sequence("r", Request(prompt=prompt, sampling=greedy(80)))
    engine.add(seq)
    while len(seq) < 170:
        engine.step()
    fork, pool, kv = engine.fork(seq, "fork", greedy(80)), engine.pool, engine.runner.kv
    held = [kv.views[at][local] for at, local in map(partial(place, pool), seq.kv.held_blocks)]
    kept = [block_X.clone() for block_X in held]
    kv.pool_NX.fill_(float("nan"))  # overwrite whatever was released
    for block_X, content_X in zip(held, kept, strict=True):
        block_X.copy_(content_X)
    most = [0] * len(pool.groups)
    while engine.has_work:
        done = [one for one in engine.step().sampled if one.output.finish_reason()]
        ids = {block for one in (seq, fork) for block in one.kv.held_blocks}
        counts = Counter(place(pool, block)[0] for block in ids if is_used(block, seq, fork))
        most = [max(before, counts[at]) for at, before in enumerate(most)]
        for one in done:
            engine.remove(one)
        pool.check_integrity()
    assert seq.output.tokens.tolist() == fork.output.tokens.tolist() == prompt + expected
    assert most == [count + 2 for count in blocks], "the fork has its own last two"
    assert pool.num_held == 0


def place(pool: BlockPool, block: int) -> tuple[int, int]:
    """Return the group of a block, and its index there."""
    at = sum(block >= group.first_id for group in pool.groups) - 1
    return at, block - pool.groups[at].first_id


def is_used(block: int, *seqs: Sequence) -> bool:
    """Return whether a block is in a table of one of the sequences, and not only in one of its pages."""
    return any(block in table for seq in seqs for table in (seq.kv.block_ids, *(tail.ids for tail in seq.kv.tails)))


def test_content_of_unused_blocks_is_irrelevant(
    checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    """A failed load may leave any bits in a block, NaN included; also in block 0, which pads every table."""
    path = checkpoint("llama")
    expected = generate(path, prompts, 32)
    for kernel in ("reference", "auto"):
        engine = Engine(EngineConfig(model=str(path), num_blocks=400, max_num_batched_tokens=256, kernel=kernel))
        engine.runner.kv.pool_NX.fill_(float("nan"))
        engine.pool.allocate(1)
        assert run(engine, prompts, [greedy(32)] * len(prompts), expected_held=1) == expected


def test_continuation_counts_as_output(checkpoint: Callable[..., Path], generate: Generate) -> None:
    path = checkpoint("llama")
    prompt = [5, 6, 7] * 9
    (expected,) = generate(path, [prompt], 20)
    engine = Engine(EngineConfig(model=str(path), num_blocks=64))
    seq = engine.new_sequence("r", Request(prompt=prompt, sampling=greedy(20)), output=expected[:12])
    engine.add(seq)
    finish(engine)
    assert seq.output.tokens.tolist() == prompt + expected


def test_step_without_progress_is_idle(checkpoint: Callable[..., Path]) -> None:
    """The engine thread then waits for an event instead of spinning."""
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=8))
    assert engine.step().idle
    taken = engine.pool.allocate(8)
    engine.add(engine.new_sequence("r", Request(prompt=[1, 2, 3], sampling=greedy(2))))
    assert engine.has_work and engine.step().idle
    engine.pool.release(taken)
    assert not engine.step().idle


@pytest.mark.parametrize(("architecture", "num_blocks"), [("llama", 200), ("llama", 14), ("bamba", 200), ("bamba", 14)])
def test_forks_continue_like_their_parent_and_independently(
    architecture: str, num_blocks: int, checkpoint: Callable[..., Path], generate: Generate, prompts: list[list[int]]
) -> None:
    """In a large pool, and in a small one where forks are preempted."""
    path = checkpoint(architecture)
    prompt = max(prompts, key=len)[:61]
    (expected,) = generate(path, [prompt], 32)
    engine = Engine(EngineConfig(model=str(path), num_blocks=num_blocks))
    parent = engine.new_sequence("parent", Request(prompt=prompt, sampling=greedy(32)))
    engine.add(parent)
    greedy_forks, sampled = [], []
    for i in range(9):
        engine.step()
        if i >= 3:
            greedy_forks.append(engine.fork(parent, f"greedy {i}", greedy(32)))
    sampling = SamplingParams(max_tokens=32, temperature=1.0, seed=7, ignore_eos=True)
    sampled = [engine.fork(parent, f"sampled {i}", sampling) for i in range(2)]
    finish(engine)
    for seq in (parent, *greedy_forks):
        assert seq.output.tokens[len(prompt) :].tolist() == expected
    assert sampled[0].output.tokens == sampled[1].output.tokens != parent.output.tokens
    (alone,) = run(
        engine, [parent.output.tokens[: len(prompt) + 9].tolist()], [SamplingParams(max_tokens=23, temperature=0)]
    )
    assert alone == expected[9:]
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks < 100)
