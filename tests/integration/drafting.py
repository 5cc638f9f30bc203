"""Starts an instance that proposes for each request what its id says: `12-suffix-4`, request 12, suffix, length 4.

    python drafting.py ANSWERS.json exact decode --router … --speculate off

The answers are tokens by number of the request and choice (`12.0`), which only some proposers know. In place of `exact`,
`mutant` accepts one wrong token.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sampler import SampledRow
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepOutcome, StepPlan
from pdserve.speculation.speculator import Speculator

ID = re.compile(r"(?P<number>\d+)-(?P<proposer>[a-z]+)-(?P<length>auto|\d+)(-(?P<choice>\d+))?")
MOST = 16


class Mixed(Drafter):
    """Proposes for each sequence as its request asks."""

    followed: set[Sequence]

    def __init__(self, engine: Engine, answers: dict[str, list[int]]) -> None:
        self.followed = set()
        self._answers = answers
        self._speculators = {
            name: Speculator(
                EngineConfig(speculate=name, speculative_tokens=MOST), engine.scheduler, engine.extra_seconds
            )
            for name in ("ngram", "suffix", "auto")
        }

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        asked = {seq: found for seq in plan.counts if (found := ID.search(seq.request_id))}
        self.followed |= asked.keys()
        proposed = dict[Sequence, list[int]]()
        for name, speculator in self._speculators.items():
            part = StepPlan({seq: plan.counts[seq] for seq, found in asked.items() if found["proposer"] == name})
            proposed |= speculator.propose(part)
        for seq, found in asked.items():
            if found["proposer"] in ("random", "oracle", "erring") and seq.takes_drafts:
                proposed[seq] = self._known(seq, f"{found['number']}.{found['choice'] or 0}", found["proposer"])
        return {seq: drafts[: _length(seq, asked[seq]["length"])] for seq, drafts in proposed.items()}

    def _known(self, seq: Sequence, name: str, proposer: str) -> list[int]:
        at = seq.output.num_generated
        if proposer == "random":
            return [(at * 31 + i * 17) % 60 for i in range(MOST)]
        drafts = self._answers.get(name, [])[at : at + MOST]
        if proposer == "erring" and drafts:
            drafts[at % len(drafts)] ^= 1
        return drafts

    def end(self, seq: Sequence) -> None:
        self.followed.discard(seq)
        for speculator in self._speculators.values():
            if seq in speculator.followed:
                speculator.end(seq)


def _length(seq: Sequence, asked: str) -> int:
    return seq.output.num_generated * 7 % (MOST + 1) if asked == "auto" else int(asked)


def accept_one_wrong() -> None:
    """Have the first wrong draft accepted."""
    right = StepPlan.outcome

    def wrong(plan: StepPlan, sampled: Iterable[SampledRow]) -> StepOutcome:
        outcome = right(plan, sampled)
        for seq, accepted in outcome.items():
            if seq in plan.drafts and len(accepted.tokens) <= len(plan.drafts[seq]) and not seq.features:
                accepted.tokens[-1] = plan.drafts[seq][len(accepted.tokens) - 1]
                setattr(StepPlan, "outcome", right)  # noqa: B010 - mypy takes no assignment to a method
                break
        return outcome

    setattr(StepPlan, "outcome", wrong)  # noqa: B010


if __name__ == "__main__":
    from pdserve.__main__ import main

    known = json.loads(Path(sys.argv.pop(1)).read_text())
    if sys.argv.pop(1) == "mutant":
        accept_one_wrong()
    make = Engine.__init__

    def make_mixed(engine: Engine, *args: Any, **settings: Any) -> None:
        make(engine, *args, **settings)
        engine.drafter = Mixed(engine, known)

    setattr(Engine, "__init__", make_mixed)  # noqa: B010
    main()
