"""Inference engine of one instance: schedule, run the model, postprocess. The roles decide what happens around it."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from pdserve.beam_search import BeamSearch
from pdserve.config import EngineConfig
from pdserve.engine.adapters import Adapter, Adapters
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.features import features_of
from pdserve.engine.grammar import GrammarBackend, GrammarConstraint, follow_grammar, has_slow_masks
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.sequence_kv import SequenceKV
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence, SequenceOutput
from pdserve.engine.step import Drafter, SchedulerOutput, StepOutcome, StepPlan
from pdserve.errors import RequestError, SetupError
from pdserve.keys import HASH_TOKENS, KEY_BYTES, Tokens, block_ends, key_chain, token_array
from pdserve.logits_processors import make_processors
from pdserve.plugins import extension
from pdserve.request import ARRIVALS_PER_PRIORITY, Request, SamplingParams, Tenant

if TYPE_CHECKING:
    from pdserve.engine.model_runner import ModelRunner

MAX_PINNED_SHARE = 0.25  # of the pool's blocks, for warm prompts
# A step waits for masks that will probably be there soon, at most this share of the last step, within seconds.
MASK_SHARE, MIN_MASK_WAIT_S, MAX_MASK_WAIT_S = 1 / 8, 0.001, 0.01


@dataclass
class StepResult:
    """Result of one step.

    Attributes:
        advanced: sequences whose KV grew, and those that share such KV from now on; for beams, the sequence of the prompt.
        outcome: what the model has done for each sequence; its tokens are appended already.
        schedule: what was computed, and before that preempted, swapped and resumed. The role of a resumed sequence loads it
            (`on_resumed`), and adds it again.
        swap_seconds: duration of the copies to host memory and back.
        recomputed: tokens that were computed again after a preemption.
        work: (tokens computed, tokens before them) of each advanced sequence, and of each draft.
        drafted: (drafts, accepted ones) of each sequence that had some.
        num_tokens: how many tokens all sequences got.
        idle: the step did nothing; neither will the next, until a block is released or a request arrives.
    """

    advanced: list[Sequence]
    outcome: StepOutcome
    schedule: SchedulerOutput
    swap_seconds: float
    recomputed: int
    work: list[tuple[int, int]]
    drafted: list[tuple[int, int]]
    num_tokens: int
    idle: bool

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that got tokens."""
        return [seq for seq, accepted in self.outcome.items() if accepted.tokens]


class Engine:
    """One model and one block pool. Not thread-safe: the engine thread owns it.

    Attributes:
        max_model_len: tokens of the longest request, prompt and output.
        drafter: proposes drafts for the sequences that take them; None: steps have no drafts.
        adapters: those of sequences that have one; None: none has.
        grammars: compiles grammars, and has their masks.
        constrained: sequences with grammars that are here, and these.
        num_late: how often steps left out one of them, since its mask was not there.
        on_planned: is told of each step before the model computes it, and returns the plan's `on_layer`.
    """

    drafter: Drafter | None = None
    adapters: Adapters | None = None
    on_planned: Callable[[StepPlan], Callable[[int], None] | None] | None = None

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint | None = None,
        *,
        runner: "ModelRunner | PacedRunner | None" = None,
        refetch_preempted: bool = False,
        on_grammar_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Load `config.model` unless a checkpoint is given, and allocate the pool.

        Args:
            runner: of the model, or in its stead.
            refetch_preempted: see `Scheduler`.
            on_grammar_ready: called in any thread when a sequence may have become schedulable.

        Raises:
            SetupError: the model cannot be loaded, or there is no room for its KV.
        """
        self.runner: ModelRunner | PacedRunner = runner or _load_runner(config, checkpoint)
        self.checkpoint = self.runner.checkpoint
        kv = self.runner.kv
        self.pool = BlockPool(kv.num_pages, config.block_size, kv.groups)
        self.pool.message_ends = self.checkpoint.eos_token_ids | self.checkpoint.message_ends
        host = BlockPool(kv.num_host_blocks, config.block_size, kv.host_groups) if kv.num_host_blocks else None
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=self.runner.window,
            host_pool=host,
            itl_target=None if config.itl_target_ms is None else config.itl_target_ms / 1000,
            refetch_preempted=refetch_preempted and not self.pool.has_states,  # found only where they were kept
            grows_ahead=self.runner.pipeline is not None,
        )
        self.max_model_len = _max_model_len(self.checkpoint, config, kv.num_blocks)
        longest = self.pool.pages_for(self.pool.blocks_for(self.max_model_len))
        room = self.pool.num_blocks - longest  # the longest request always fits
        self.pool.max_pinned = min(room, int(self.pool.num_blocks * MAX_PINNED_SHARE))
        self.layout = replace(self.checkpoint.layout, numerics=self.runner.numerics)
        if config.speculate == "draft":
            self.drafter = extension("draft-model")(config, self.scheduler, self.runner)
        elif config.speculate != "off" and not (config.speculate == "auto" and self._drafts_do_not_pay):
            self.drafter = extension("speculation")(config, self.scheduler, self.extra_seconds)
        if config.has_adapters:
            self.adapters = extension("adapters")(config, self.runner)
        self._arrivals = itertools.count()
        eos_token_ids = self.checkpoint.eos_token_ids
        self.grammars = GrammarBackend(config.model, self.checkpoint.vocab_size, eos_token_ids, on_grammar_ready)
        self.constrained: dict[Sequence, GrammarConstraint] = {}
        self.num_late = 0
        self._unready: dict[Sequence, None] = {}  # sequences whose first mask is not there
        self._unasked: list[Sequence] = []  # sequences whose next mask is to be asked for
        self._asked: dict[Sequence, None] = {}  # sequences whose next mask was asked for, and may not be there
        self._step_s = 0.0  # duration of the last step
        self._rest = 0  # steps about which the drafter need not be asked
        self._searches = set[Sequence]()  # the roots of beam searches that are here
        self._arrivals_per_priority = ARRIVALS_PER_PRIORITY if config.scheduling_policy == "priority" else 0

    def new_sequence(
        self,
        request_id: str,
        request: Request,
        output: Collection[int] = (),
        *,
        prediction: "Tokens | None" = None,
        leaves_nothing: bool = False,
    ) -> Sequence:
        """Return a new sequence, not queued yet.

        Args:
            output: tokens that another instance has generated already.
            prediction: tokens of the answer, as its client expects it.
            leaves_nothing: its answer is not kept for drafts of later requests.

        Raises:
            BadRequest: a logits processor is not installed, or refuses its arguments.
            RequestError: the adapter is not here.
            ValueError: the prompt is empty, it or the output has a token outside the vocabulary, or it could never fit.
        """
        sampling, layout, tokens = request.sampling, self.layout, token_array(request.prompt)
        self._check(tokens, output, request, prediction)
        tokens.extend(output)
        variant = layout.model_digest, request.salt, request.adapter, request.adapter_start
        chain = key_chain(*variant, request.packed_keys)
        keys = chain.keys(tokens, block_ends(len(tokens), layout.block_size, partial=True))
        stops = frozenset(sampling.stop_token_ids)
        stops = stops if sampling.ignore_eos else stops | self.checkpoint.eos_token_ids
        constraint = self._constraint(sampling, request.tenant) if sampling.grammar else None
        processors = make_processors(sampling.logits_processors) if sampling.logits_processors else []
        num_prompt, pooling = len(request.prompt), self.checkpoint.pooling if sampling.embed else None
        seq = Sequence(
            request_id,
            sampling,
            SequenceKV(tokens, layout.block_size, len(tokens), chain, keys),
            SequenceOutput(tokens, num_prompt, sampling, stops, constraint, processors),
            rank=next(self._arrivals) + self._arrivals_per_priority * request.priority,
            tenant=request.tenant,
            features=features_of(sampling, num_prompt, pooling, is_continued=bool(output)),
            prediction=prediction,
            leaves_nothing=leaves_nothing,
            adapter=self._adapter(request.adapter) if request.adapter else None,
        )
        if width := sampling.beam_width:
            how = sampling.length_penalty, sampling.early_stopping
            seq.search(BeamSearch(width, stops, sampling.max_tokens, *how))
        return seq

    @property
    def _drafts_do_not_pay(self) -> bool:
        """True if steps are launched ahead, which drafts would end, or on a GPU, where `auto` was not measured; or if steps
        compute nothing, so that all drafts would be right."""
        is_plain = self.runner.pipeline is None and self.checkpoint.device.type == "cpu"
        return not is_plain or isinstance(self.runner, PacedRunner)

    def extra_seconds(self, rows: int) -> float:
        """Return the seconds that a decode step of `rows` rows takes longer than a recorded one (`step_graph.py`)."""
        return 0.0 if self.runner.graphs is None else self.runner.graphs.extra_seconds(rows)

    def _check(self, prompt: Tokens, output: Collection[int], request: Request, prediction: "Tokens | None") -> None:
        """Raise ValueError if a request is none that this engine could ever serve."""
        sampling, vocab_size = request.sampling, self.checkpoint.vocab_size
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) + sampling.max_tokens > self.max_model_len:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} output tokens are more than the "
                f"{self.max_model_len} that fit"
            )
        if np.frombuffer(prompt, np.uint32).max() >= vocab_size or (output and max(output) >= vocab_size):
            raise ValueError(f"token ids go from 0 to {vocab_size - 1}")
        if output and len(output) >= sampling.max_tokens:
            raise ValueError(f"the output has {len(output)} tokens already, and may have {sampling.max_tokens}")
        if prediction and np.frombuffer(prediction, np.uint32).max() >= vocab_size:
            raise ValueError(f"predicted token ids go from 0 to {vocab_size - 1}")
        named = (
            *sampling.logit_bias,
            *sampling.allowed_token_ids,
            *sampling.stop_token_ids,
            *itertools.chain(*sampling.bad_words),
        )
        if max(named, default=0) >= vocab_size:
            raise ValueError(f"sampling token ids go from 0 to {vocab_size - 1}")
        if () in sampling.bad_words:
            raise ValueError("a bad word has no tokens")
        if (size := len(request.packed_keys)) > len(prompt) // HASH_TOKENS * KEY_BYTES:
            raise ValueError(f"{size} bytes of keys are more than those of {len(prompt)} tokens")
        pooling = self.checkpoint.pooling
        if sampling.embed and pooling is None:
            raise ValueError("this model has no embeddings")
        if not sampling.embed and pooling is not None and pooling.num_classes:
            raise ValueError("this model is a classifier, which generates nothing")

    def _adapter(self, digest: bytes) -> Adapter:
        """Return the adapter with a digest. Raises RequestError if it is not here."""
        if self.adapters is None:
            raise RequestError("this instance has no adapters", kind="unknown_adapter")
        return self.adapters.find(digest)

    def beams_fault(self, num_tokens: int, width: int) -> str:
        """Return why this engine cannot search with so many beams of up to `num_tokens` tokens; empty if it can."""
        if width > self.scheduler.max_num_seqs:
            return f"beam_width is {width}, and this server runs {self.scheduler.max_num_seqs} sequences at once"
        # Without shared blocks, with one to spare for each beam: then the oldest search can always advance.
        needed = width * self.pool.pages_for(self.pool.blocks_for(num_tokens) + 1)
        if needed > (room := self.pool.num_blocks - len(self.pool.pinned)):
            return f"{width} beams of {num_tokens} tokens do not fit into {room} blocks of KV; ask for less"
        return ""

    def new_siblings(self, seq: Sequence, members: Iterable[tuple[str, int]]) -> list[Sequence]:
        """Return a new sequence for each (request id, seed), which continues the prompt of `seq` with the same parameters.

        They have the rank of `seq`: the sequences of a request are scheduled and preempted together.
        """
        siblings = []
        for request_id, seed in members:
            sampling = structs.replace(seq.sampling, seed=seed)
            constraint = seq.output.constraint
            siblings.append(seq.sibling(request_id, sampling, constraint and constraint.sibling()))
        return siblings

    def start_grammars(self) -> None:
        """Load what grammars need, in another process: the first request with one need not wait for it."""
        if self.checkpoint.eos_token_ids:  # else the router refuses grammars
            self.grammars.start()

    def _constraint(self, sampling: SamplingParams, tenant: Tenant) -> GrammarConstraint | None:
        has_logits = not isinstance(self.runner, PacedRunner)  # else no token follows a grammar
        return self.grammars.compile(sampling.grammar, tenant) if has_logits else None

    @property
    def has_work(self) -> bool:
        return any(True for _ in self.scheduler.sequences())

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; if it has a grammar, once that is compiled and the first mask is there."""
        if seq.group is not None:
            self._searches.add(seq)
        if seq.output.constraint is not None:
            self.constrained |= {one: one.output.constraint for one in (seq, *seq.siblings) if one.output.constraint}
            self._unready[seq] = None
        else:
            self.scheduler.add(seq)

    def fork(self, seq: Sequence, request_id: str, sampling: SamplingParams) -> Sequence:
        """Queue and return a sequence that continues `seq` with its own parameters. The KV computed so far is shared."""
        assert seq.output.constraint is None, "a grammar's state belongs to one sequence"
        features = features_of(sampling, seq.output.num_prompt, is_continued=True)
        return self.scheduler.fork(seq, request_id, sampling, features)

    def remove(self, seq: Sequence) -> None:
        """Dequeue a sequence, finished or not, and release its blocks. The first that waits for it takes its place."""
        if seq.output.constraint is not None:
            seq.output.constraint.end()
            self.constrained.pop(seq, None)
            self._unready.pop(seq, None)
            self._asked.pop(seq, None)
        if seq.leader is not None:
            seq.leave()
        if self.drafter is not None and seq in self.drafter.followed:
            self.drafter.end(seq)
        self.scheduler.remove(seq)
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.release(seq)
        if seq.group is not None:
            self._searches.discard(seq)
            for beam in seq.group.beams:
                self.scheduler.remove(beam)
            seq.group.advance([])
        if seq.siblings:
            heir, *others = seq.take_siblings()
            heir.lead(others)
            self.add(heir)

    def step(self, *, pause_storing: bool = False) -> StepResult:
        """Schedule, run the model, postprocess. The caller removes finished sequences.

        Args:
            pause_storing: see `Scheduler.schedule`.
        """
        searched = self._branch_beams() if self._searches else []
        late = self._await_masks() if self.constrained else frozenset[Sequence]()
        schedule = self.scheduler.schedule(pause_storing=pause_storing, late=late)
        plan = schedule.plan
        self._rest -= 1
        if self._rest < 0 and plan.counts and self.drafter is not None:
            self._draft(plan, self.drafter)
        kv = self.runner.kv
        swap_seconds = kv.swap(schedule.swap_out, []) if schedule.swap_out else 0.0
        if schedule.block_copies:
            kv.copy_blocks(schedule.block_copies)
        if schedule.swap_in:  # maybe into a block that was copied, and then given up
            swap_seconds = kv.swap([], schedule.swap_in)
        if self.on_planned is not None:
            plan.on_layer = self.on_planned(plan)
        if self.adapters is not None:
            self.adapters.begin_step(plan)
        began_at = time.monotonic() if self.constrained else 0.0  # a simulation reads no clock
        outcome = (self.runner.pipeline or self.runner).step(plan)
        self._step_s = time.monotonic() - began_at if self.constrained else 0.0
        work, drafted, leaders = list[tuple[int, int]](), list[tuple[int, int]](), list[Sequence]()
        advanced, num_tokens, recomputed = dict.fromkeys(searched), 0, 0
        for seq, accepted in outcome.items():
            if accepted.computed:
                work += plan.work(seq)
            advanced[seq if seq.group is None else seq.group.root] = None
            if len(accepted.tokens) > 1:
                accepted.cut_at_end(seq)
                seq.output.extend(accepted.tokens[:-1])
            if seq.kv.num_lost > seq.kv.num_computed:
                recomputed += min(accepted.computed, seq.kv.num_lost - seq.kv.num_computed)
            if accepted.tokens and seq in plan.drafts:
                accepted.num_drafts = len(plan.drafts[seq])
                accepted.num_predicted = accepted.num_drafts if seq in plan.predicted else 0
                drafted.append((accepted.num_drafts, len(accepted.tokens) - 1))
            seq.kv.mark_computed(accepted.computed)
            seq.kv.register_full_blocks(self.pool)
            num_tokens += len(accepted.tokens)
            if seq.siblings and accepted.tokens:
                leaders.append(seq)
        for leader in leaders:
            advanced.update(dict.fromkeys(self._share_prompt(leader)))
        for seq, accepted in outcome.items():
            if accepted.tokens:
                seq.output.append(accepted.tokens[-1])
                accepted.finish_reason = seq.output.finish_reason()
                if seq.output.constraint is not None:
                    self._unasked.append(seq)
        idle = not (advanced or schedule.preempted or schedule.resumed or schedule.swap_in)
        return StepResult(
            advanced=[*advanced],
            outcome=outcome,
            schedule=schedule,
            swap_seconds=swap_seconds,
            recomputed=recomputed,
            work=work,
            drafted=drafted,
            num_tokens=num_tokens,
            idle=idle,
        )

    def ask_for_masks(self) -> None:
        """Ask for the masks of sequences that got tokens and are still here. At the latest, the next step does so."""
        asking, self._unasked = self._unasked, []
        for seq in asking:
            if seq in self.constrained:
                follow_grammar(seq)
                self._asked[seq] = None

    def _await_masks(self) -> set[Sequence]:
        """Wait for masks that will be there soon, queue sequences whose first one is, and return those whose mask is late."""
        self.ask_for_masks()
        for seq in self._unready:
            for one in (seq, *seq.siblings):
                follow_grammar(one)
        asked = self._unready | self._asked
        masks, patience_s = self.grammars.masks, min(max(self._step_s * MASK_SHARE, MIN_MASK_WAIT_S), MAX_MASK_WAIT_S)
        wanted = [self.constrained[one] for seq in asked for one in (seq, *seq.siblings)]
        followers = [one.follower for one in wanted if one.is_late and one.follower is not None]
        if soon := [follower for follower in followers if follower.grammar.delay_s < patience_s]:
            masks.wait(soon, patience_s)
        late = {seq for seq in asked if any(self.constrained[one].is_late for one in (seq, *seq.siblings))}
        for seq in [one for one in self._unready if one not in late]:  # in order
            del self._unready[seq]
            self.scheduler.add(seq)
        self._asked = dict.fromkeys(late - self._unready.keys())
        self.num_late += len(self._asked)
        masks.notify([follower for follower in followers if follower.is_late])
        return late

    def _draft(self, plan: StepPlan, drafter: Drafter) -> None:
        """Add drafts to a plan, and ask for the masks behind them. Sequences with slow masks get none."""
        drafts = drafter.propose(plan)
        self._rest = drafter.rest
        if not drafts:
            return
        if self.constrained:
            drafts = {seq: tokens for seq, tokens in drafts.items() if not has_slow_masks(seq)}
        self.scheduler.add_drafts(plan, drafts)
        for seq in self.constrained.keys() & plan.drafts.keys():
            if seq.output.is_constrained:
                self.constrained[seq].try_out(plan.drafts[seq])

    def _branch_beams(self) -> list[Sequence]:
        """Take one step of each beam search whose beams are computed. Returns the roots of these searches.

        This happens before a step, not after the last one, so that the role can store the prompt's KV before its sequence
        gives up its blocks.
        """
        groups = dict.fromkeys(seq.group for seq in self.scheduler.running if seq.group is not None)
        ready = [group for group in groups if group is not None and group.is_ready]
        for group in ready:
            branches = group.search.step([group.candidates[seq] for seq in group.beams])
            # Fork first: a beam that has got its token is no longer what its other branches continue.
            heirs = {branch.parent: i for i, branch in reversed([*enumerate(branches)])}
            beams = []
            for i, branch in enumerate(branches):
                parent = group.beams[branch.parent]
                keeps = heirs[branch.parent] == i and parent is not group.root
                if keeps:
                    beams.append(parent)
                else:
                    name, sampling, features = parent.request_id, parent.sampling, parent.features
                    beams.append(self.scheduler.fork(parent, name, sampling, features))
            for beam, branch in zip(beams, branches, strict=True):
                beam.output.append(branch.token)
            for parent in group.beams:
                if parent not in beams:
                    self.scheduler.remove(parent)
            group.advance(beams)
        return [group.root for group in ready]

    def _share_prompt(self, leader: Sequence) -> list[Sequence]:
        """Queue the sequences that have waited for a leader, which has computed the prompt, and return them."""
        shared = leader.take_siblings()
        for seq in shared:
            seq.share(leader, self.pool)
            self.scheduler.add(seq)
        return shared


def _load_runner(config: EngineConfig, checkpoint: Checkpoint | None) -> "ModelRunner":
    # Imported here, because a paced runner needs no transformers, whose import takes seconds.
    from pdserve.engine.checkpoint_loader import load
    from pdserve.engine.model_runner import ModelRunner

    assert config.tensor_parallel_size == 1, "several devices need the runner of ranks/leader.py"
    return ModelRunner(checkpoint or load(config), config)


def _max_model_len(checkpoint: Checkpoint, config: EngineConfig, num_blocks: int) -> int:
    """Return the tokens of the longest request: the minimum of the model's context, the flag and the pool.

    Raises:
        SetupError: the flag exceeds one of the other two.
    """
    capacity = num_blocks * config.block_size
    requested = config.max_model_len
    if requested is not None and requested > checkpoint.context_length:
        raise SetupError(f"--max-model-len {requested} is more than the model's context of {checkpoint.context_length}")
    if requested is not None and requested > capacity:
        raise SetupError(
            f"--max-model-len {requested} does not fit into {num_blocks} blocks of {config.block_size} tokens"
        )
    return min(requested or checkpoint.context_length, capacity)
