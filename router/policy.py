"""Who gets the next request: pure functions of a snapshot of the candidates.

A policy scores candidates, the lowest gets the request, and ties go to who has fewest requests, then round. Prefill and
decode instances are picked by a policy each. What a policy cannot judge (a session policy and no session) it leaves to
another by name, and the decision says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import xxhash

SHOWN = 8  # candidates in a decision's explanation


class Load(NamedTuple):
    """What is left to do, in tokens.

    Attributes:
        prefill_tokens: of prompts, still to be computed.
        output_tokens: still to be generated, at most.
        context_tokens: whose KV is read in each decode step.
    """

    requests: int = 1
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0


NOTHING = Load(requests=0)


@dataclass(slots=True, eq=False)
class Candidate:
    """One instance as a policy sees it: all that is left to do there, for whichever router."""

    instance_id: str
    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0

    @property
    def work_tokens(self) -> int:
        return self.prefill_tokens + self.output_tokens

    def replace(self, old: Load, new: Load) -> None:
        """Takes `old` off the load and puts `new` on it."""
        self.requests += new.requests - old.requests
        self.prefill_tokens += new.prefill_tokens - old.prefill_tokens
        self.output_tokens += new.output_tokens - old.output_tokens
        self.context_tokens += new.context_tokens - old.context_tokens


@dataclass(frozen=True)
class Ask:
    """What is to be placed.

    Attributes:
        tokens: of the prompt and of what was generated before a move.
        turn: differs from request to request, by 1 within a router.
        session: the client's name for what belongs together; empty: none.
        cached: instance id → how many leading tokens its pool has, as far as the router knows.
    """

    tokens: int
    turn: int = 0
    session: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)

    def uncached(self, candidate: Candidate) -> int:
        return self.tokens - self.cached.get(candidate.instance_id, 0)


Scores = list[tuple[float, Candidate]]
Policy = Callable[[Sequence[Candidate], Ask], Scores]


class Scored(NamedTuple):
    """A candidate as it was when it was scored."""

    instance: str
    score: float
    requests: int
    prefill_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Decision:
    """What was picked, and from what.

    Attributes:
        policy: the one that decided in the end.
        why: in words.
        candidates: the best few, the chosen one first.
        considered: how many there were.
    """

    policy: str
    chosen: str
    why: str
    candidates: list[Scored]
    considered: int

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "candidates": [one._asdict() for one in self.candidates]}


def round_robin(candidates: Sequence[Candidate], ask: Ask) -> Scores:
    """One after the other, in order of their names."""
    ordered = sorted(candidates, key=lambda c: c.instance_id)
    return [((rank - ask.turn) % len(ordered), candidate) for rank, candidate in enumerate(ordered)]


def least_loaded(candidates: Sequence[Candidate], ask: Ask) -> Scores:
    """The least work left, in tokens."""
    return [(c.work_tokens, c) for c in candidates]


def power_of_two(candidates: Sequence[Candidate], ask: Ask) -> Scores:
    """The less loaded of two drawn at random: several routers with the same news do not all run to the same instance."""
    ordered = sorted(candidates, key=lambda c: c.instance_id)
    return least_loaded(Random(ask.turn).sample(ordered, min(2, len(ordered))), ask)


def session(candidates: Sequence[Candidate], ask: Ask) -> Scores:
    """The instance of the session, by rendezvous hashing: one that leaves moves its own sessions only, a new one takes
    those that are its own from now on."""
    return [(_drawn(ask.session, c.instance_id), c) for c in candidates]


def prefix_aware(candidates: Sequence[Candidate], ask: Ask) -> Scores:
    """The fewest tokens to compute before this request has its turn and its KV: what is queued, and what is not cached."""
    return [(c.work_tokens + ask.uncached(c), c) for c in candidates]


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "session": session,
    "prefix_aware": prefix_aware,
}
WHY = {
    "round_robin": "its turn",
    "least_loaded": "the least work left, in tokens",
    "power_of_two": "the less work left, in tokens, of two drawn at random",
    "session": "the session's place",
    "prefix_aware": "the fewest tokens to compute, queued ones and those not cached",
}


def decide(policy: str, candidates: Sequence[Candidate], ask: Ask) -> Decision:
    """Picks one of the candidates, of which there is at least one."""
    why = ""
    if policy == "session" and not ask.session:
        policy, why = "least_loaded", "there is no session to go by; "
    scores = POLICIES[policy](candidates, ask)
    scores.sort(key=lambda scored: (scored[0], scored[1].requests, scored[1].instance_id))
    score, requests = scores[0][0], scores[0][1].requests
    equal = sum(1 for scored in scores if scored[0] == score and scored[1].requests == requests)
    scores.insert(0, scores.pop(ask.turn % equal))
    shown = [_shown(score, candidate, ask) for score, candidate in scores[:SHOWN]]
    return Decision(policy, scores[0][1].instance_id, why + WHY[policy], shown, len(candidates))


def _drawn(session: str, instance_id: str) -> float:
    """From 0 to 1, the same for the same pair wherever it is asked."""
    return xxhash.xxh3_64_intdigest(f"{session}\0{instance_id}".encode()) / 2**64


def _shown(score: float, candidate: Candidate, ask: Ask) -> Scored:
    cached = ask.tokens - ask.uncached(candidate)
    return Scored(
        candidate.instance_id, score, candidate.requests, candidate.prefill_tokens, candidate.output_tokens, cached
    )
