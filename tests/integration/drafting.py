"""Starts an instance that proposes for each request what its id says: `12-suffix-4`, request 12, suffix, length 4.

    python drafting.py ANSWERS.json exact decode --router … --speculate off

The answers are tokens by number of the request and choice (`12.0`), which only some proposers know; a draft model is beside
them. In place of `exact`, `mutant` accepts one wrong token.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sampler import SampledRow
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepOutcome, StepPlan
from pdserve.speculation.draft_model import DraftModel
from pdserve.speculation.speculator import Speculator

ID = re.compile(r"(?P<number>\d+)-(?P<proposer>[a-z]+)-(?P<length>auto|\d+)(-(?P<choice>\d+))?")
MOST = 16


class Mixed(Drafter):
    """Proposes for each sequence as its request asks."""

    followed: set[Sequence]

    def __init__(self, engine: Engine, config: EngineConfig, answers: Path) -> None:
        self.followed = set()
        self._answers: dict[str, list[int]] = json.loads(answers.read_text())
        self._speculators: dict[str, Speculator | DraftModel] = {
            name: Speculator(
                EngineConfig(speculate=name, speculative_tokens=MOST), engine.scheduler, engine.extra_seconds
            )
            for name in ("ngram", "suffix", "auto")
        }
        drafting = replace(config, speculate="draft", speculative_model=str(answers.with_name("draft")))
        runner: Any = engine.runner
        self._speculators["draft"] = DraftModel(replace(drafting, speculative_tokens=MOST), engine.scheduler, runner)

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        asked = {seq: found for seq in plan.counts if (found := ID.search(seq.request_id))}
        self.followed |= asked.keys()
        proposed = dict[Sequence, list[int]]()
        for name, speculator in self._speculators.items():
            part = StepPlan({seq: plan.counts[seq] for seq, found in asked.items() if found["proposer"] == name})
            proposed |= speculator.propose(part)
        for seq, found in asked.items():
            if found["proposer"] in ("random", "oracle", "erring") and plan.takes_drafts(seq):
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

    known = Path(sys.argv.pop(1))
    if sys.argv.pop(1) == "mutant":
        accept_one_wrong()
    make = Engine.__init__

    def make_mixed(engine: Engine, config: EngineConfig, *args: Any, **settings: Any) -> None:
        make(engine, config, *args, **settings)
        engine.drafter = Mixed(engine, config, known)

    setattr(Engine, "__init__", make_mixed)  # noqa: B010
    main()
