"""Times the steps of a draft model while it drafts for sequences of an engine, and what proposals take besides."""

import statistics
from collections.abc import Callable

from pdserve.costs import Work
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.profile.fit import fit_steps, least_squares
from pdserve.profile.profile import DraftFacts, Residuals
from pdserve.request import Request, SamplingParams
from pdserve.speculation.model_drafter import ModelDrafter
from pdserve.tools.profiling.steps import clock_of

STEPS = 12  # of the engine, in which all sequences of a batch have drafts
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 4096  # of the prompts of a batch, which a draft model computes a few at a time


def time_drafts(
    engine: Engine, drafter: ModelDrafter, model: str, repeat: int, show: Callable[[str], None]
) -> tuple[DraftFacts, dict[str, Residuals]]:
    """Return what the drafts of an engine take, and the residuals by kind of step.

    Args:
        drafter: of the engine, with a fixed length.
        model: from which it is.
        repeat: rounds over all batches. Of steps with the same work, the median counts.

    Raises:
        SetupError: there is no room for drafts.
    """
    drafter.now = clock_of(engine)
    timer, longest = _Timer(engine, drafter), min(engine.max_model_len, drafter.context_length)
    for turn in range(repeat):
        for size in sorted({min(one, engine.scheduler.max_num_seqs) for one in BATCHES}):
            for prompt in sorted({max(1, min(longest // part, MOST_TOKENS // size)) for part in (8, 2)}):
                show(f"drafts: round {turn + 1} of {repeat}, {size} sequences of {prompt} tokens")
                timer.run([_sequence(engine, number, prompt, str(turn)) for number in range(size)])
    drafter.on_step = None
    try:
        step, residuals = fit_steps([(work, statistics.median(times)) for work, times in timer.steps.items()])
    except ValueError as error:
        raise SetupError(f"--speculate draft: the limits of the engine leave {error} of the draft model") from None
    around = {size: max(1e-9, statistics.median(times)) for size, times in timer.around.items()}
    step_s, sequence_s = least_squares([[1.0, size] for size in around], [*around.values()], {0, 1})
    facts = DraftFacts(model, step, drafter.pool.num_blocks, drafter.context_length, step_s, sequence_s)
    return facts, {f"draft model, {kind}": one for kind, one in residuals.items()}


def _sequence(engine: Engine, number: int, prompt: int, salt: str) -> Sequence:
    sampling = SamplingParams(temperature=0, max_tokens=engine.max_model_len - prompt, ignore_eos=True)
    return engine.new_sequence(str(number), Request(prompt=[number + 1] * prompt, sampling=sampling, salt=salt))


class _Timer:
    """Collects the times of drafts.

    Attributes:
        steps: of the draft model, by their work.
        around: what else proposals took, by the number of sequences, all of which had drafts.
    """

    def __init__(self, engine: Engine, drafter: ModelDrafter) -> None:
        self.steps: dict[tuple[tuple[int, int], ...], list[float]] = {}
        self.around: dict[int, list[float]] = {}
        self._engine, self._drafter, self._inside = engine, drafter, 0.0
        drafter.on_step = self._add

    def _add(self, work: Work, seconds: float) -> None:
        self.steps.setdefault(tuple(work), []).append(seconds)
        self._inside += seconds

    def run(self, seqs: list[Sequence]) -> None:
        """Run some sequences until enough steps had drafts of all, or one is over."""
        for seq in seqs:
            self._engine.add(seq)
        drafted, is_over = 0, False
        while drafted < STEPS and not is_over:
            self._inside = 0.0
            result = self._engine.step()
            if len(result.drafted) == len(seqs):
                drafted += 1
                self.around.setdefault(len(seqs), []).append(self._drafter.seconds - self._inside)
            is_over = any(accepted.finish_reason for accepted in result.outcome.values())
        for seq in seqs:
            self._engine.remove(seq)
