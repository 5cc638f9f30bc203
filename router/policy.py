"""Who gets the next request: pure functions of a snapshot of the candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One instance as a policy sees it.

    Attributes:
        requests: how many the router has given it that have not ended.
        work_tokens: tokens that these still have to compute there, as far as the router knows.
        free_blocks: blocks that a new request could take, by its last heartbeat.
    """

    instance_id: str
    requests: int
    work_tokens: int
    free_blocks: int


Policy = Callable[[Sequence[Candidate], int], Candidate]


def round_robin(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """One after the other, in order of their names."""
    ordered = sorted(candidates, key=lambda c: c.instance_id)
    return ordered[turn % len(ordered)]


def least_loaded(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The least work left, in tokens; then the fewest requests, then the most room; ties go round."""
    best = min((c.work_tokens, c.requests, -c.free_blocks) for c in candidates)
    equal = [c for c in candidates if (c.work_tokens, c.requests, -c.free_blocks) == best]
    return round_robin(equal, turn)


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}
