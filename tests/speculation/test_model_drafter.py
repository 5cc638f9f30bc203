"""Drafts of a model, whatever computes it: how many steps it takes where drafts pay, and where they do not."""

import random
from collections.abc import Mapping

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.keys import Tokens
from pdserve.speculation.model_drafter import CATCH_UP_TOKENS, PROBE_STEPS, ModelDrafter
from tests.paced_engine import Answers, Clock, Played, make_engine, play

COSTS = Costs(prefill=(0.0, 1e-4, 0.0), decode=(0.02, 1e-4, 0.0))
STEP_S = 0.002  # of the draft model
LENGTH = 600  # tokens of an answer


class Guessing(ModelDrafter):
    """Knows the answers, but for a share of the tokens, which are wrong at random."""

    def __init__(self, scheduler: Scheduler, clock: Clock, answers: Answers, share: float, step_s: float) -> None:
        config = EngineConfig(model="model", speculate="draft", speculative_model="small")
        super().__init__(config, scheduler, 4000, 8000, clock)
        self._clock, self._answers, self._share, self._step_s = clock, answers, share, step_s
        self._drawn = random.Random(1)
        self.works: list[list[int]] = []  # of each of its steps, the tokens of each sequence

    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        self.works.append([*map(len, new.values())])
        self._clock.take(self._step_s)
        for seq, tokens in new.items():
            self.followed[seq].compute(len(tokens))
        return [self._guess(seq) for seq in drafting]

    def _guess(self, seq: Sequence) -> int:
        at, answer = seq.output.num_generated, self._answers[seq.request_id]
        is_right = self._drawn.random() < self._share and at < len(answer)
        return answer[at] if is_right else 99_999


def run(
    share: float, streams: int = 1, step_s: float = STEP_S, prompt: int = 20, itl_target: float | None = None
) -> tuple[Guessing, Played]:
    """Answer requests, all at once, with drafts of which this share is right."""
    drawn = random.Random(2)
    prompts = {str(number): [number + 1] * prompt for number in range(streams)}
    answers = {name: [drawn.randrange(30_000) for _ in range(LENGTH)] for name in prompts}
    clock = Clock()
    engine = make_engine(COSTS, answers, clock)
    engine.scheduler.itl_target = itl_target
    drafter = engine.drafter = Guessing(engine.scheduler, clock, answers, share, step_s)
    return drafter, play(engine, clock, prompts, answers, streams)


@pytest.mark.parametrize("streams", [1, 8, 32])
def test_wrong_drafts_cease_and_are_tried_again_rarely(streams: int) -> None:
    """With `auto` and drafts that are all wrong, the draft model computes few steps, which take little time."""
    drafter, played = run(0.0, streams)
    probes = len(played.tokens) / (PROBE_STEPS + 1)
    assert probes - 1 <= len(drafter.works) <= probes + 12, "some until they have proved wrong"
    assert not any(accepted for _, accepted in played.drafts)
    without = LENGTH * COSTS.step_seconds(streams, 0)
    assert played.seconds < 1.03 * without


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_drafts_that_are_seldom_right_are_seldom_computed(share: float) -> None:
    drafter, played = run(share, 8)
    assert len(drafter.works) < 0.1 * len(played.tokens)


def test_a_model_as_slow_as_the_other_one_is_tried_rarely() -> None:
    drafter, played = run(1.0, 4, step_s=0.05)
    assert len(drafter.works) <= len(played.tokens) / PROBE_STEPS + 2


def test_drafts_that_become_right_are_computed_again() -> None:
    """Each probe is recorded, so a text that the model knows is found out within some hundred steps."""
    drafter, played = run(0.9)
    assert played.seconds < 0.5 * LENGTH * COSTS.step_seconds(1, 0)
    assert sum(accepted for _, accepted in played.drafts) > 0.6 * LENGTH
    assert max(map(len, drafter.works)) == 1


@pytest.mark.parametrize(("more_s", "most"), [(0.0, 0), (3 * STEP_S, 2), (1.0, 8)])
def test_steps_with_drafts_are_not_longer_than_the_itl_target(more_s: float, most: int) -> None:
    """A draft takes a step of the draft model, and a row."""
    _, played = run(1.0, itl_target=COSTS.step_seconds(1, 0) + more_s)
    lengths = [drafted for drafted, _ in played.drafts[1:]]  # before the first one, its time is not known
    assert max(lengths, default=0) == most


def test_prompts_are_computed_a_few_tokens_at_a_time_and_only_for_drafts() -> None:
    drafter, _ = run(0.9, 2, prompt=3 * CATCH_UP_TOKENS)
    behind = [max(work) for work in drafter.works[:6]]
    assert max(map(sum, drafter.works)) <= CATCH_UP_TOKENS + 2 and behind[0] == CATCH_UP_TOKENS
    wrong, _ = run(0.0, 2, prompt=3 * CATCH_UP_TOKENS)
    assert sum(map(sum, wrong.works)) < 1.2 * sum(map(sum, drafter.works))
