"""Conditional disaggregation: a prompt is computed on a prefill instance, or on the decode instance itself.

A hand-over costs more than computing a short prompt, or the next turn of a chat whose prefix is in the decode instance's
pool. But while a decode instance computes a prompt, all sequences that it decodes are delayed.
"""

from dataclasses import dataclass

from pdserve.router.scheduling.policy import Candidate, PlacementRequest, forecast_ttft


@dataclass(frozen=True)
class Placement:
    """Instance that computes a prompt, and the reason. Shown in timelines; `way` and `reason` are metric labels.

    Attributes:
        way: `split` (a prefill instance computes the prompt and hands its KV to decode), `decode` (the decode instance
            computes it), `both` (one instance of role `both` serves the request) or `prefill` (a prefill instance serves
            it: for one token there is nothing to decode, or no decode instance is available).
        reason: `threshold` or `forecast` for the choice between `split` and `decode`; `policy` if the prefill policy could
            choose a `both` instance; `one_token`, `no_prefill_instance` or `no_decode_instance` if there was no choice.
        uncached_tokens: prompt tokens that are not cached on the decode instance; None if they were not needed.
        here_seconds: forecast delay if the decode instance computes the prompt.
        there_seconds: forecast delay of a split.
    """

    way: str
    reason: str
    uncached_tokens: int | None = None
    here_seconds: float | None = None
    there_seconds: float | None = None


def place(prefill: Candidate, decode: Candidate, request: PlacementRequest, threshold: int | None) -> Placement:
    """Choose between `split` and `decode`: `decode` if at most `threshold` prompt tokens are not cached there.

    Without a threshold, forecast delays decide. The delay on the decode instance is the TTFT, plus the time by which the
    prompt makes steps longer, for each running sequence (at least one: an idle instance soon has one). The delay of a
    split is the TTFT, plus the transfer of the uncached KV.
    """
    uncached = request.uncached(decode)
    if threshold is not None:
        return Placement("decode" if uncached <= threshold else "split", "threshold", uncached)
    step_delay = decode.costs.prefill_seconds(uncached, request.tokens - uncached) - decode.costs.prefill_seconds(0)
    here = forecast_ttft(decode, request) + max(1, decode.requests) * step_delay
    there = forecast_ttft(prefill, request) + decode.costs.transfer_seconds(uncached * decode.token_bytes)
    return Placement("decode" if here <= there else "split", "forecast", uncached, here, there)
