"""Drafts of a simulated instance that speculates: as many tokens as pay by its cost model, a given share of them right."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdserve.config import EngineConfig
from pdserve.engine.paced_runner import next_token
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.instance.instance import Instance
from pdserve.keys import Tokens
from pdserve.profile.profile import DraftFacts
from pdserve.speculation.answers import LEAST
from pdserve.speculation.lengths import Step, worthwhile
from pdserve.speculation.matches import LEVELS
from pdserve.speculation.model_drafter import ModelDrafter
from pdserve.tools.bench.server import acceptance

COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


class Draws:
    """Draws whether tokens are right, with a chance that their traffic has.

    Args:
        shares: the chance of a token behind right ones, by request id.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares, self._random = shares, random.Random(0)

    def share(self, seq: Sequence) -> float:
        """Return the chance of a sequence."""
        return self._shares.get(seq.request_id.partition("#")[0], 0.0)

    def is_right(self, seq: Sequence) -> bool:
        return self._random.random() < self.share(seq)

    def token(self, seq: Sequence, ahead: int = 0) -> int:
        """Return what is proposed to follow a sequence and `ahead` tokens more."""
        return next_token(len(seq) + ahead) + (not self.is_right(seq))


@dataclass(slots=True)
class _Text:
    """A text that a sequence follows.

    Attributes:
        run: of its last tokens, how many are as there.
        seen: how many tokens it had.
        drafted: how many were proposed then.
    """

    run: int = 0
    seen: int = 0
    drafted: int = 0


class SimulatedDrafter(Drafter):
    """Proposes drafts as the n-gram and suffix proposers find them in texts: each token is right with the chance of its
    traffic. After a wrong one, nothing is proposed until as many tokens as a match needs have followed the text.

    Args:
        most: tokens of a draft.
    """

    def __init__(self, scheduler: Scheduler, draws: Draws, most: int) -> None:
        self.followed: dict[Sequence, _Text] = {}
        self._scheduler, self._draws, self._most = scheduler, draws, most

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        step = Step.forecast(plan.counts, self._scheduler.costs, self._scheduler.itl_target, lambda rows: 0.0)
        expected = {
            seq: [share**ahead for ahead in range(1, self._most + 1)]
            for seq in plan.counts
            if plan.takes_drafts(seq) and self._is_found(seq) and (share := self._draws.share(seq)) > step.least_chance
        }
        lengths = worthwhile(step, expected) if expected else {}
        for seq, length in lengths.items():
            self.followed[seq].drafted = length
        return {seq: [self._draws.token(seq, ahead) for ahead in range(length)] for seq, length in lengths.items()}

    def end(self, seq: Sequence) -> None:
        del self.followed[seq]

    def _is_found(self, seq: Sequence) -> bool:
        """Return whether a sequence's last tokens are as in the text."""
        text = self.followed.setdefault(seq, _Text(seen=len(seq)))
        accepted = len(seq) - text.seen - 1
        if accepted < text.drafted:  # the next one was wrong
            text.run = 0
        elif accepted >= 0:
            text.run = text.run + accepted + 1 if self._draws.is_right(seq) else 0
        text.seen, text.drafted = len(seq), 0
        return text.run >= LEVELS[0] and seq.output.num_generated >= LEAST


class SimulatedDraftModel(ModelDrafter):
    """Proposes what a draft model samples, whose steps only take time.

    Args:
        facts: of the draft model.
        now: the time of the instance.
        take: lets a duration pass there.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        draws: Draws,
        facts: DraftFacts,
        now: Callable[[], float],
        take: Callable[[float], None],
    ) -> None:
        config = replace(config, speculate="draft", speculative_model=facts.model)
        super().__init__(config, scheduler, facts.num_blocks, facts.max_model_len, now)
        self._draws, self._facts, self._take = draws, facts, take

    def _propose(self, plan: StepPlan) -> dict[Sequence, list[int]]:
        if takers := sum(map(plan.takes_drafts, plan.counts)):
            self._take(self._facts.engine_step_s + self._facts.engine_sequence_s * takers)
        return super()._propose(plan)

    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        self._take(self._facts.step.seconds(self.work(new, drafting)))
        for seq, tokens in new.items():
            self.followed[seq].compute(len(tokens))
        return [self._draws.token(seq) for seq in drafting]


def draft_figures(busy: Mapping[Instance, float]) -> dict[str, Any]:
    """Return what became of the drafts of some instances, under vLLM's names, and which share of the time in steps a draft
    model took where it drafted; empty if there were none.

    Args:
        busy: seconds of each in steps.
    """
    counts, seconds = Counter[str](), dict[Instance, float]()
    for one in busy:
        counts.update({name: int(one.reporter.counts.get(f"spec_decode_num_{name}", 0)) for name in COUNTED})
        drafter = one.engine.drafter
        seconds[one] = 0.0 if drafter is None else drafter.counters.get("spec_decode_draft_seconds", 0.0)
    total = sum(busy[one] for one in busy if seconds[one])
    share = {"spec_decode_draft_time_fraction": sum(seconds.values()) / total} if total else {}
    return (acceptance(Counter(), counts) or {}) | share
