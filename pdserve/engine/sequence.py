"""State of one sequence in the engine: where it stands in the queues, its KV, its output, and the sequences beside it.

`Sequence.kv` (`memory/sequence_kv.py`) has its blocks and what of it is computed, `Sequence.output` its tokens and when they
end. Plain data: only methods of these classes change it; other modules call them and read the attributes.
"""

from array import array
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdserve.beam_search import BeamSearch, Candidate
from pdserve.engine.adapters import Adapter
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.memory.groups import BlockTable, SwappedKV
from pdserve.engine.memory.sequence_kv import SequenceKV
from pdserve.errors import RequestError
from pdserve.keys import KeyChain, Tokens, block_ends
from pdserve.logits_processors import LogitsProcessor
from pdserve.reasoning import ReasoningTracker
from pdserve.request import NO_TENANT, SamplingParams, Tenant

if TYPE_CHECKING:
    from pdserve.engine.grammar import GrammarConstraint

MIN_TOKENS_BETWEEN = 32  # that a sequence gets before it gives way to other tenants again
TURN = 16  # tokens that a sequence gets in a row where a step is too short for all of its tenant


@dataclass(eq=False)
class SequenceOutput:
    """The tokens of a sequence: what may follow them, and when they end.

    Attributes:
        tokens: prompt, then output.
        num_prompt: number of prompt tokens.
        max_tokens: after which the output ends.
        min_tokens: before which no stop token ends it.
        stop_token_ids: tokens that end it (EOS included, unless it is ignored).
        reasoning: follows its reasoning, if that is delimited.
        constraint: its grammar, if any.
        processors: plug-ins that change its logits.
        failure: why it cannot be continued, if a plug-in has failed.
    """

    tokens: Tokens
    num_prompt: int
    sampling: InitVar[SamplingParams]
    stop_token_ids: frozenset[int] = frozenset()
    constraint: "GrammarConstraint | None" = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    failure: RequestError | None = None

    def __post_init__(self, sampling: SamplingParams) -> None:
        self.max_tokens, self.min_tokens = sampling.max_tokens, sampling.min_tokens
        self.reasoning = ReasoningTracker(sampling.reasoning) if sampling.reasoning is not None else None

    @property
    def fault(self) -> RequestError | None:
        """Why it cannot be continued: a plug-in or its grammar has failed. Then its last token counts for nothing."""
        return self.failure or (None if self.constraint is None else self.constraint.failure)

    def copy(
        self, tokens: Tokens, sampling: SamplingParams, constraint: "GrammarConstraint | None"
    ) -> "SequenceOutput":
        """Return the output so far as that of another sequence, of which `tokens` is a copy."""
        return replace(self, tokens=tokens, sampling=sampling, constraint=constraint)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> Tokens:
        """The tokens behind the prompt."""
        return self.tokens[self.num_prompt :]

    def finish_reason(self) -> str | None:
        """Return `stop` after a stop token, `length` after max_tokens, else None."""
        count = len(self.tokens) - self.num_prompt
        if count == 0:
            return None
        if self.ends_with(self.tokens[-1], count):
            return "stop"
        return "length" if count >= self.max_tokens else None

    def ends_with(self, token: int, count: int) -> bool:
        """Return whether a token ends the output, if it is its token number `count` (from 1)."""
        return token in self.stop_token_ids and count >= self.min_tokens

    @property
    def awaits_last_token(self) -> bool:
        """True if the next token ends it, whatever it is."""
        return self.num_generated + 1 >= self.max_tokens

    @property
    def answer_start(self) -> int | None:
        """Position in the output of the first token after its reasoning, where its grammar begins; None inside of that."""
        if self.reasoning is None:
            return 0
        self.reasoning.follow(self.tokens, self.num_prompt)
        return self.reasoning.answer_start

    @property
    def is_constrained(self) -> bool:
        """True if the next token must follow a grammar."""
        return self.constraint is not None and self.answer_start is not None

    @property
    def forced_token(self) -> int | None:
        """The only token that may come next, because it begins or closes the reasoning; None if others may."""
        if self.reasoning is None or self.answer_start is not None:
            return None
        return self.reasoning.forced_token(self.tokens, self.num_prompt)

    def append(self, token: int) -> None:
        """Append a token, sampled here or by the instance that computed the prompt."""
        self.tokens.append(token)

    def extend(self, tokens: list[int]) -> None:
        """Append several tokens."""
        self.tokens.extend(tokens)

    def retract(self, count: int) -> None:
        """Remove the last tokens, which were appended for a while only."""
        del self.tokens[len(self.tokens) - count :]

    def fail(self, failure: RequestError) -> None:
        """Record that it cannot be continued."""
        self.failure = failure


class Feature:
    """A part of a step that only some requests need. A sequence carries those of its request, and a step calls no others.

    The methods are called in this order, each with the sequence and before anything of the step counts for it. Here, they ask
    for nothing and do nothing; `engine/features.py` has those that there are.

    Attributes:
        has_output: tokens are sampled.
        takes_drafts: a step may sample several tokens of its sequences, each after those before it.
    """

    has_output = True
    takes_drafts = False

    @property
    def reads_prompt(self) -> bool:
        """True if logits or hidden states of all prompt tokens are needed, so that none may be a prefix hit."""
        return False

    @property
    def reads_logits(self) -> bool:
        """True if logits of prompt tokens are still needed. They are large, and a step has few."""
        return False

    def logits_rows(self, seq: "Sequence", count: int) -> range:
        """Return of which of the sequence's next `count` tokens it reads the logits."""
        return range(0)

    def hidden_rows(self, seq: "Sequence", count: int) -> range:
        """Return of which of the sequence's next `count` tokens it reads the hidden states before the model's last layer."""
        return range(0)

    def take_hidden(self, seq: "Sequence", hidden_RH: Any) -> None:
        """Read hidden states [R, H] float32 on the CPU."""

    def complete(self, seq: "Sequence", head: Any) -> None:
        """Make what there is in place of an output, now that all tokens are computed. `head` is the model's last layer."""

    def take_logits(self, seq: "Sequence", logits_RV: Any) -> None:
        """Read logits [R, V]."""

    def restart(self) -> None:
        """Forget what was read: the sequence has lost its KV, and is computed again."""


@dataclass(eq=False)
class BeamGroup:
    """The sequences of one beam search, which advance together.

    Attributes:
        root: the sequence that computes the prompt.
        beams: in the order of the search's branches.
        candidates: most likely next tokens of each beam that has computed its last one, with their log probabilities.
    """

    search: BeamSearch
    root: "Sequence"
    beams: "list[Sequence]"
    candidates: "dict[Sequence, list[Candidate]]" = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """True if the candidates of every beam are known, and its KV is here."""
        return all(seq in self.candidates and seq.kv.num_uncomputed == 0 for seq in self.beams)

    def record_candidates(self, seq: "Sequence", candidates: list[Candidate]) -> None:
        """Set the most likely next tokens of a beam."""
        self.candidates[seq] = candidates

    def advance(self, beams: "list[Sequence]") -> None:
        """Set the beams of the next step, each of which has got the token that the search has chosen."""
        self.beams = beams
        self.candidates.clear()


@dataclass(eq=False)
class Sequence:
    """A prompt and its continuation.

    Attributes:
        rank: scheduling order within its tenant, lowest first.
        tenant: whose request it is.
        gave_way_at: its length when it last gave way to another tenant; None if it never has.
        last_turn: the last step that computed it, among those that were too short for all sequences of its tenant.
        overtaken: how often others went before it when it lacked blocks.
        stores_kv: its role stores its KV as it is computed; the scheduler pauses it while the store is behind.
        siblings: sequences of the same request that wait for this one's prompt, to share its KV.
        leader: the sequence for whose prompt this one waits.
        group: of its beam search, if it is one.
        features: what its request needs of a step beside tokens; most need nothing.
        prediction: tokens of the answer that its client has predicted, if it has.
        leaves_nothing: its answer is not kept for drafts of later requests.
        adapter: added to the model's weights for it, from the token on at which its keys name it; None: nothing is.
    """

    request_id: str
    sampling: SamplingParams
    kv: SequenceKV
    output: SequenceOutput
    rank: int = 0
    tenant: Tenant = NO_TENANT
    gave_way_at: int | None = None
    last_turn: int = 0
    overtaken: int = 0
    stores_kv: bool = False
    siblings: list["Sequence"] = field(default_factory=list)
    leader: "Sequence | None" = None
    group: BeamGroup | None = None
    features: tuple[Feature, ...] = ()
    prediction: "Tokens | None" = None
    leaves_nothing: bool = False
    adapter: Adapter | None = None

    @classmethod
    def new(
        cls,
        request_id: str,
        tokens: Tokens,
        num_prompt: int,
        num_initial: int,
        sampling: SamplingParams,
        root: bytes,
        block_size: int,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        block_ids: "BlockTable | None" = None,
        num_computed: int = 0,
        rank: int = 0,
        tenant: Tenant = NO_TENANT,
        features: tuple[Feature, ...] = (),
    ) -> "Sequence":
        """Return a sequence that needs no engine, as those of the warm-up.

        Args:
            tokens: the prompt, and the output that another instance has generated.
            num_prompt, num_initial: how many tokens the prompt has, and how many there are.
            root: of the keys; empty: it has no initial keys, whose hashes take longer than all else here.
        """
        chain = KeyChain(root)
        keys = chain.keys(tokens, block_ends(num_initial, block_size, partial=True)) if root else []
        table = array("q") if block_ids is None else block_ids
        kv = SequenceKV(tokens, block_size, num_initial, chain, keys, table, num_computed=num_computed)
        output = SequenceOutput(tokens, num_prompt, sampling, stop_token_ids)
        return cls(request_id, sampling, kv, output, rank, tenant, features=features)

    def __len__(self) -> int:
        return len(self.output.tokens)

    @property
    def takes_drafts(self) -> bool:
        """True if a step may compute drafts behind its last token: it has sampled here, and no feature is in the way."""
        if not (self.kv.is_decoding and len(self) > self.kv.num_initial):
            return False
        return not self.features or all(feature.takes_drafts for feature in self.features)

    @property
    def may_give_way(self) -> bool:
        """True if its slot may go to another tenant. Beams keep theirs, since a search advances with all of them only."""
        has_rested = self.gave_way_at is None or len(self) >= self.gave_way_at + MIN_TOKENS_BETWEEN
        return has_rested and self.group is None

    @property
    def awaits_beams(self) -> bool:
        """True if it is a beam that has computed its last token, and waits for others of its search, which have not."""
        return self.group is not None and bool(self.kv.block_ids) and not self.kv.num_uncomputed

    @property
    def turn(self) -> tuple[bool, int]:
        """Its place among the sequences of a tenant for which a step is too short: those amid a turn go on."""
        is_amid = self.kv.num_computed % TURN != 0
        return not is_amid, -self.last_turn if is_amid else self.last_turn

    @property
    def num_usable_hits(self) -> int:
        """Leading full blocks that need not be computed. The last token always is, because its logits are needed."""
        for feature in self.features:
            if feature.reads_prompt:
                return 0
        return (len(self) - 1) // self.kv.block_size

    @property
    def usable_keys(self) -> list[bytes]:
        """Keys of the leading full blocks that need not be computed."""
        count = self.num_usable_hits
        return self.kv.full_keys()[:count]

    @property
    def reads_logits(self) -> bool:
        """True if a feature still needs logits of the prompt."""
        return any(feature.reads_logits for feature in self.features)

    # ---- changes of state ---------------------------------------------------------------------------------------

    def search(self, search: BeamSearch) -> None:
        """Become the first beam of a search."""
        self.group = BeamGroup(search, self, [self])

    def let_pass(self) -> None:
        """Record that another one goes first while this one lacks blocks."""
        self.overtaken += 1

    def mark_for_storing(self) -> None:
        """Record that its role stores its KV as it is computed, so that the scheduler may pause it."""
        self.stores_kv = True

    def sibling(self, request_id: str, sampling: SamplingParams, constraint: "GrammarConstraint | None") -> "Sequence":
        """Return another sequence of the same tokens, which has no KV yet."""
        tokens = self.output.tokens[:]
        kv, output = self.kv.for_sibling(tokens), self.output.copy(tokens, sampling, constraint)
        return replace(self, request_id=request_id, sampling=sampling, kv=kv, output=output, siblings=[])

    def fork(
        self, pool: BlockPool, request_id: str, sampling: SamplingParams, features: tuple[Feature, ...]
    ) -> "Sequence":
        """Return a copy that shares all KV computed so far."""
        tokens = self.output.tokens[:]
        kv, output = self.kv.fork(pool, tokens), self.output.copy(tokens, sampling, self.output.constraint)
        return replace(
            self, request_id=request_id, sampling=sampling, kv=kv, output=output, siblings=[], features=features
        )

    def lead(self, siblings: list["Sequence"]) -> None:
        """Let sequences of the same tokens wait for this one's prompt."""
        self.siblings = siblings
        for one in siblings:
            one.leader = self

    def take_siblings(self) -> list["Sequence"]:
        """Return the sequences that wait for this one's prompt, and let them wait no longer."""
        siblings, self.siblings = self.siblings, []
        for one in siblings:
            one.leader = None
        return siblings

    def leave(self) -> None:
        """Wait no longer for another sequence's prompt."""
        assert self.leader is not None
        self.leader.siblings.remove(self)
        self.leader = None

    def share(self, other: "Sequence", pool: BlockPool) -> None:
        """Take over the KV that another sequence of the same prompt has. Later writes are copy-on-write."""
        self.kv.share(other.kv, pool)

    def give_way(self) -> None:
        """Record that another tenant gets its slot."""
        self.gave_way_at = len(self)

    def take_turn(self, step: int) -> None:
        """Record that a step computes it."""
        self.last_turn = step

    def preempt(self, pool: BlockPool, swapped: SwappedKV | None, *, is_stored: bool) -> None:
        """Release all its blocks, see `SequenceKV`."""
        self.kv.preempt(pool, swapped, is_stored=is_stored)
        if swapped is None:
            for feature in self.features:
                feature.restart()
