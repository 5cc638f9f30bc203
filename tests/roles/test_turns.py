"""Other turns and siblings of a prompt, with windows or states: every instance computes what is new, and little more."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.costs import Costs
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.request import Request, SamplingParams
from pdserve.router.scheduling.prefix_index import PrefixIndex
from tests.roles.pair import TOKENS, alone, answer, hand_over

EOS = 256  # of the checkpoints
MORE = [*range(20)]
SLOW = Costs(prefill=(0.01, 1.0, 0.0))  # so that all that is stored is loaded
Instance = Callable[..., Any]
Expected = Callable[[list[int], int], list[int]]
shapes = pytest.mark.parametrize(
    "architecture",
    [
        "gemma3_mixed",
        "qwen3_next",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "gemma4", "lfm2")),
    ],
    indirect=True,
)


def check(where: Any, prompt: list[int], expected: Expected, most: int, name: str) -> None:
    """Answer a prompt on an instance, which may compute only a limited number of its tokens."""
    where.engine.scheduler.costs = SLOW
    job = alone(where, prompt)
    sources = job.prompt_sources()
    assert answer(job) == expected(prompt, TOKENS)
    assert sources["computed"] <= most and sum(sources.values()) == len(prompt), name


@shapes
@pytest.mark.parametrize("max_tokens", [TOKENS, pytest.param(3, marks=pytest.mark.slow)])
def test_another_turn(instance: Instance, expected: Expected, max_tokens: int) -> None:
    """On the instance that computed the prompt, on the one that computed the answer, and on a third one."""
    prompt = [max_tokens, *((i * i + 3 * i) % 250 for i in range(330))]
    pair = instance(num_blocks=200), instance(num_blocks=200, store_generated="auto")
    job = hand_over(*pair, prompt, max_tokens=max_tokens)
    for other in ([*prompt, *answer(job), *MORE], [*prompt, *MORE], prompt):
        for name, where in (("P", pair[0]), ("D", pair[1]), ("neither", instance())):
            check(where, other, expected, 52, name)


@shapes
@pytest.mark.parametrize(
    "ends", [pytest.param([799], marks=pytest.mark.slow), [99, 199, 399, 799]], ids=["one message", "several"]
)
def test_a_sibling(instance: Instance, expected: Expected, ends: list[int]) -> None:
    """It shares 800 of 900 tokens, up to the end of a message that is followed by another one."""
    shared = [(i * i + 3 * i) % 250 for i in range(800)]
    for end in ends:
        shared[end] = EOS
    first, *others = ([*shared, *(k * i % 250 for i in range(96)), EOS, 1, 2, 3] for k in (7, 11, 13, 17))
    pair = instance(num_blocks=300), instance(num_blocks=300)
    hand_over(*pair, first, max_tokens=3)
    instances = {"P": pair[0], "D": pair[1], "neither": instance(num_blocks=300)}
    for (name, where), other in zip(instances.items(), others, strict=True):
        check(where, other, expected, 132, name)


@shapes
def test_a_router_forecasts_what_is_found(instance: Instance, expected: Expected) -> None:
    """In a pool that is too small for all prompts."""
    one, index, events = instance(num_blocks=70), PrefixIndex(), KVEventPublisher()
    one.engine.pool.listeners.append(events)
    pending, windows = events.subscribe(), [group.window for group in one.engine.layout.groups[1:]]
    shared, forecasts = [(i * i + 3 * i) % 250 for i in range(300)], list[int]()
    shared[99] = shared[199] = EOS
    for k, length in ((7, 300), (11, 300), (11, 250), (13, 200), (17, 90), (19, 250)):
        prompt = [*shared[:length], *(k * i % 250 for i in range(200))]
        removed, added = pending.pop_batch(10_000)
        index.update("one", b"".join(removed), b"".join(added))
        keys = one.engine.new_sequence("", Request(prompt=prompt, sampling=SamplingParams())).kv.full_keys()
        count = index.match(keys).get("one", 0)
        forecasts.append(index.usable("one", keys, count, windows, 16) * 16 if count else 0)
        assert alone(one, prompt).prompt_sources()["local_hit"] == forecasts[-1]
    assert max(forecasts) >= 192 and min(forecasts[1:]) < 192
