"""Models of whose layers some have a window: what of their KV crosses, and what a later prompt finds of it."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.instance import hash_model
from tests.roles.pair import TOKENS, answer, compute, hand_over, run, take_over

WINDOW, B = 48, 16
HEADS, SIZE = 2, 16  # of the layers with a window
PROMPTS = {n: [(i * i + 3 * i) % 250 for i in range(n)] for n in (330, 320, 40)}
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]
with_windows = pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "gemma4"], indirect=True)


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


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("ends", ["decode", "prefill"])
@pytest.mark.parametrize("multi_turn", [True, False])
def test_the_leases_of_each_group_end_of_what_was_stored_of_it(instance: Instance, ends: str, multi_turn: bool) -> None:
    """Another prompt may have leased the same key in another group."""
    prefill, decode, prompt = instance(), instance(), PROMPTS[330][:]
    for at in (70, 150):
        prompt[at] = min(prefill.engine.pool.message_ends)
    if ends == "decode":
        hand_over(prefill, decode, prompt, multi_turn=multi_turn)
    else:
        job = prefill.submit(pb.PREFILL, prompt, TOKENS, multi_turn=multi_turn)
        run(prefill, lambda: bool(job.output and job.output.token_ids))
        prefill.prefiller.cancel_late("router", job.seq.request_id)
    leased = [sorted(store.leased) for store in prefill.stores]
    ended = [sorted(store.released) for store in (decode if ends == "decode" else prefill).stores]
    assert ended == leased and len(leased[0]) == 21 > len(leased[1]) > 0


@with_windows
def test_each_byte_of_a_window_that_crosses_matters(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    """One byte of a window's block in the store is another one: the answer is another one."""
    prompt, kept, tokens = PROMPTS[330], list[bytes](), expected(PROMPTS[330], TOKENS)
    message = compute(instance(), prompt)
    clean = {name: row.copy() for name, row in rows.items()}
    job = take_over(instance(), prompt, message)
    assert answer(job) == tokens
    tails = [name for name in clean if len(name) > len(job.keys[0])]
    for name in tails:
        rows.clear()
        rows.update({other: row.copy() for other, row in clean.items()})
        token = B - 1 if name[:16] in job.seq.kv.full_keys()[: len(prompt) // B] else 0
        rows[name][(HEADS * B + token) * SIZE * 4 + 3] ^= 0x40  # the exponent of a number of V, which becomes huge
        if answer(take_over(instance(), prompt, message)) == tokens:
            kept.append(name)
    assert len(tails) - len(kept) == -(-len(prompt) // B) - (len(prompt) - WINDOW) // B, "all that decode loads"


@with_windows
@pytest.mark.parametrize("lost", ["the first reached", "the last full", "of all tokens"])
def test_a_prompt_of_which_a_block_is_lost_is_computed(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], lost: str
) -> None:
    prompt, decode, prefill = PROMPTS[330], instance(), instance()
    keys = prefill.engine.new_sequence("", Request(prompt=prompt, sampling=SamplingParams(max_tokens=1))).kv.full_keys()
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


def test_a_load_begins_behind_what_the_pool_has(odd: Any) -> None:
    """Others may read that, and a load that fails may leave anything: what the pool has of the windows no longer matters."""
    prompt, pool = [i % 40 for i in range(41)], odd.engine.pool
    keys = odd.submit(pb.PREFILL, prompt, 4).seq.kv.full_keys()
    odd.run()
    odd.end_all()
    taken = list[int]()
    while (count := len(pool.match(keys, 0, 40))) == 10:  # first, what windows have left behind is evicted
        taken += pool.allocate(1)
    pool.release(taken)
    assert count and not pool.match(keys), "without what is to come, its windows are not whole"
    odd.engine.scheduler.costs = Costs(prefill=(0.0, 1.0, 0.0))  # loading pays
    job = odd.submit(pb.BOTH, prompt, 3)
    assert odd.store.active[0].keys == keys[count:] and not any(map(pool.has_key, odd.store.active[0].blocks))
    odd.end()
    odd.run()
    assert answer(job) == hash_model.answer(prompt, job.seq.sampling, 0, frozenset())
    odd.check_nothing_is_held()


def give_up_prefill(one: Any, jobs: list[Any]) -> None:
    """Have decode compute what prefill has not stored."""
    for job in jobs:
        one.decoder.hand_over(job, pb.HandOver(final=True))
    run(one, lambda: all(job.ended for job in jobs))
