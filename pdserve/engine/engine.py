"""The engine: schedule, run, postprocess. One sequence is a prompt being continued; roles decide what happens around it."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from pdserve.config import EngineConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.checkpoint import Checkpoint, load
from pdserve.engine.grammar import Grammars
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.keys import root_key
from pdserve.request import LEVEL, SamplingParams


@dataclass
class StepResult:
    """What one step did.

    Attributes:
        advanced: sequences that have more KV than before.
        sampled: those of them that got a new token (appended to their tokens already).
        preempted: how many sequences lost their blocks.
        returned: sequences that have blocks again and wait for `add`: the store may have their KV.
        swapped_out, swapped_in: blocks copied to host memory, or from there.
        swap_seconds: what that took.
        work: (tokens computed, tokens before them) of each advanced sequence.
        held_back: sequences were left out that could have advanced.
    """

    advanced: list[Sequence] = field(default_factory=list)
    sampled: dict[Sequence, int] = field(default_factory=dict)
    preempted: int = 0
    returned: list[Sequence] = field(default_factory=list)
    swapped_out: int = 0
    swapped_in: int = 0
    swap_seconds: float = 0.0
    work: list[tuple[int, int]] = field(default_factory=list)
    held_back: bool = False

    @property
    def idle(self) -> bool:
        """Nothing could be done: the next step would do nothing either, until a block is freed or a request comes."""
        return not self.advanced and not self.preempted and not self.returned


class Engine:
    """One model, one pool. Not thread-safe: the engine thread owns it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None) -> None:
        """Loads `config.model` unless a checkpoint is given.

        Raises:
            SetupError: the model cannot be loaded, or there is no room for its KV.
        """
        self.checkpoint = checkpoint or load(config)
        self.runner = ModelRunner(self.checkpoint, config)
        self.pool = BlockPool(self.runner.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=self.runner.window,
            host=BlockPool(self.runner.num_places, config.block_size) if self.runner.num_places else None,
        )
        if config.itl_target_ms is not None:
            self.scheduler.itl_target = config.itl_target_ms / 1000
        self.max_model_len = _max_model_len(self.checkpoint, config, self.runner.num_blocks)
        self.layout = self.checkpoint.layout
        self._arrivals = itertools.count()
        self._grammars = Grammars(config.model, self.checkpoint.vocab_size, self.checkpoint.eos_token_ids)
        self._unready: list[Sequence] = []  # their grammars are still being compiled
        self.when_ready: Callable[[], None] = lambda: None  # called in other threads: a step may have more to do now
        self._level = LEVEL if config.scheduling_policy == "priority" else 0

    def new_sequence(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        salt: str = "",
        output: Tokens[int] = (),
        priority: int = 0,
    ) -> Sequence:
        """A sequence that is not queued yet. `output` is what another instance has generated of it already; `priority`,
        lower first, counts under that scheduling policy only.

        Raises:
            ValueError: it is empty, or could never fit.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) + sampling.max_tokens > self.max_model_len:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} output tokens are more than the "
                f"{self.max_model_len} that fit"
            )
        if min(prompt) < 0 or max(prompt) >= self.checkpoint.vocab_size:
            raise ValueError(f"token ids go from 0 to {self.checkpoint.vocab_size - 1}")
        stops = frozenset(sampling.stop_token_ids)
        constraint = self._grammars.start(sampling.grammar, lambda: self.when_ready()) if sampling.grammar else None
        return Sequence(
            constraint=constraint,
            rank=next(self._arrivals) + self._level * priority,
            request_id=request_id,
            tokens=[*prompt, *output],
            num_prompt=len(prompt),
            num_given=len(prompt) + len(output),
            sampling=sampling,
            root=root_key(weights=self.layout.weights, salt=salt),
            block_size=self.layout.block_size,
            stop_token_ids=stops if sampling.ignore_eos else stops | self.checkpoint.eos_token_ids,
        )

    @property
    def has_work(self) -> bool:
        return any(True for _ in self.scheduler.sequences())

    def add(self, seq: Sequence) -> None:
        if seq.constraint is not None and not seq.constraint.ready:
            self._unready.append(seq)
        else:
            self.scheduler.add(seq)

    def fork(self, seq: Sequence, request_id: str, sampling: SamplingParams) -> Sequence:
        """A sequence that goes on from where this one is, with parameters of its own. Their KV up to here is shared."""
        assert seq.constraint is None, "a grammar's state belongs to one sequence"
        return self.scheduler.fork(seq, request_id, sampling)

    def remove(self, seq: Sequence) -> None:
        """Drops a sequence, finished or not; its blocks lose this holder."""
        if seq in self._unready:
            self._unready.remove(seq)
        self.scheduler.remove(seq)

    def step(self, *, hold_back: bool = False) -> StepResult:
        """Schedule, run, postprocess. Whoever owns a finished sequence removes it. `hold_back` as in `schedule`."""
        unready, self._unready = self._unready, []
        for seq in unready:
            self.add(seq)
        schedule = self.scheduler.schedule(hold_back=hold_back)
        plan = schedule.tokens
        work = [(count, seq.num_computed) for seq, count in plan.items()]
        swap_seconds = self.runner.swap(schedule.swap_out, schedule.swap_in)
        self.runner.copy(schedule.copies)
        tokens = self.runner.step(plan)
        for seq, count in plan.items():
            seq.num_computed += count
            self.register_full_blocks(seq)
        for seq, token in tokens.items():
            seq.tokens.append(token)
        return StepResult(
            advanced=list(plan),
            sampled=tokens,
            preempted=len(schedule.preempted),
            returned=schedule.returned,
            swapped_out=len(schedule.swap_out),
            swapped_in=len(schedule.swap_in),
            swap_seconds=swap_seconds,
            work=work,
            held_back=schedule.held_back,
        )

    def register_full_blocks(self, seq: Sequence) -> None:
        """Makes the full blocks that a sequence has computed or loaded findable by others."""
        full = seq.num_computed // seq.block_size
        if full > seq.num_registered and seq.exact:
            keys = seq.full_keys()
            for i in range(seq.num_registered, full):
                self.pool.register(seq.block_ids[i], keys[i])
            seq.num_registered = full


def _max_model_len(checkpoint: Checkpoint, config: EngineConfig, num_blocks: int) -> int:
    """Tokens of the longest request: what the model, the flag and the pool all allow."""
    capacity = num_blocks * config.block_size
    asked = config.max_model_len
    if asked is not None and asked > checkpoint.context:
        raise SetupError(f"--max-model-len {asked} is more than the model's context of {checkpoint.context}")
    if asked is not None and asked > capacity:
        raise SetupError(f"--max-model-len {asked} does not fit into {num_blocks} blocks of {config.block_size} tokens")
    return min(asked or checkpoint.context, capacity)
