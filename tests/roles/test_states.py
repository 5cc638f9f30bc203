"""Recurrent layers: one state crosses, and later prompts find states only where they are kept, at exactly their tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from tests.roles.pair import TOKENS, alone, answer, compute, hand_over, run, take_over

B = 16
PROMPTS = {n: [(i * i + 3 * i) % 250 for i in range(n)] for n in (330, 320, 16, 5)}
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]
with_states = pytest.mark.parametrize("architecture", ["lfm2", "qwen3_next"], indirect=True)
with_a_state = pytest.mark.parametrize("architecture", ["qwen3_next"], indirect=True)


def states(rows: dict[bytes, Any]) -> list[bytes]:
    return [name for name in rows if len(name) > 16]


@with_states
@pytest.mark.parametrize("num_tokens", PROMPTS)
def test_the_hand_over_moves_one_state(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], num_tokens: int
) -> None:
    prompt, prefill, decode = PROMPTS[num_tokens], instance(), instance()
    full, state = (group.block_bytes for group in prefill.engine.layout.groups)
    assert state % full == 0, "whole pages"
    stored: list[int] = []
    job = hand_over(prefill, decode, prompt, lambda: stored.append(len(states(rows))), multi_turn=False)
    assert answer(job) == expected(prompt, TOKENS)
    assert job.prompt_sources() == {"computed": 0, "local_hit": 0, "loaded": num_tokens, "unneeded": 0}
    assert job.transferred_blocks == -(-num_tokens // B) and job.tail_bytes == state and stored == [1]
    prefill.check_nothing_is_held()
    decode.check_nothing_is_held()


@with_a_state
def test_a_sequence_holds_three_states_at_most(instance: Instance, expected: Expected) -> None:
    one, prompt, held = instance(), PROMPTS[330], list[int]()
    job = one.submit(pb.BOTH, prompt, 3 * TOKENS)
    while not job.ended:
        run(one, lambda: True)
        held += [len(tail.held_blocks) for tail in job.seq.kv.tails]
    assert answer(job) == expected(prompt, 3 * TOKENS) and set(held[:2]) == {1} and 2 <= max(held) <= 3


@with_states
def test_each_part_of_a_state_that_crosses_matters(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    """One byte of a layer's state in the store is another one: the answer is another one."""
    prompt, tokens, prefill = PROMPTS[330], expected(PROMPTS[330], TOKENS), instance()
    message, spec = compute(prefill, prompt, multi_turn=False), prefill.engine.checkpoint.spec
    clean = {name: row.copy() for name, row in rows.items()}
    assert answer(take_over(instance(), prompt, message, multi_turn=False)) == tokens
    for key, first in spec.state_offsets.items():
        wrong = []
        for bits in (
            0x40,
            0xC0,
        ):  # exponent and sign: a number becomes huge, and what is negative may be silenced behind it
            rows.clear()
            rows.update({name: row.copy() for name, row in clean.items()})
            (name,) = states(rows)
            numbers = abs(rows[name].view("float32")[first : first + spec.states[key]])
            rows[name][(first + int(numbers.argmin())) * 4 + 3] ^= bits
            wrong.append(answer(take_over(instance(), prompt, message, multi_turn=False)) != tokens)
        assert any(wrong), key


@with_a_state
def test_the_next_turn_hits_where_the_answer_was_computed(instance: Instance, expected: Expected) -> None:
    one, prompt = instance(num_blocks=100), PROMPTS[330]
    first = alone(one, prompt)
    for other in ([*prompt, *answer(first), *range(20)], prompt):
        job = alone(one, other)
        assert answer(job) == expected(other, TOKENS)
        assert job.prompt_sources()["computed"] <= 52 and job.prompt_sources()["loaded"] == 0
    one.check_nothing_is_held()


@with_a_state
def test_a_state_is_found_at_its_own_tokens_only(
    instance: Instance, expected: Expected, rows: dict[bytes, Any]
) -> None:
    """That at 364 is none for the first 352 or 368 of 400."""
    long = [(i * i + 3 * i) % 250 for i in range(400)]
    hand_over(instance(), instance(), long[:364], multi_turn=False)
    assert len(states(rows)) == 1 and len(rows) == 1 + 23
    job = alone(instance(), long)
    assert answer(job) == expected(long, TOKENS)
    assert job.prompt_sources()["computed"] == 400


@with_a_state
@pytest.mark.parametrize("lost", ["the state", "a block"])
def test_a_prompt_of_which_something_is_lost_is_computed(
    instance: Instance, expected: Expected, rows: dict[bytes, Any], lost: str
) -> None:
    prompt, decode = PROMPTS[330], instance()

    def lose() -> None:
        del rows[states(rows)[0] if lost == "the state" else next(iter(rows))]

    job = hand_over(instance(), decode, prompt, lose, multi_turn=False)
    assert answer(job) == expected(prompt, TOKENS) and job.prompt_sources()["computed"] == len(prompt)
    decode.check_nothing_is_held()


@with_a_state
@pytest.mark.parametrize("num_tokens", [330, 320])
def test_prefill_that_fails_before_the_first_token(instance: Instance, expected: Expected, num_tokens: int) -> None:
    """All is stored, but the state has the last token already, which would have to be computed again."""
    prompt, prefill, decode = PROMPTS[num_tokens], instance(), instance()
    there, here = prefill.submit(pb.PREFILL, prompt, TOKENS), decode.submit(pb.DECODE, prompt, TOKENS)
    run(prefill, lambda: there in prefill.context.closed)
    decode.decoder.hand_over(here, pb.HandOver(num_blocks=-(-num_tokens // B), final=True))
    run(decode, lambda: here.ended)
    assert answer(here) == expected(prompt, TOKENS)
    decode.check_nothing_is_held()


@pytest.mark.parametrize("architecture", ["qwen3_next", "gemma3_mixed"], indirect=True)
@pytest.mark.parametrize("num_tokens", [330, 320])
def test_choices_go_on_from_one_state_or_window(instance: Instance, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    prompt, answers = PROMPTS[num_tokens], list[list[list[int]]]()
    for others in (2, 0):
        one = instance()
        jobs = one.submit_choices(pb.BOTH, prompt, sampling, 3) if others else []
        for i in () if others else range(3):
            jobs += one.submit_choices(
                pb.BOTH, prompt, SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5 + i, ignore_eos=True), 1
            )
        run(one, lambda jobs=jobs: all(job.ended for job in jobs))  # type: ignore[misc]
        answers.append([answer(job) for job in jobs])
        one.check_nothing_is_held()
    assert answers[0] == answers[1] and len({tuple(one) for one in answers[0]}) == 3


@with_a_state
def test_prompts_that_do_not_fit_together_wait_for_each_other(instance: Instance, expected: Expected) -> None:
    prompts = [[(i * i + k * i) % 250 for i in range(330)] for k in range(3, 7)]
    both = instance(num_blocks=23)
    jobs = [both.submit(pb.BOTH, prompt, TOKENS) for prompt in prompts]
    run(both, lambda: all(job.ended for job in jobs))
    assert [answer(job) for job in jobs] == [expected(prompt, TOKENS) for prompt in prompts]
    both.check_nothing_is_held()
