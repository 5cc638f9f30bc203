"""Routing policies, and placement: pure functions over a snapshot of candidate instances.

Policies score the candidates; the lowest score wins.

Prefill and decode instances are picked by one policy each. Ties go to the candidate with the fewest uncached tokens of the
prompt (only for prefill: the saved work benefits the next requests), then to the fewest requests, then to the least work,
then in rotation. A policy that cannot judge a request (`session` without a session) delegates to another policy, and the
decision names that one.

Placement is conditional disaggregation: a prompt is computed on a prefill instance, or on the decode instance itself. A
hand-over costs more than computing a short prompt, or the next turn of a chat whose prefix is in the decode instance's pool.
But while a decode instance computes a prompt, all sequences that it decodes are delayed. With an ITL target, it computes only
as much of a prompt per step as the target leaves, so it can take prompts that would wait too long for prefill, unless such
requests are more work for decode than for prefill: then prefill has time, and the streams would end, and be followed by
others, later. And a prefill instance without other prompts can keep the request that it gets, and decode it, if decode would
miss the ITL target. While targets are met anyway, roles do not give way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, cast

import xxhash

from pdserve import plugins
from pdserve.config import POLICIES_GROUP
from pdserve.costs import Costs
from pdserve.errors import SetupError

DEFAULT_COSTS = Costs()  # until an instance has reported its own
MAX_EXPLAINED = 8  # candidates listed in a decision
WAIT_SPREAD_TOKENS = 64  # a wait before the second token counts as spread over at most this many tokens (decode only)
DEFLECTED_TTFT = 1.2  # of prompts beside streams, divided by its forecast: further streams begin meanwhile
MAX_KEPT_TTFT = 0.5  # of the target, up to which prefill has time to spare for decoding
MAX_KEPT_ITL = 0.7  # of the ITL on decode, at which prefill keeps a request: prompts that come later will slow it down

_instance_id = attrgetter("instance_id")


class Load(NamedTuple):
    """Remaining work of one request, or the sum over several.

    Attributes:
        prefill_tokens: prompt tokens still to be computed.
        output_tokens: tokens still to be generated, at most.
        context_tokens: tokens whose KV each decode step reads.
        prefills: requests with prompt tokens still to be computed.
        attended_tokens: (token, earlier token) pairs of the remaining prefills, as counted by `costs.attention_pairs`.
    """

    requests: int = 1
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    prefills: int = 0
    attended_tokens: int = 0


NO_LOAD = Load(requests=0)


@dataclass(slots=True, eq=False)
class Candidate:
    """One instance as a policy sees it: its remaining work for all routers, and its cost model.

    Attributes:
        requests, prefill_tokens, output_tokens, context_tokens, prefills, attended_tokens: the load, as in `Load`.
        is_both: role `both`: it may compute the prompts that it decodes.
        token_bytes: size of one token's KV, in the layers of the longest window.
        windows: of the other layers, (tokens, bytes of each): no more of them are moved, or stay in the pool.
        capacity_tokens: size of the pool, without these.
        free_tokens: its room by the last heartbeat. Over `nixl://`, prompts that wait for decode fill the pool of prefill.
        itl_target: seconds that a step with decoding sequences should not exceed, whatever prompts it contains.
        block_size: tokens of a prompt that such a step computes at least.
        longest: of this router's requests, the one with the most prompt tokens left.
    """

    instance_id: str
    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    prefills: int = 0
    attended_tokens: int = 0
    costs: Costs = DEFAULT_COSTS
    is_both: bool = False
    token_bytes: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    capacity_tokens: int = 1 << 62
    free_tokens: int = 1 << 62
    itl_target: float = math.inf
    block_size: int = 1
    longest: Load = NO_LOAD
    # Cached: hundreds of candidates are scored for each request, and few have changed since the last one.
    _prefill_terms: tuple[float, float, float, float] | None = field(default=None, init=False, repr=False)
    _decode_terms: tuple[float, float, float, float, int] | None = field(default=None, init=False, repr=False)

    def prefill_terms(self) -> tuple[float, float, float, float]:
        """Return the terms of the TTFT forecast: (constant, per prompt token, per attended pair, longest), in seconds.

        The constant covers the queued prompts, one more prompt of no tokens, and one step of the running sequences. These
        leave prompts a part of each step only, if the instance has an ITL target. The last term is the part of the constant
        for the longest prompt.
        """
        if self._prefill_terms is None:
            per_prompt, per_token, per_pair = self.costs.prefill
            seconds = (
                per_prompt * (self.prefills + 1) + per_token * self.prefill_tokens + per_pair * self.attended_tokens
            )
            step, stretch = 0.0, 1.0
            if self.context_tokens and (decoding := self.requests - self.prefills):
                step = self.costs.step_seconds(decoding, self.context_tokens)
                stretch = self._stretch(step)
            longest = per_token * self.longest.prefill_tokens + per_pair * self.longest.attended_tokens
            self._prefill_terms = seconds * stretch + step, per_token * stretch, per_pair * stretch, longest * stretch
        return self._prefill_terms

    def _stretch(self, step: float) -> float:
        """Return how many times longer prompts take beside sequences whose own step takes `step` seconds."""
        if not step or math.isinf(self.itl_target):
            return 1.0
        share = max(self.itl_target - step, self.costs.prefill[1] * self.block_size)  # of a step, for prompts
        return (step + share) / share if share else 1.0

    def decode_terms(self) -> tuple[float, float, float, float, int]:
        """Return the terms of the ITL forecast: (step, per context token, transfer, per transferred token, free tokens).

        The first four are in seconds, and the step includes one more sequence of no tokens; the last is the room in the pool.
        """
        if self._decode_terms is None:
            per_step, per_sequence, per_token = self.costs.decode
            step = per_step + per_sequence * (self.requests + 1) + per_token * self.context_tokens
            per_transfer, per_byte = self.costs.transfer
            free_tokens = self.capacity_tokens - self.context_tokens
            if self.windows:
                free_tokens -= self.requests * self.window_bytes(self.capacity_tokens) // max(1, self.token_bytes)
            per_transfer = per_transfer if self.token_bytes else 0.0
            self._decode_terms = step, per_token, per_transfer, per_byte * self.token_bytes, free_tokens
        return self._decode_terms

    def window_bytes(self, tokens: int) -> int:
        """Return the bytes of the windows' layers that tokens behind the last `tokens` reach."""
        return sum(min(tokens, window) * size for window, size in self.windows)

    @property
    def work_tokens(self) -> int:
        return self.prefill_tokens + self.output_tokens

    def replace_load(self, old: Load, new: Load) -> None:
        """Subtract `old` from the load and add `new`."""
        self.requests += new.requests - old.requests
        self.prefill_tokens += new.prefill_tokens - old.prefill_tokens
        self.output_tokens += new.output_tokens - old.output_tokens
        self.context_tokens += new.context_tokens - old.context_tokens
        self.prefills += new.prefills - old.prefills
        self.attended_tokens += new.attended_tokens - old.attended_tokens
        self._prefill_terms = self._decode_terms = None

    def update_costs(self, costs: Costs) -> None:
        """Replace the cost model by a newer one."""
        self.costs = costs
        self._prefill_terms = self._decode_terms = None


class PlacementRequest(NamedTuple):
    """A request as a policy sees it.

    Attributes:
        tokens: length of the prompt, including tokens generated before a migration.
        turn: a number that grows by 1 per request of a router; drives rotation and random draws.
        session: the client's name for requests that belong together; empty: none.
        cached: instance id → number of leading tokens in its pool, according to the prefix index.
        output_tokens: tokens to be generated, at most.
        decode: True to pick a decode instance, False to pick a prefill instance.
        prefills_itself: there is no dedicated prefill instance, so a `both` instance computes the prompts that it decodes.
        stored: number of leading tokens in the KV store, which an instance may load; 0 unless publishers of KV events tell.
        mean_answer: tokens of recent answers, in the mean; infinite if there was none.
    """

    tokens: int
    turn: int = 0
    session: str = ""
    cached: Mapping[str, int] = MappingProxyType({})
    output_tokens: int = 1
    decode: bool = False
    prefills_itself: bool = False
    stored: int = 0
    mean_answer: float = math.inf

    @property
    def wait_spread(self) -> int:
        """Number of tokens over which a wait before the second token is spread in an ITL forecast."""
        return max(1, min(WAIT_SPREAD_TOKENS, self.output_tokens))

    def cached_on(self, candidate: Candidate) -> int:
        return self.cached.get(candidate.instance_id, 0)

    def uncached(self, candidate: Candidate) -> int:
        """Return the number of prompt tokens that the candidate would have to compute or load."""
        return self.tokens - self.cached_on(candidate)


Scores = list[tuple[float, Candidate]]
Policy = Callable[[Sequence[Candidate], PlacementRequest], Scores]


class ScoredCandidate(NamedTuple):
    """A candidate's score, with its load at that moment."""

    instance: str
    score: float
    requests: int
    prefill_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Decision:
    """The outcome of a policy, with its explanation for the timeline.

    Attributes:
        policy: the policy that decided, after delegation.
        chosen: id of the selected instance.
        why: the criterion in words.
        candidates: the best `MAX_EXPLAINED` candidates, the selected one first.
        considered: number of candidates.
    """

    policy: str
    chosen: str
    why: str
    candidates: list[ScoredCandidate]
    considered: int

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "candidates": [candidate._asdict() for candidate in self.candidates]}


def round_robin(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Round robin: in rotation, ordered by instance id."""
    ordered = sorted(candidates, key=_instance_id)
    return [((rank - request.turn) % len(ordered), candidate) for rank, candidate in enumerate(ordered)]


def least_loaded(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Least work left: the fewest tokens still to be computed or generated."""
    return [(c.work_tokens, c) for c in candidates]


def power_of_two(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Power of two choices (Mitzenmacher 2001): the less loaded of two candidates drawn at random.

    It avoids the herd effect: several routers with the same view of the load do not all pick the same instance.
    """
    ordered, count = sorted(candidates, key=_instance_id), len(candidates)
    if count > 2:
        draw = xxhash.xxh3_64_intdigest(str(request.turn).encode())
        first, offset = draw % count, 1 + (draw >> 32) % (count - 1)
        ordered = [ordered[first], ordered[(first + offset) % count]]
    return least_loaded(ordered, request)


def session(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Session affinity by rendezvous hashing (highest random weight, Thaler & Ravishankar 1998).

    If an instance leaves, only its own sessions move; a new instance takes over only the sessions that hash to it.
    """
    seed, digest = xxhash.xxh3_64_intdigest(request.session.encode()), xxhash.xxh3_64_intdigest
    return [(digest(c.instance_id.encode(), seed) / 2**64, c) for c in candidates]


def prefix_aware(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Cache-aware least work: queued tokens plus the uncached tokens of this prompt.

    The criterion of cache-aware schedulers such as Mooncake's (Qin et al. 2024), in tokens instead of seconds.
    """
    tokens, cached = request.tokens, request.cached
    return [(c.work_tokens + tokens - cached.get(c.instance_id, 0), c) for c in candidates]


def auto(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Lowest forecast latency in seconds, from each instance's cost model: TTFT for prefill, ITL for decode.

    For prefill it is Mooncake's criterion (Qin et al. 2024): queueing time plus the time to compute the uncached tokens.
    """
    if request.decode:
        return _itl_scores(candidates, request)
    return _ttft_scores(candidates, request)


def forecast_ttft(candidate: Candidate, request: PlacementRequest) -> float:
    """Forecast the TTFT in seconds: queued prompts, one step of the running sequences, and the uncached tokens.

    Tokens that the KV store has are loaded, if that is faster than computing them. A prompt that is at most half as long as
    the longest one shares steps with that, and does not wait for its end.
    """
    return _ttft_scores([candidate], request)[0][0]


def _ttft_scores(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """`forecast_ttft` of all candidates, in one loop without calls: there may be hundreds of them per request."""
    tokens, stored, cached_on = request.tokens, request.stored, request.cached.get
    scores = []
    for c in candidates:
        queued, per_token, per_pair, longest = c._prefill_terms or c.prefill_terms()
        cached = cached_on(c.instance_id, 0)
        uncached = tokens - cached
        # `attention_pairs`, inlined.
        seconds = (per_token + per_pair * (cached + uncached / 2)) * uncached
        if stored > cached:
            rest = tokens - stored
            moved = (stored - cached) * c.token_bytes + (c.window_bytes(stored - cached) if c.windows else 0)
            load = c.costs.transfer_seconds(moved)
            seconds = min(seconds, load + (per_token + per_pair * (stored + rest / 2)) * rest)
        if 2 * uncached <= c.longest.prefill_tokens and longest > seconds:
            queued -= longest - seconds
        scores.append((queued + seconds, c))
    return scores


def forecast_itl(candidate: Candidate, request: PlacementRequest) -> float:
    """Forecast the ITL in seconds: a step that includes this request, plus its share of the wait for KV and free blocks."""
    return _itl_scores([candidate], request)[0][0]


def room_seconds(candidate: Candidate, tokens: int) -> float:
    """Forecast how long a prompt waits for room on a decode instance: until all that waits there has had its own."""
    step, _, _, _, free_tokens = candidate.decode_terms()
    pools = max(1.0, (tokens - free_tokens) / max(1, candidate.capacity_tokens))
    return step * candidate.output_tokens / max(1, candidate.requests) * pools if tokens > free_tokens else 0.0


def _itl_scores(candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """`forecast_itl` of all candidates, in one loop for the same reason."""
    tokens, cached_on, spread = request.tokens, request.cached.get, request.wait_spread
    prefills_itself = request.prefills_itself
    scores = []
    for c in candidates:
        step, per_token, per_transfer, per_moved_token, free_tokens = c._decode_terms or c.decode_terms()
        step += per_token * tokens
        if prefills_itself and c.is_both:
            wait = forecast_ttft(c, request)
        else:
            uncached = tokens - cached_on(c.instance_id, 0)
            wait = per_transfer + per_moved_token * uncached if uncached else 0.0
            if c.windows:
                wait += c.costs.transfer[1] * c.window_bytes(uncached)
        if tokens > free_tokens:
            pools = max(1.0, (tokens - free_tokens) / max(1, c.capacity_tokens))  # that must become free before
            wait += step * c.output_tokens / max(1, c.requests) * pools
        scores.append((step + wait / spread, c))
    return scores


POLICIES: dict[str, Policy] = {
    "auto": auto,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "session": session,
    "prefix_aware": prefix_aware,
}
TIE_TOLERANCE = {"auto": 0.1}  # relative; the accuracy of the forecasts
EXPLANATIONS = {
    "auto": "the lowest forecast TTFT, in seconds",
    "round_robin": "its turn",
    "least_loaded": "the least work left, in tokens",
    "power_of_two": "the less work left, in tokens, of two drawn at random",
    "session": "the session's instance",
    "prefix_aware": "the fewest tokens to compute, queued and uncached",
}
AUTO_DECODE_EXPLANATION = "the lowest forecast ITL, in seconds"


def policy_of(name: str) -> Policy:
    """Return a policy of `POLICIES`, or of a package that has added it to the entry-point group `pdserve.policies`.

    Raises:
        SetupError: it is not installed, cannot be imported, or is no function.
    """
    found = POLICIES.get(name) or plugins.load(POLICIES_GROUP, name)
    if not callable(found):
        raise SetupError(f"{POLICIES_GROUP}: {name} must be a function of candidates and a request, not {found!r}")
    return cast(Policy, found)


class PolicyFault(Exception):
    """A policy of another package raised an exception, or returned something else than scores of its candidates."""


def decide(policy: str, candidates: Sequence[Candidate], request: PlacementRequest) -> Decision:
    """Pick one of the candidates (at least one) by a policy, see `policy_of`, and explain the choice.

    Raises:
        PolicyFault: the policy is of another package, and failed.
    """
    why = ""
    if policy == "session" and not request.session:
        policy, why = "least_loaded", "the request has no session; "
    scores = (
        POLICIES[policy](candidates, request) if policy in POLICIES else _scores_of_package(policy, candidates, request)
    )
    best = scores if len(scores) == 1 else _best(scores, TIE_TOLERANCE.get(policy, 0), request)
    explained = [
        ScoredCandidate(c.instance_id, score, c.requests, c.prefill_tokens, c.output_tokens, request.cached_on(c))
        for score, c in best
    ]
    explanation = EXPLANATIONS.get(policy, f"the lowest score by {policy}")
    why += AUTO_DECODE_EXPLANATION if policy == "auto" and request.decode else explanation
    return Decision(policy, explained[0].instance, why, explained, len(candidates))


def _scores_of_package(name: str, candidates: Sequence[Candidate], request: PlacementRequest) -> Scores:
    """Return the scores by a policy of another package, after a check."""
    try:
        scores = [(float(score), candidate) for score, candidate in policy_of(name)(candidates, request)]
        if not all(math.isfinite(score) for score, _ in scores):
            raise ValueError("a score is not finite; leave out candidates that must not be selected")
        if not scores or not {candidate for _, candidate in scores} <= set(candidates):
            raise ValueError("it must return (score, candidate) of at least one of the candidates that it was given")
    except Exception as error:
        raise PolicyFault(f"the policy {name} failed: {error!r}") from error
    return scores


def _best(scores: Scores, tolerance: float, request: PlacementRequest) -> Scores:
    """Return the best `MAX_EXPLAINED` candidates, the selected one first.

    Args:
        tolerance: relative difference of scores up to which they are equal.
    """
    best = sorted([score for score, _ in scores])[:MAX_EXPLAINED]
    limit = best[0] * (1 + tolerance)
    tied = [scored for scored in scores if scored[0] <= limit]
    if not request.decode:
        tied = _keep_lowest(tied, [request.uncached(c) for _, c in tied])
    tied = _keep_lowest(tied, [c.requests for _, c in tied])
    tied = sorted(_keep_lowest(tied, [c.work_tokens for _, c in tied]), key=_by_score)
    chosen = tied[request.turn % len(tied)]
    listed = sorted([scored for scored in scores if scored[0] <= best[-1]], key=_by_score)[:MAX_EXPLAINED]
    return [chosen, *[scored for scored in listed if scored is not chosen][: MAX_EXPLAINED - 1]]


def _keep_lowest(scores: Scores, amounts: list[int]) -> Scores:
    """Keep the candidates with the lowest amount."""
    lowest = min(amounts)
    return [scored for scored, amount in zip(scores, amounts, strict=True) if amount == lowest]


def _by_score(scored: tuple[float, Candidate]) -> tuple[float, str]:
    """Sort key: score, then instance id."""
    return scored[0], scored[1].instance_id


@dataclass(frozen=True)
class Placement:
    """Instance that computes a prompt, and the reason. Shown in timelines; `way` and `reason` are metric labels.

    Attributes:
        way: `split` (a prefill instance computes the prompt and hands its KV to decode), `decode` (the decode instance
            computes it), `both` (one instance of role `both` serves the request) or `prefill` (a prefill instance serves
            it: for one token there is nothing to decode; no decode instance is available, or it is much slower).
        reason: `threshold` or `forecast` for the choice between `split` and `decode`; `backlog` if decode was chosen because
            prompts wait for prefill, within decode's ITL target; `idle` if prefill, without other prompts, decodes too, since
            decode would miss the target;
            `policy` if the prefill policy could choose a `both` instance; `one_token`,
            `prompt_logprobs`, `no_prefill_instance` or `no_decode_instance` if there was no choice.
        uncached_tokens: prompt tokens that are not cached on the decode instance; None if they were not needed.
        here_seconds: forecast delay if the decode instance computes the prompt.
        there_seconds: forecast delay of a split.
    """

    way: str
    reason: str
    uncached_tokens: int | None = None
    here_seconds: float | None = None
    there_seconds: float | None = None


def place(
    prefill: Candidate,
    decode: Candidate,
    request: PlacementRequest,
    threshold: int | None,
    ttft_target: float | None = None,
    prefills_per_decode: float = 1.0,
) -> Placement:
    """Choose between `split`, `decode`, and `prefill` for a request that the prefill instance keeps.

    With a threshold, `decode` if at most so many prompt tokens are not cached there. Without one, forecast delays decide. The
    delay on the decode instance is the TTFT, plus the time by which the prompt makes steps longer, for each running sequence
    (at least one: an idle instance soon has one). The delay of a split is the TTFT, plus the transfer of the uncached KV. If
    that exceeds the TTFT target and the decode instance has an ITL target, only the TTFTs are compared for requests that take
    prefill longer than decode.

    Args:
        ttft_target: seconds; None: roles do not give way.
        prefills_per_decode: number of prefill instances, divided by that of decode instances.
    """
    uncached = request.uncached(decode)
    if threshold is not None:
        return Placement("decode" if uncached <= threshold else "split", "threshold", uncached)
    here = forecast_ttft(decode, request)
    moved = uncached * decode.token_bytes + (decode.window_bytes(uncached) if decode.windows else 0)
    there = forecast_ttft(prefill, request) + decode.costs.transfer_seconds(moved)
    if request.tokens > prefill.free_tokens:  # what fills it may wait for decode
        there += room_seconds(decode, request.tokens)
    is_late = ttft_target is not None and there > ttft_target and math.isfinite(decode.itl_target)
    if is_late and prefill.prefills and DEFLECTED_TTFT * here <= there:
        cached, step = request.cached_on(prefill), decode.decode_terms()[0]
        answer = min(request.output_tokens, request.mean_answer) * step / (decode.requests + 1)
        if prefill.costs.prefill_seconds(request.tokens - cached, cached) >= answer * prefills_per_decode:
            return Placement("decode", "backlog", uncached, here, there)
    computed = min(uncached, request.tokens - request.stored)
    step_delay = decode.costs.prefill_seconds(computed, request.tokens - computed) - decode.costs.prefill_seconds(0)
    here += max(1, decode.requests) * step_delay
    if here <= there:
        return Placement("decode", "forecast", uncached, here, there)
    if ttft_target is not None and there <= MAX_KEPT_TTFT * ttft_target and _is_kept(prefill, decode, request):
        return Placement("prefill", "idle", uncached, here, there)
    return Placement("split", "forecast", uncached, here, there)


def _is_kept(prefill: Candidate, decode: Candidate, request: PlacementRequest) -> bool:
    """Return whether prefill decodes the request too: decode would miss the ITL target, and prefill, which has no other
    prompts, is much faster. Otherwise both keep their roles: prompts that come later would wait for the streams on prefill,
    and slow them down.
    """
    itl, has_target = forecast_itl(decode, request), math.isfinite(prefill.itl_target)
    if prefill.prefills or not has_target or itl <= min(prefill.itl_target, decode.itl_target):
        return False
    kept = request._replace(cached={prefill.instance_id: request.tokens})  # no KV has to be transferred
    return forecast_itl(prefill, kept) < MAX_KEPT_ITL * itl
