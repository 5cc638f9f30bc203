"""Models of whose layers some have a window: what of their KV crosses, and what a later prompt finds of it."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.output import Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from tests.instance import hash_model

WINDOW, B, TOKENS = 48, 16, 24
HEADS, SIZE = 2, 16  # of the layers with a window
PROMPTS = {n: [(i * i + 3 * i) % 250 for i in range(n)] for n in (330, 320, 40)}
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]
with_windows = pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "gemma4"], indirect=True)


def pass_on(there: Any, decode: Any, here: Any) -> None:
    """Do what a router does with prefill's output."""
    sent, there.output = there.output, None
    if sent is not None:
        stored = sent.stored or Stored()
        message = pb.HandOver(num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final)
        if sent.token_ids:
            message.first_token = sent.token_ids[0]
        decode.decoder.hand_over(here, message)
        decode.run_callbacks()


def hand_over(prefill: Any, decode: Any, prompt: list[int], between: Callable[[], None] = lambda: None) -> Any:
    """Compute a prompt on one instance and its answer on another, which is run to its end. Return decode's job.

    Args:
        between: called once everything is stored.
    """
    there = prefill.submit(pb.PREFILL, prompt, TOKENS)
    here = decode.submit(pb.DECODE, prompt, TOKENS, multi_turn=True)
    run(prefill, lambda: there in prefill.context.closed)
    between()
    pass_on(there, decode, here)
    run(decode, lambda: here.ended)
    return here


def run(one: Any, is_done: Callable[[], bool]) -> None:
    """Run an instance and its transfers."""
    for _ in range(300):
        one.step()
        one.end_all()
        if is_done():
            return
    raise AssertionError("it does not end")


def answer(job: Any) -> list[int]:
    tokens: list[int] = job.seq.output.tokens[job.seq.output.num_prompt :].tolist()
    return tokens


@with_windows
@pytest.mark.parametrize("num_tokens", PROMPTS)
def test_the_hand_over_moves_what_the_last_token_reaches(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], num_tokens: int
) -> None:
    prompt, prefill, decode = PROMPTS[num_tokens], instance(), instance()
    full, window = (group.block_bytes for group in prefill.engine.layout.groups)
    stored: list[int] = []
    job = hand_over(prefill, decode, prompt, lambda: stored.append(len(rows)))
    assert answer(job) == expected(prompt, TOKENS)
    assert job.prompt_sources() == {"computed": 0, "local_hit": 0, "loaded": num_tokens, "unneeded": 0}
    blocks, reached = -(-num_tokens // B), -(-num_tokens // B) - max(0, num_tokens - WINDOW) // B
    assert job.transferred_blocks == blocks and job.tail_bytes == reached * window
    assert stored[0] - blocks in (reached, reached + 1), "and what a token behind the last full block reaches"
    assert max(most_held(decode, prompt)) <= 5, "of a window of 3 blocks"
    prefill.check_nothing_is_held()
    decode.check_nothing_is_held()
    assert prefill.engine.layout.block_bytes == full + window


def most_held(one: Any, prompt: list[int]) -> list[int]:
    """Return how many blocks of its windows a sequence holds after each decode step."""
    job, held = one.submit(pb.BOTH, prompt, TOKENS), list[int]()
    while not job.ended:
        run(one, lambda: True)
        if job.seq.kv.is_decoding and job.seq.kv.tails:
            held += [len(tail.ids) - tail.num_dropped for tail in job.seq.kv.tails]
    return held[1:]


@with_windows
def test_each_byte_of_a_window_that_crosses_matters(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    """One byte of a window's block in the store is another one: the answer is another one."""
    prompt, clean, kept = PROMPTS[330], dict[bytes, Any](), list[bytes]()
    job = hand_over(instance(), instance(), prompt, lambda: clean.update({name: rows[name].copy() for name in rows}))
    tokens = expected(prompt, TOKENS)
    assert answer(job) == tokens
    tails = [name for name in clean if len(name) > len(job.keys[0])]
    for name in tails:
        rows.clear()
        rows.update({other: row.copy() for other, row in clean.items()})
        token = B - 1 if name[:16] in job.seq.kv.full_keys()[: len(prompt) // B] else 0

        def flip(name: bytes = name, token: int = token) -> None:
            rows[name][(HEADS * B + token) * SIZE * 4 + 3] ^= 0x40  # the exponent of a number of V, which becomes huge

        if answer(hand_over(instance(), instance(), prompt, flip)) == tokens:
            kept.append(name)
    assert len(tails) - len(kept) == -(-len(prompt) // B) - (len(prompt) - WINDOW) // B, "all that decode loads"


@with_windows
def test_another_turn_and_a_sibling_compute_what_is_new(instance: Instance, expected: Expected) -> None:
    """On an instance that has seen nothing of the first turn."""
    first = PROMPTS[330]
    job = hand_over(instance(), instance(store_generated="on"), first)
    more = [*range(20)]
    for prompt in ([*first, *answer(job), *more], [*first, *more]):
        fresh = instance()
        fresh.submit(pb.BOTH, prompt, TOKENS)
        run(fresh, lambda fresh=fresh: len(fresh.context.closed) == 1)  # type: ignore[misc]
        (there,) = fresh.context.closed
        assert answer(there) == expected(prompt, TOKENS)
        sources = there.prompt_sources()
        assert sources["computed"] <= 52 and sources["loaded"] == len(prompt) - sources["computed"]


@with_windows
@pytest.mark.parametrize("lost", ["the first reached", "the last full", "of all tokens"])
def test_a_prompt_of_which_a_block_is_lost_is_computed(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], lost: str
) -> None:
    prompt, decode, prefill = PROMPTS[330], instance(), instance()
    keys = prefill.engine.new_sequence("", prompt, SamplingParams(max_tokens=1)).kv.full_keys()
    windows = [key for key in keys]

    def lose() -> None:
        tails = [name for name in rows if len(name) > 16]
        reached = sorted(tails, key=lambda name: windows.index(name[:16]) if name[:16] in windows else len(windows))
        del rows[{"the first reached": reached[-4], "the last full": reached[-2]}.get(lost, keys[5])]

    job = hand_over(prefill, decode, prompt, lose)
    assert answer(job) == expected(prompt, TOKENS)
    assert job.prompt_sources()["computed"] > 0
    decode.check_nothing_is_held()


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"], indirect=True)
def test_prompts_that_do_not_fit_together_wait_for_each_other(instance: Instance, expected: Expected) -> None:
    """A pool of hardly more than one prompt, on prefill and on decode, which holds many at once once they are computed."""
    prompts = [[(i * i + k * i) % 250 for i in range(330)] for k in range(3, 9)]
    both = instance(num_blocks=23)
    jobs = [both.submit(pb.BOTH, prompt, TOKENS) for prompt in prompts]
    run(both, lambda: all(job.ended for job in jobs))
    assert [answer(job) for job in jobs] == [expected(prompt, TOKENS) for prompt in prompts]
    both.check_nothing_is_held()


@pytest.fixture
def odd(instance: Instance) -> Any:
    """An instance of a model with a window that is no multiple of the block size."""
    runner = hash_model.HashRunner(hash_model.spec_of((None, 5)), 4, 64, 0, frozenset(), 1.0)
    made = instance(runner=runner, block_size=4)
    runner.is_warm = True
    return made


def test_a_prompt_in_the_pool_is_whole_although_its_last_token_is_computed_again(odd: Any) -> None:
    """Prefill has failed before the first token, whose logits are needed: the token before attends to a block more."""
    prompt, sampling = [*range(8)], SamplingParams(max_tokens=9, ignore_eos=True)
    odd.submit(pb.BOTH, prompt, 1)
    odd.run()
    jobs = odd.submit_choices(pb.DECODE, prompt, sampling, 2)
    give_up_prefill(odd, jobs)
    assert [answer(job) for job in jobs] == [hash_model.answer(prompt, sampling, seed, frozenset()) for seed in (0, 1)]


def test_choices_of_a_prompt_of_which_nothing_was_loaded_share_nothing(odd: Any) -> None:
    prompt, sampling = [*range(5)], SamplingParams(max_tokens=9, ignore_eos=True)
    jobs = odd.submit_choices(pb.DECODE, prompt, sampling, 9)  # the last ones find what the others have computed
    odd.decoder.hand_over(jobs[0], pb.HandOver(num_blocks=2))
    odd.step()
    odd.end(good=0)
    give_up_prefill(odd, jobs)
    right = [hash_model.answer(prompt, sampling, seed, frozenset()) for seed in range(9)]
    assert [answer(job) for job in jobs] == right
    odd.check_nothing_is_held()


def give_up_prefill(one: Any, jobs: list[Any]) -> None:
    """Have decode compute what prefill has not stored."""
    for job in jobs:
        one.decoder.hand_over(job, pb.HandOver(final=True))
    run(one, lambda: all(job.ended for job in jobs))
