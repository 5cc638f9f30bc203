"""Choices of one prompt: it is computed, stored and loaded once, and each choice has the tokens of a request of its own."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from pdserve.output import Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams

PROMPTS = {"partial last block": [i % 90 for i in range(70)], "full last block": [i % 90 for i in range(64)]}
SAMPLING = SamplingParams(max_tokens=20, temperature=1.5, seed=7, ignore_eos=True)
N = 4
Instance = Callable[..., Any]


@pytest.fixture
def alone(instance: Instance) -> Callable[[list[int]], list[list[int]]]:
    """Return a function that gives the tokens of requests of their own with the choices' seeds."""

    def run(prompt: list[int]) -> list[list[int]]:
        one = instance()
        one.store.rows = {}
        seqs = []
        for i in range(N):
            sampling = structs.replace(SAMPLING, seed=SAMPLING.seed + i)
            seqs.append(one.submit_choices(pb.BOTH, prompt, sampling, 1)[0].seq)
        one.run()
        return [output(seq) for seq in seqs]

    return run


def output(seq: Any) -> list[int]:
    tokens: list[int] = seq.output.tokens[seq.output.num_prompt :].tolist()
    return tokens


def pass_on(prefill: Any, decode: Any, jobs: list[tuple[Any, Any]]) -> None:
    """Do what routers do with prefill's outputs."""
    for there, here in jobs:
        sent, there.output = there.output, None
        if sent is None or here.ended:
            continue
        stored = sent.stored or Stored()
        message = pb.HandOver(num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final)
        if sent.token_ids:
            message.first_token = sent.token_ids[0]
        decode.decoder.hand_over(here, message)
    decode.run_callbacks()


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("architecture", ["llama", "mistral"], indirect=True)
def test_one_instance_computes_the_prompt_once(
    instance: Instance, alone: Callable[[list[int]], list[list[int]]], prompt: list[int]
) -> None:
    both = instance(store_generated="on", num_blocks=24)
    jobs = both.submit_choices(pb.BOTH, prompt, SAMPLING, N)
    most = 0
    while both.step():
        most = max(most, both.engine.pool.num_held)
        both.end_all()
    both.end_all()
    tokens = [output(job.seq) for job in jobs]
    assert tokens == alone(prompt) and len(set(map(tuple, tokens))) == N
    assert [job.prompt_sources()["computed"] for job in jobs] == [len(prompt), 0, 0, 0]
    assert most <= 4 + 2 * N, "the full blocks of the prompt are shared"
    assert len(both.store.rows) == 4 + N * ((len(prompt) % 16 + SAMPLING.max_tokens - 1) // 16), "also in the store"
    both.check_nothing_is_held()


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("follows", [False, True])
def test_blocks_are_stored_and_loaded_once(
    instance: Instance, alone: Callable[[list[int]], list[list[int]]], prompt: list[int], follows: bool
) -> None:
    prefill, decode = instance(follows=follows), instance(follows=follows)
    pairs = [
        *zip(
            prefill.submit_choices(pb.PREFILL, prompt, SAMPLING, N),
            decode.submit_choices(pb.DECODE, prompt, SAMPLING, N),
            strict=True,
        )
    ]
    stored: list[bytes] = []
    loaded: list[bytes] = []
    for _ in range(200):
        prefill.step()
        while prefill.store.active:
            stored += prefill.end().keys
        pass_on(prefill, decode, pairs)
        while decode.store.active:
            loaded += decode.end().keys
        decode.step()
    assert [output(here.seq) for _, here in pairs] == alone(prompt)
    assert stored == loaded == pairs[0][0].keys and decode.store.released == loaded
    assert [here.output.finish_reason for _, here in pairs] == ["length"] * N
    prefill.check_nothing_is_held()
    decode.check_nothing_is_held()


@pytest.mark.parametrize("crossed_by", ["the final report", "the router's cancellation"])
def test_leases_end_once_if_every_choice_ends_before_the_final_report(instance: Instance, crossed_by: str) -> None:
    """Another prompt may lease the same blocks. Whether decode gets the report is the router's to say."""
    prefill, decode = instance(follows=True), instance(follows=True)
    there = prefill.submit_choices(pb.PREFILL, PROMPTS["partial last block"], SAMPLING, N)
    here = decode.submit_choices(pb.DECODE, PROMPTS["partial last block"], SAMPLING, N)
    prefill.run()
    pass_on(prefill, decode, [*zip(there, here, strict=True)])
    prefill.end_all()
    decode.end_all()
    while not all(job.ended for job in here):
        decode.step()
    prefill.check_nothing_is_held()
    decode.check_nothing_is_held()
    assert not (decode.store.released or prefill.store.released)
    for i in 2 * [*range(N)]:
        name = there[i].seq.request_id
        if crossed_by == "the final report":
            decode.decoder.hand_over_late("router", pb.HandOver(request_id=name, num_blocks=5, final=True))
        else:
            prefill.prefiller.cancel_late("router", name)
    ended = [prefill.store.released, decode.store.released]
    keys = here[0].keys
    assert ended == ([[], keys] if crossed_by == "the final report" else [keys, []])


@pytest.mark.parametrize("which", [0, 2], ids=["the one that loads", "another one"])
def test_leases_last_until_the_prompt_is_loaded_if_a_choice_ends(instance: Instance, which: int) -> None:
    prefill, decode = instance(), instance()
    there = prefill.submit_choices(pb.PREFILL, PROMPTS["partial last block"], SAMPLING, N)
    here = decode.submit_choices(pb.DECODE, PROMPTS["partial last block"], SAMPLING, N)
    prefill.run()
    prefill.end_all()
    pass_on(prefill, decode, [*zip(there, here, strict=True)])
    assert decode.store.active
    decode.decoder.cancel(here[which])
    assert not decode.store.released, "one of them still reads the blocks"
    if which == 0:
        while decode.store.active:
            decode.end()
        assert not decode.store.released, "the next one is to load them"
        decode.decoder.reserve()
        assert decode.store.active
    decode.end_all()
    assert decode.store.released == here[0].keys
    decode.run()
    decode.check_nothing_is_held()


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 60))])
def test_any_choice_may_end_at_any_time(
    instance: Instance, alone: Callable[[list[int]], list[list[int]]], seed: int
) -> None:
    """On either side, while stores and loads are under way; prefill may also be lost. The others have their tokens."""
    rng = random.Random(seed)
    prompt = rng.choice([*PROMPTS.values()])
    prefill, decode = instance(follows=seed % 2 == 0), instance(follows=seed % 2 == 0, num_blocks=rng.choice([18, 64]))
    there = prefill.submit_choices(pb.PREFILL, prompt, SAMPLING, N)
    here = decode.submit_choices(pb.DECODE, prompt, SAMPLING, N)
    cancelled: set[int] = set()
    actions = 0
    is_lost = False
    while not all(job.ended for job in here):
        actions += 1
        assert actions < 5000
        which = rng.random()
        if which < 0.3 and not is_lost:
            prefill.step()
        elif which < 0.6:
            decode.step()
        elif which < 0.75 and not is_lost:
            if prefill.store.active:
                prefill.end(rng.randrange(len(prefill.store.active)), None if rng.random() < 0.9 else 0)
            pass_on(prefill, decode, [*zip(there, here, strict=True)])
        elif which < 0.9 and decode.store.active:
            decode.end(rng.randrange(len(decode.store.active)))
        elif which < 0.96 and len(cancelled) < N - 1 and rng.random() < 0.3:
            i = rng.randrange(N)
            cancelled.add(i)
            prefill.prefiller.cancel(there[i])
            decode.decoder.cancel(here[i])
        elif which > 0.99 and seed % 3 == 0 and not is_lost:
            is_lost = True
            for job in here:
                if not job.ended:
                    decode.decoder.hand_over(job, pb.HandOver(final=True))
    for job in there:
        prefill.prefiller.cancel(job)
    prefill.run()
    for one in (prefill, decode):
        one.end_all()
        one.check_nothing_is_held()
    # A prefill that was lost may be there, and then ends those of which decode was told too.
    released = decode.store.released + ([] if is_lost else prefill.store.released)
    assert len(released) == len({*released}), "another prompt may lease the same blocks"
    expected = alone(prompt)
    for i in set(range(N)) - cancelled:
        assert output(here[i].seq) == expected[i]


def test_choices_of_another_request_are_preempted_together(
    instance: Instance, alone: Callable[[list[int]], list[list[int]]]
) -> None:
    """Of two requests that do not fit into the pool beside each other, the later one gives way as a whole."""
    prompt = PROMPTS["partial last block"]
    one = instance(num_blocks=15)
    groups = [one.submit_choices(pb.BOTH, prompt, SAMPLING, N) for _ in range(2)]
    running = set()
    while one.step():
        now = one.engine.scheduler.running
        running.add(tuple(sum(job.seq in now for job in group) for group in groups))
    assert one.engine.scheduler.num_preemptions
    assert (N, N) in running and all({first, second} <= {0, 1, N} for first, second in running), "1 computes the prompt"
    for group in groups:
        assert [output(job.seq) for job in group] == alone(prompt)
    one.check_nothing_is_held()
