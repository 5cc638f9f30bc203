"""Drafts of a simulated instance that speculates: as many tokens as pay by its cost model, a given share of them right."""

import random
from collections.abc import Mapping

from pdserve.engine.paced_runner import next_token
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.speculation.lengths import Step, worthwhile


class SimulatedDrafter(Drafter):
    """Proposes tokens of which each is right with a chance that its traffic has, if those before it are.

    Args:
        shares: the chance, by request id.
        most: tokens of a draft.
    """

    def __init__(self, scheduler: Scheduler, shares: Mapping[str, float], most: int) -> None:
        self._scheduler, self._shares, self._most = scheduler, shares, most
        self._drawn = random.Random(0)

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        shares = {
            seq: self._shares.get(seq.request_id.partition("#")[0], 0.0)
            for seq in plan.counts
            if plan.takes_drafts(seq)
        }
        step = Step.forecast(plan.counts, self._scheduler.costs, self._scheduler.itl_target, lambda rows: 0.0)
        expected = {
            seq: [share**ahead for ahead in range(1, self._most + 1)]
            for seq, share in shares.items()
            if share > step.least_chance
        }
        lengths = worthwhile(step, expected) if expected else {}
        return {seq: self._draft(seq, length, shares[seq]) for seq, length in lengths.items()}

    def _draft(self, seq: Sequence, length: int, share: float) -> list[int]:
        tokens = [next_token(len(seq) + ahead) for ahead in range(length)]
        return [token if self._drawn.random() < share else token + 1 for token in tokens]
