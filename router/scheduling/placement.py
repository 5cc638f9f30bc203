"""Who computes a prompt: a prefill instance, whose KV decode then gets, or the decode instance itself.

A hand-over costs more than a short prompt does, or the next turn of a chat that decode has in its pool. But while decode
computes a prompt, everybody who decodes there waits.
"""

from dataclasses import dataclass

from pdserve.router.scheduling.policy import Candidate, PlacementRequest, time_to_first_token


@dataclass(frozen=True)
class Placement:
    """Who computes a prompt, and why.

    Attributes:
        way: `split` (a prefill instance, then decode gets its KV), `decode` (the decode instance itself), `both` (an
            instance that does both) or `prefill` (of one token there is nothing to decode, or nobody to do it).
        reason: `threshold` or `forecast` for the choice between the first two, `policy` if prefill's policy had a `both` to
            choose; else what left no choice: `one_token`, `no_prefill_instance`, `no_decode_instance`.
        uncached_tokens: of the prompt, on the decode instance; None where nobody asked.
        here_seconds, there_seconds: forecasts of the delay if the decode instance computes it, and if it is split.
    """

    way: str
    reason: str
    uncached_tokens: int | None = None
    here_seconds: float | None = None
    there_seconds: float | None = None


def place(prefill: Candidate, decode: Candidate, request: PlacementRequest, threshold: int | None) -> Placement:
    """Splits the request, or leaves the prompt to decode if `threshold` tokens of it or fewer are not cached there.

    Without a threshold, forecasts decide. Here the delay is that of the first token, and of everybody who decodes there, for
    as long as this prompt makes their steps longer (at least one: if nobody does now, somebody soon will). There it is that
    of the first token, and of the KV's way to decode.
    """
    uncached = request.uncached(decode)
    if threshold is not None:
        return Placement("decode" if uncached <= threshold else "split", "threshold", uncached)
    longer = decode.costs.prefill_seconds(uncached, request.tokens - uncached) - decode.costs.prefill_seconds(0)
    here = time_to_first_token(decode, request) + max(1, decode.requests) * longer
    there = time_to_first_token(prefill, request) + decode.costs.transfer_seconds(uncached * decode.token_bytes)
    return Placement("decode" if here <= there else "split", "forecast", uncached, here, there)
