"""Decode role: hand-over, loads, the join of the engine and storing back, without an instance around it.

The reference of every output is one engine that computes the prompt alone.
"""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.kv_transfer.connector import Outcome
from pdserve.proto import pdserve_pb2 as pb

PROMPT = [i % 90 for i in range(70)]  # 5 blocks, the last one partial
FULL_BLOCKS = PROMPT[:64]
TOKENS = 6
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]


def prefill(instance: Instance, prompt: list[int]) -> list[bytes]:
    """Store the prompt's blocks, and return their keys."""
    other = instance()
    job = other.submit(pb.PREFILL, prompt, TOKENS)
    other.run()
    other.end_all()
    keys: list[bytes] = job.keys
    return keys


def report(decode: Any, job: Any, blocks: int = 0, **fields: Any) -> None:
    decode.decoder.hand_over(job, pb.HandOver(request_id=job.seq.request_id, num_blocks=blocks, **fields))
    decode.run_callbacks()


@pytest.mark.parametrize("prompt", [PROMPT, FULL_BLOCKS], ids=["partial last block", "full last block"])
def test_loads_what_prefill_reports_and_continues_after_its_first_token(
    instance: Instance, expected: Expected, prompt: list[int]
) -> None:
    keys, tokens = prefill(instance, prompt), expected(prompt, TOKENS)
    decode = instance()
    job = decode.submit(pb.DECODE, prompt, TOKENS)
    report(decode, job, 2)
    assert decode.end().keys == keys[:2]
    report(decode, job, len(keys), first_token=tokens[0])
    assert not decode.step(), "it waits for the rest"
    decode.end_all()
    assert decode.step() and list(job.output.token_ids) == tokens[1:2]
    report(decode, job, len(keys), final=True)
    assert decode.store.released == keys
    decode.run()
    assert job.seq.output.tokens[len(prompt) :].tolist() == tokens and job.output.finish_reason == "length"
    assert job.prompt_sources() == {"computed": 0, "local_hit": 0, "loaded": len(prompt), "unneeded": 0}
    decode.check_nothing_is_held()


@pytest.mark.parametrize("prompt", [PROMPT, FULL_BLOCKS], ids=["partial last block", "full last block"])
@pytest.mark.parametrize("stored", [0, 2, None], ids=["nothing", "two blocks", "everything"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"], indirect=True)
def test_computes_what_a_lost_prefill_did_not_store(
    instance: Instance, expected: Expected, prompt: list[int], stored: int | None
) -> None:
    keys = prefill(instance, prompt)
    decode = instance()
    job = decode.submit(pb.DECODE, prompt, TOKENS)
    report(decode, job, len(keys) if stored is None else stored)
    decode.end_all()
    assert not decode.step(), "prefill may still report"
    report(decode, job, final=True)
    decode.run()
    assert job.seq.output.tokens[len(prompt) :].tolist() == expected(prompt, TOKENS)
    assert job.prompt_sources()["computed"] >= 1, "the last token, for its logits"
    decode.check_nothing_is_held()


@pytest.mark.parametrize("good", [0, 1, 3])
def test_computes_what_could_not_be_loaded(instance: Instance, expected: Expected, good: int) -> None:
    keys, tokens = prefill(instance, PROMPT), expected(PROMPT, TOKENS)
    decode = instance()
    job = decode.submit(pb.DECODE, PROMPT, TOKENS)
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    decode.end(good=good, then=Outcome.CORRUPT)
    decode.run()
    assert job.seq.output.tokens[len(PROMPT) :].tolist() == tokens and job.prompt_sources()["loaded"] == 16 * good
    decode.check_nothing_is_held()


def test_blocks_that_were_not_stored_in_time_are_loaded_later(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    keys, tokens = prefill(instance, PROMPT), expected(PROMPT, TOKENS)
    late = {key: rows.pop(key) for key in keys[1:]}
    decode = instance(follows=True)
    job = decode.submit(pb.DECODE, PROMPT, TOKENS)
    report(decode, job, 0, coming=len(keys), first_token=tokens[0])
    while decode.store.active:
        assert decode.end().kind == "follow"
    rows |= late
    report(decode, job, len(keys), final=True)
    assert [operation.kind for operation in decode.store.active] == ["load"]
    assert decode.end().keys == keys[1:]
    decode.run()
    assert job.seq.output.tokens[len(PROMPT) :].tolist() == tokens and job.prompt_sources()["loaded"] == len(PROMPT)
    decode.check_nothing_is_held()


def test_local_blocks_are_not_loaded(instance: Instance, expected: Expected) -> None:
    keys, tokens = prefill(instance, PROMPT), expected(PROMPT, TOKENS)
    decode = instance()
    decode.submit(pb.BOTH, PROMPT[:40], 1)
    decode.end_all()
    decode.run()
    job = decode.submit(pb.DECODE, PROMPT, TOKENS)
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    assert decode.end().keys == keys[2:]
    decode.run()
    assert job.seq.output.tokens[len(PROMPT) :].tolist() == tokens
    assert job.prompt_sources() == {"computed": 0, "local_hit": 32, "loaded": 38, "unneeded": 0}
    decode.check_nothing_is_held()


def test_requests_wait_for_blocks_in_order(instance: Instance) -> None:
    decode = instance()
    taken = decode.engine.pool.allocate(60)
    first, second = (decode.submit(pb.DECODE, PROMPT, TOKENS) for _ in range(2))
    assert not decode.decoder.unreserved and len(decode.decoder.waiting) == 2, "there is no KV"
    for job in (second, first):
        report(decode, job, 5)
    assert len(decode.decoder.unreserved) == 2
    decode.engine.pool.release(taken[:1])
    decode.step()
    assert len(decode.decoder.unreserved) == 1 and first.seq.kv.block_ids and not second.seq.kv.block_ids
    decode.decoder.cancel(first)
    decode.end_all()
    decode.step()
    assert len(decode.decoder.unreserved) == 0 and second.seq.kv.block_ids
    decode.decoder.cancel(second)
    decode.end_all()
    decode.engine.pool.release(taken[1:])
    decode.check_nothing_is_held()


@pytest.mark.parametrize("follows", [False, True], ids=["stored", "followed"])
def test_a_prompt_holds_blocks_for_kv_that_exists(instance: Instance, expected: Expected, follows: bool) -> None:
    """The others are promised to it. A running sequence may take them; another prompt waits."""
    keys, tokens = prefill(instance, PROMPT), expected(PROMPT, TOKENS)
    decode = instance(follows=follows, num_blocks=9)
    job, other = (decode.submit(pb.DECODE, PROMPT, TOKENS) for _ in range(2))
    pool = decode.engine.pool
    for blocks in range(1, 4):
        report(decode, job, 0 if follows else blocks, coming=blocks)
        assert pool.num_held == len(job.seq.kv.held_blocks) == blocks and pool.num_spare == 4
    report(decode, other, len(keys))
    assert not other.seq.kv.block_ids, "four blocks are too few for it"
    outgrown = pool.allocate(6)
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    decode.end_all()
    assert decode.decoder.cramped and not decode.step() and pool.num_spare == -2
    pool.release(outgrown)
    while decode.step() or decode.store.active:
        decode.end_all()
    assert job.seq.output.tokens[len(PROMPT) :].tolist() == tokens and job.prompt_sources()["loaded"] == len(PROMPT)
    report(decode, other, len(keys), first_token=tokens[0], final=True)
    decode.end_all()
    decode.run()
    assert other.seq.output.tokens[len(PROMPT) :].tolist() == tokens
    assert pool.num_promised == 0
    decode.check_nothing_is_held()


def test_cancelled_request_keeps_its_blocks_until_the_load_ends_and_releases_the_leases(instance: Instance) -> None:
    keys = prefill(instance, PROMPT)
    decode = instance()
    job = decode.submit(pb.DECODE, PROMPT, TOKENS)
    report(decode, job, len(keys), final=True)
    decode.decoder.cancel(job)
    assert decode.engine.pool.num_held == 5 and not decode.context.closed
    decode.end()
    assert decode.store.released == keys and not decode.step()
    decode.check_nothing_is_held()


def test_an_answer_that_ends_before_the_final_report_leaves_the_leases_to_prefill(instance: Instance) -> None:
    """The router then cancels the prompt. Another prompt may have leased the same blocks."""
    there, decode = instance(follows=True), instance(follows=True)
    computed = there.submit(pb.PREFILL, PROMPT, TOKENS)
    there.run()
    job = decode.submit(pb.DECODE, PROMPT, TOKENS)
    report(decode, job, coming=5, first_token=computed.seq.output.tokens[-1])
    while there.store.active:
        there.store.end()  # of which its thread has not heard
    decode.end_all()
    decode.run()
    assert job.ended and not computed.output.stored.final
    there.prefiller.cancel(computed)
    there.run()
    assert (there.store.released, decode.store.released) == (computed.keys, [])
    there.check_nothing_is_held()
    decode.check_nothing_is_held()


@pytest.mark.parametrize(
    ("store_generated", "multi_turn", "stored"),
    [("off", True, 0), ("auto", False, 4), ("auto", True, 6), ("on", False, 6)],
)
def test_stores_back_what_later_requests_may_load(
    instance: Instance, rows: dict[bytes, Any], store_generated: str, multi_turn: bool, stored: int
) -> None:
    both = instance(store_generated=store_generated)
    job = both.submit(pb.BOTH, PROMPT, 30, multi_turn=multi_turn)
    both.run()
    assert job.ended and len(both.context.closed) == (0 if both.store.active else 1)
    both.end_all()
    assert list(rows) == job.seq.kv.full_keys()[:stored]
    both.check_nothing_is_held()


def test_nothing_is_stored_back_after_a_gap(instance: Instance, rows: dict[bytes, Any]) -> None:
    both = instance(store_generated="on")
    job = both.submit(pb.BOTH, PROMPT, 200)
    while not both.store.active:
        both.step()
    both.end(good=2, then=Outcome.FULL)
    both.run()
    assert not both.store.active and list(rows) == job.seq.kv.full_keys()[:2]
    both.check_nothing_is_held()


LONG = [(i * i + 3 * i) % 250 for i in range(150)]  # 10 blocks, of which a window of 48 tokens needs the last 4
LONG_FULL = [*LONG, *range(10)]  # its last block is full, so that a next token needs another one
windowed = pytest.mark.parametrize("architecture", ["mistral"], indirect=True)


@windowed
@pytest.mark.parametrize(
    ("prompt", "first"), [(LONG, 6), (LONG_FULL, 7)], ids=["partial last block", "full last block"]
)
def test_only_the_blocks_of_the_window_are_taken_and_loaded(
    instance: Instance, expected: Expected, prompt: list[int], first: int
) -> None:
    keys, tokens = prefill(instance, prompt), expected(prompt, TOKENS)
    decode = instance()
    job = decode.submit(pb.DECODE, prompt, TOKENS)
    report(decode, job, first)
    assert not decode.store.active and decode.engine.pool.num_held == 0
    report(decode, job, len(keys))
    assert decode.engine.pool.num_held == len(job.seq.kv.held_blocks) == len(keys) - first
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    assert decode.end().keys == keys[first:]
    decode.run()
    assert job.seq.output.tokens[len(prompt) :].tolist() == tokens and decode.store.released == keys
    assert job.prompt_sources() == {
        "computed": 0,
        "local_hit": 0,
        "loaded": len(prompt) - 16 * first,
        "unneeded": 16 * first,
    }
    decode.check_nothing_is_held()


@windowed
@pytest.mark.parametrize(
    ("good", "computed", "stored"), [(0, 150, range(9)), (1, 150, range(9)), (2, 150, range(9)), (3, 6, range(0))]
)
def test_a_missing_block_of_the_window_means_computing_the_prompt(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], good: int, computed: int, stored: range
) -> None:
    """Except for a partial last block: the window of its first token reaches only blocks that were loaded."""
    keys, tokens = prefill(instance, LONG), expected(LONG, TOKENS)
    decode = instance(store_generated="on")
    job = decode.submit(pb.DECODE, LONG, TOKENS)
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    decode.end(good=good, then=Outcome.MISSING)
    assert decode.context.counts["prompt_tokens_by_source", "computed"] == computed
    rows.clear()
    decode.run()
    assert job.seq.output.tokens[len(LONG) :].tolist() == tokens
    decode.end_all()
    assert list(rows) == [keys[i] for i in stored], "what was computed here is stored back, and nothing else"
    decode.check_nothing_is_held()
    both = instance()
    again = both.submit(pb.BOTH, LONG, TOKENS)
    both.end_all()
    both.run()
    assert again.seq.kv.num_loaded == 16 * len(stored) and again.seq.output.tokens[len(LONG) :].tolist() == tokens


@windowed
@pytest.mark.parametrize("prompt", [LONG, LONG_FULL], ids=["partial last block", "full last block"])
@pytest.mark.parametrize("has_first_token", [True, False])
def test_blocks_of_the_window_that_the_pool_has_are_not_loaded(
    instance: Instance, expected: Expected, prompt: list[int], has_first_token: bool
) -> None:
    """Without a first token, the last one of the prompt is computed again, beside a sequence that reads its block."""
    tokens = expected(prompt, TOKENS)
    decode = instance()
    other = decode.submit(pb.BOTH, [*prompt, 7, 8, 9], 2 * TOKENS)
    while not other.seq.output.num_generated:
        decode.step()
    job = decode.submit(pb.DECODE, prompt, TOKENS)
    report(decode, job, 1)
    hits = len(prompt) // 16 - job.seq.kv.num_dropped
    assert job.seq.kv.num_local_hit == 16 * hits > 0 and job.seq.kv.num_unneeded == 16 * job.seq.kv.num_dropped > 0
    if has_first_token:
        report(decode, job, first_token=tokens[0])
    report(decode, job, 0 if prompt is LONG_FULL else 10, final=True)
    decode.end_all()
    decode.run()
    assert job.seq.output.tokens[len(prompt) :].tolist() == tokens
    assert other.seq.output.tokens[len(prompt) + 3 :].tolist() == expected([*prompt, 7, 8, 9], 2 * TOKENS)
    decode.check_nothing_is_held()


@windowed
def test_output_behind_blocks_that_were_not_needed_is_stored_back(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    keys, tokens = prefill(instance, LONG), expected(LONG, 40)
    decode = instance(store_generated="on")
    job = decode.submit(pb.DECODE, LONG, 40)
    report(decode, job, len(keys), first_token=tokens[0], final=True)
    decode.end_all()
    rows.clear()
    decode.run()
    decode.end_all()
    assert job.seq.output.tokens[len(LONG) :].tolist() == tokens and list(rows) == job.seq.kv.full_keys()[9:11]
    assert not decode.context.counts.get(("store_back_skipped_blocks", ""))
    decode.check_nothing_is_held()


@windowed
@pytest.mark.parametrize("is_lost", [False, True], ids=["all blocks are stored", "the store has lost a block"])
def test_a_pool_that_holds_one_prompt_holds_the_windows_of_three(
    instance: Instance, expected: Expected, is_lost: bool
) -> None:
    """If a block is lost, each prompt is computed in turn: none holds a part of its blocks and waits for the others."""
    prompts = [[(i * i + k * i) % 250 for i in range(150)] for k in (3, 4, 5)]
    keys, tokens = [prefill(instance, prompt) for prompt in prompts], [expected(prompt, TOKENS) for prompt in prompts]
    decode = instance(num_blocks=12)
    jobs = [decode.submit(pb.DECODE, prompt, TOKENS) for prompt in prompts]
    for job, its_keys, its_tokens in zip(jobs, keys, tokens, strict=True):
        report(decode, job, len(its_keys), first_token=its_tokens[0], final=True)
    assert len(decode.decoder.unreserved) == 0 and decode.engine.pool.num_held == 12
    while decode.store.active:
        decode.end(good=1 if is_lost else None, then=Outcome.MISSING)
    decode.run()
    assert [job.seq.output.tokens[150:].tolist() for job in jobs] == tokens
    assert decode.engine.scheduler.num_preemptions == 0
    decode.check_nothing_is_held()
