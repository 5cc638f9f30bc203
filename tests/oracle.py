"""An oracle in place of a drafter: it knows the answers to some prompts, and proposes one to three tokens of them.

Every fifth proposal ends with a wrong token. Run as a program, it starts an instance of which the engine uses it:

    python oracle.py ANSWERS.json decode --router …
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan


class Oracle(Drafter):
    """Implements `Drafter`. `answers` are (prompt, output) pairs."""

    def __init__(self, answers: Iterable[tuple[list[int], list[int]]]) -> None:
        self._answers = {tuple(prompt): output for prompt, output in answers}
        self.num_proposed = 0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        return {seq: self._drafts(seq) for seq in plan.counts if plan.takes_drafts(seq)}

    def _drafts(self, seq: Sequence) -> list[int]:
        answer = self._answers[tuple(seq.output.tokens[: seq.output.num_prompt])]
        drafts = answer[seq.output.num_generated : seq.output.num_generated + 1 + seq.output.num_generated % 3]
        if drafts and seq.output.num_generated % 5 == 0:
            drafts = [*drafts[:-1], drafts[-1] ^ 1]
        self.num_proposed += len(drafts)
        return drafts


if __name__ == "__main__":
    from pdserve.__main__ import main

    Engine.drafter = Oracle(json.loads(Path(sys.argv.pop(1)).read_text()))
    main()
