"""Draft model: the drafter of `--speculate draft`. A second, smaller model in this process samples what may follow.

It samples as the first one will: with the parameters of the request, penalties and biases included, and the noise of each
position. So a draft is right wherever the two models would draw the same token, and a model that drafts for itself is always
right. Only grammars, reasoning and plug-ins are left out, which have a state of their own.

Its KV is in a pool of its own. It is a function of a sequence's tokens, so nothing of it is handed over or migrates: an
instance computes it from the first token on that a sequence gets there, a few blocks of the prompt in each step, and proposes
nothing until that is done. Who gets no blocks, or no more, goes on without drafts.

Shape legend: see kernels/batch.py; V vocabulary.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import eq

import numpy as np
import torch

from pdserve.config import EngineConfig
from pdserve.counters import series
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.features import SHARED
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import BlockTable
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sampler import SampledTokens
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.errors import SetupError
from pdserve.keys import Tokens
from pdserve.model_path import model_folder
from pdserve.speculation.lengths import PREDICTED, Acceptance, Step, common_length
from pdserve.speculation.matches import continue_predicted

log = logging.getLogger(__name__)

CATCH_UP_TOKENS = 128  # of prompts in a step, together: the streams beside them wait for these
AT_ONCE = 2  # tokens behind the KV of a sequence that has drafted: after right drafts, the last of them and one more
POOL_SHARE = 0.25  # of the bytes of the instance's pool, at most; as many tokens as that holds, if they take less
FREE_SHARE = 0.5  # of what is free on a GPU, at most
PROBE_STEPS = 64  # where no drafts pay, one is computed that often
TIMED = 16  # steps of which the mean time counts, the latest most
MAX_RATIO = 4.0  # of a time to that mean: what lost the processor, or was recorded, counts no more
HAVE_STATE = {"grammar", "reasoning", "logits_processors"}  # what else changes logits is a function of the tokens alone
CHANGES = [(one, one.change) for one in SHARED if one.change is not None and not HAVE_STATE & {*one.fields}]


@dataclass(eq=False, slots=True)
class _DraftKV:
    """The KV that the draft model has of a sequence.

    Attributes:
        num_computed: leading tokens that have KV, those of `drafts` included.
        num_registered: leading blocks that are registered in the pool by key.
        drafts: what was drafted last, behind the first `length` tokens.
        acceptance: of its drafts.
    """

    block_ids: BlockTable = field(default_factory=block_table)
    num_computed: int = 0
    num_registered: int = 0
    drafts: list[int] = field(default_factory=list)
    length: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    def follow(self, tokens: Tokens) -> list[bool]:
        """Keep the KV of drafts that have come true, but for the last token, whose logits are needed.

        Returns:
            Of each draft up to the first wrong one, whether it was right.
        """
        agree = [*map(eq, self.drafts, tokens[self.length :])]
        right = agree.index(False) if False in agree else len(agree)
        self.num_computed = min(self.num_computed, self.length + right, len(tokens) - 1)
        self.drafts, self.length = [], len(tokens)
        return agree[: right + 1]

    def find(self, pool: BlockPool, keys: list[bytes]) -> None:
        """Take the blocks of the longest prefix of these keys that the pool has."""
        hits = pool.match(keys)
        pool.hold(hits)
        self.block_ids, self.num_registered = block_table(hits), len(hits)
        self.num_computed = len(hits) * pool.block_size

    def register(self, pool: BlockPool, keys: list[bytes]) -> None:
        """Make its full blocks prefix hits for others."""
        for index in range(self.num_registered, self.num_computed // pool.block_size):
            pool.register(self.block_ids[index], keys[index])
            self.num_registered = index + 1

    def grow(self, pool: BlockPool, count: int) -> None:
        """Take `count` further blocks of the pool."""
        self.block_ids.extend(pool.allocate(count))

    def compute(self, count: int) -> None:
        """Count `count` further tokens as computed."""
        self.num_computed += count

    def release(self, pool: BlockPool) -> None:
        """Give up all blocks. Those with keys stay prefix hits for a while."""
        pool.release(self.block_ids)
        self.block_ids, self.num_computed, self.num_registered = block_table(), 0, 0


class DraftModel(Drafter):
    """Proposes tokens by `--speculative-model` for each sequence that it has the KV of: `--speculative-tokens` if these are
    given, else as many for each as pay, by its own time, the cost model and measured acceptance.

    What a client has predicted of an answer comes first, and is proposed without the model.

    Args:
        scheduler: has the limit of tokens in a step, and the cost model of steps.
        target: runs the model that drafts are for.
        now: clock in seconds, as that of the costs.

    Attributes:
        pool: the blocks of the draft model's KV.

    Raises:
        SetupError: the model cannot be loaded, has recurrent layers or another vocabulary, or there is no room for its KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        target: ModelRunner,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.followed: dict[Sequence, _DraftKV] = {}
        self.counters: dict[str, float] = {}
        self._scheduler, self._now = scheduler, now
        self._most, self._is_fixed = config.draft_length, config.speculative_tokens is not None
        self._acceptance = Acceptance()  # of all sequences
        self._step_s = 0.0  # of the draft model
        self._vain = 0  # proposals since a draft has paid
        own = EngineConfig(
            model=config.speculative_model,
            dtype=config.dtype,
            device=config.device,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=CATCH_UP_TOKENS + AT_ONCE * config.max_num_seqs,
            kernel=config.kernel,
            batch_invariant=config.batch_invariant,
            async_scheduling="off",
            speculate="off",
            pooling="off",
        )
        checkpoint = load(own)
        _check_vocabulary(config, checkpoint, target.checkpoint)
        if checkpoint.spec.states:
            message = "has recurrent layers, whose states cannot take drafts back; use one with attention only"
            raise SetupError(f"--speculative-model {own.model} {message}")
        checkpoint = _in_one_group(checkpoint)
        count = _num_blocks(checkpoint, target)
        self._runner = ModelRunner(checkpoint, replace(own, num_blocks=count))
        self.pool = BlockPool(count, config.block_size)
        self._vocab_size = target.checkpoint.vocab_size
        size = count * checkpoint.layout.block_bytes / 2**20
        log.info("up to %d drafts a step by %s, with %d blocks of KV (%.0f MiB)", self._most, own.model, count, size)

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        """Return the tokens that may follow some of a plan's sequences."""
        started = self._now()
        takers = [seq for seq in plan.counts if plan.takes_drafts(seq)]
        room = self._scheduler.max_num_batched_tokens - sum(plan.counts.values())
        room = min(self._most, room // len(takers)) if takers else 0
        lengths = {seq: min(room, seq.output.max_tokens - seq.output.num_generated - 1) for seq in takers}
        lengths = {seq: length for seq, length in lengths.items() if length > 0}
        proposed = {seq: tokens for seq, length in lengths.items() if (tokens := _predicted(seq, length))}
        plan.predicted.update(proposed)
        due = [seq for seq in lengths if seq not in proposed]
        for seq in due:
            self._follow(seq)
        most = room if self._is_fixed or not due else self._worthwhile(plan, due, room)
        proposed |= self._draft({seq: min(most, lengths[seq]) for seq in due} if most else {}, plan)
        self.seconds = self._now() - started
        self._count("spec_decode_draft_seconds", self.seconds)
        return proposed

    def end(self, seq: Sequence) -> None:
        """Give up the KV of a sequence that is over here."""
        self.followed.pop(seq).release(self.pool)

    def _count(self, name: str, value: float = 1.0, **labels: str) -> None:
        key = series(name, **labels)
        self.counters[key] = self.counters.get(key, 0.0) + value

    def _follow(self, seq: Sequence) -> None:
        """Compare the last drafts of a sequence with the tokens that have come."""
        if (kept := self.followed.get(seq)) is None:
            kept = self.followed[seq] = _DraftKV()
        for is_right in kept.follow(seq.output.tokens):
            kept.acceptance.record(PREDICTED, is_right)
            self._acceptance.record(PREDICTED, is_right)

    def _worthwhile(self, plan: StepPlan, seqs: list[Sequence], most: int) -> int:
        """Return how many drafts of each sequence pay; one if it is time to try whether that does."""
        step = Step.forecast(plan.counts, self._scheduler.costs, None, Step.extra_seconds)
        own = [self.followed[seq].acceptance.own_chance(PREDICTED, self._acceptance) for seq in seqs]
        length = common_length(step, own, most, self._step_s + sum(step.more(len(seq)) for seq in seqs))
        self._vain = 0 if length or self._vain == PROBE_STEPS else self._vain + 1
        return length or int(not self._vain)

    @torch.inference_mode()
    def _draft(self, lengths: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, list[int]]:
        """Return up to `lengths` drafts of each sequence whose KV is there, or is computed in this step."""
        new, drafting, budget = dict[Sequence, Tokens](), list[Sequence](), CATCH_UP_TOKENS
        for seq, length in lengths.items():
            if not self._take_room(seq, length, plan):
                self._count("spec_decode_num_without_drafts", reason="room")
                continue
            first = self.followed[seq].num_computed
            missing = len(seq) - first
            count = missing if missing <= AT_ONCE else min(missing, budget)
            budget -= count if missing > AT_ONCE else 0
            if count:
                new[seq] = seq.output.tokens[first : first + count]
            if count == missing:
                drafting.append(seq)
            else:
                self._count("spec_decode_num_without_drafts", reason="behind")
        drafted = {seq: self.followed[seq] for seq in drafting}
        while new:
            started, is_timed = self._now(), len(new) == sum(map(len, new.values()))
            for seq, token in zip(drafting, self._compute(new, drafting), strict=True):
                seq.output.append(token)  # until all drafts are there
            if is_timed:
                self._time(self._now() - started)
            drafting = [seq for seq in drafting if self._goes_on(seq, lengths[seq])]
            new = {seq: seq.output.tokens[-1:] for seq in drafting}
        for seq, kept in drafted.items():
            kept.drafts = seq.output.tokens[kept.length :].tolist()
            seq.output.retract(len(kept.drafts))
        return {seq: kept.drafts[:] for seq, kept in drafted.items()}

    def _take_room(self, seq: Sequence, length: int, plan: StepPlan) -> bool:
        """Give a sequence blocks for its tokens and `length` drafts. Who finds none has none afterwards."""
        kept, keys = self.followed[seq], seq.kv.full_keys()
        if not kept.block_ids:
            kept.find(self.pool, keys[: (len(seq) - 1) // self.pool.block_size])
        kept.register(self.pool, keys)
        needed = self.pool.blocks_for(len(seq) + length - 1) - len(kept.block_ids)
        if needed > self.pool.num_free:
            for other in self.followed.keys() - plan.counts.keys():  # preempted, or paused
                self.followed[other].release(self.pool)
        if len(seq) + length > self._runner.checkpoint.context_length or needed > self.pool.num_free:
            kept.release(self.pool)
            return False
        kept.grow(self.pool, max(0, needed))
        return True

    def _time(self, seconds: float) -> None:
        """Count the time of a step of the draft model in which each sequence had one token."""
        seconds = min(seconds, MAX_RATIO * self._step_s) if self._step_s else seconds
        self._step_s += (seconds - self._step_s) / TIMED if self._step_s else seconds

    def _goes_on(self, seq: Sequence, length: int) -> bool:
        """Return whether further drafts may follow those of a sequence."""
        is_end = seq.output.ends_with(seq.output.tokens[-1], seq.output.num_generated)
        return not is_end and len(seq) < self.followed[seq].length + length

    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        """Compute new tokens of some sequences, and return the tokens that follow those of `drafting`."""
        kept, counts = [self.followed[seq] for seq in new], [*map(len, new.values())]
        ends = dict(zip(new, accumulate(counts), strict=True))
        ids_T = np.concatenate([np.frombuffer(tokens, np.uint32) for tokens in new.values()])
        ids_T = ids_T.clip(max=self._runner.checkpoint.vocab_size - 1)  # of the padding that only the other model has
        first, tables = [one.num_computed for one in kept], [one.block_ids for one in kept]
        inputs = self._runner.step_inputs(ids_T, counts, first, tables, [ends[seq] - 1 for seq in drafting])
        logits_SV = self._runner.forward(inputs)
        for one, count in zip(kept, counts, strict=True):
            one.compute(count)
        if not drafting:
            return []
        if (padding := self._vocab_size - logits_SV.shape[1]) > 0:
            logits_SV = torch.nn.functional.pad(logits_SV, (0, padding), value=float("-inf"))
        logits_SV = logits_SV[:, : self._vocab_size].contiguous()
        for feature, change in CHANGES if any(seq.features for seq in drafting) else ():
            if rows := [(logits_SV[row], seq) for row, seq in enumerate(drafting) if feature in seq.features]:
                change(rows)
        return SampledTokens(logits_SV, drafting).read()


def _predicted(seq: Sequence, length: int) -> list[int]:
    """Return what the client of a sequence has predicted to follow; empty if nothing is found."""
    if seq.prediction is None:
        return []
    found = continue_predicted(seq.prediction, seq.output.tokens, seq.output.num_prompt, length)
    return [] if found is None else found.tokens


def _in_one_group(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose layers all keep their KV for as long, whatever their windows: drafts need few blocks."""
    spec, layout = checkpoint.spec, checkpoint.layout
    spec = replace(spec, groups=tuple(replace(group, window=None) for group in spec.groups))
    same = {name: getattr(layout, name) for name in ("model_fingerprint", "block_size", "dtype", "itemsize")}
    return replace(checkpoint, spec=spec, layout=spec.layout(**same))


def _num_blocks(checkpoint: Checkpoint, target: ModelRunner) -> int:
    """Return the blocks of a draft model's pool: for as many tokens as the target has room for, in a share of its bytes."""
    size, pool_NX = checkpoint.layout.block_bytes, target.kv.pool_NX
    room = POOL_SHARE * pool_NX.numel() * pool_NX.element_size()
    if checkpoint.device.type == "cuda":
        room = min(room, FREE_SHARE * torch.cuda.mem_get_info(checkpoint.device)[0])
    if (count := min(target.kv.num_blocks, int(room / size))) < 2:
        message = f"{room / 2**20:.1f} MiB have no room for two blocks of its KV; raise --num-blocks"
        raise SetupError(f"--speculative-model: {message}, or lower --gpu-memory-utilization")
    return count


def _check_vocabulary(config: EngineConfig, draft: Checkpoint, target: Checkpoint) -> None:
    """Raise SetupError unless both models have the same tokens. Their numbers may differ by a padding of the weights."""
    found = []
    for model in (config.model, config.speculative_model):
        tokenizer = model_folder(model) / "tokenizer.json"
        found.append(json.loads(tokenizer.read_bytes())["model"].get("vocab") if tokenizer.is_file() else None)
    is_same = found[0] == found[1] if None not in found else draft.vocab_size == target.vocab_size
    if not is_same:
        sizes = f"{draft.vocab_size} tokens, and {config.model} {target.vocab_size}"
        message = f"has another vocabulary ({sizes}); use a model with the same tokenizer"
        raise SetupError(f"--speculative-model {config.speculative_model} {message}")
