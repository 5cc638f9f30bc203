"""Conditional disaggregation: a prompt is computed on a prefill instance, or on the decode instance itself.

A hand-over costs more than computing a short prompt, or the next turn of a chat whose prefix is in the decode instance's
pool. But while a decode instance computes a prompt, all sequences that it decodes are delayed. With an ITL target, it
computes only as much of a prompt per step as the target leaves, so it can take prompts that would wait too long for prefill.
And a prefill instance without other prompts can keep the request that it gets, and decode it.
"""

import math
from dataclasses import dataclass

from pdserve.router.scheduling.policy import Candidate, PlacementRequest, forecast_itl, forecast_ttft

MAX_KEPT_TTFT = 0.5  # of the target, up to which prefill has time to spare for decoding
MAX_KEPT_ITL = 0.7  # of the ITL on decode, at which prefill keeps a request: prompts that come later will slow it down


@dataclass(frozen=True)
class Placement:
    """Instance that computes a prompt, and the reason. Shown in timelines; `way` and `reason` are metric labels.

    Attributes:
        way: `split` (a prefill instance computes the prompt and hands its KV to decode), `decode` (the decode instance
            computes it), `both` (one instance of role `both` serves the request) or `prefill` (a prefill instance serves
            it: for one token there is nothing to decode; no decode instance is available, or it is much slower).
        reason: `threshold` or `forecast` for the choice between `split` and `decode`; `backlog` if decode was chosen because
            prompts wait for prefill, within decode's ITL target; `idle` if prefill, without other prompts, decodes too;
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
) -> Placement:
    """Choose between `split`, `decode`, and `prefill` for a request that the prefill instance keeps.

    With a threshold, `decode` if at most so many prompt tokens are not cached there. Without one, forecast delays decide. The
    delay on the decode instance is the TTFT, plus the time by which the prompt makes steps longer, for each running sequence
    (at least one: an idle instance soon has one). The delay of a split is the TTFT, plus the transfer of the uncached KV. If
    that exceeds the TTFT target and the decode instance has an ITL target, only the TTFTs are compared.

    Args:
        ttft_target: seconds; None: roles do not give way.
    """
    uncached = request.uncached(decode)
    if threshold is not None:
        return Placement("decode" if uncached <= threshold else "split", "threshold", uncached)
    here = forecast_ttft(decode, request)
    there = forecast_ttft(prefill, request) + decode.costs.transfer_seconds(uncached * decode.token_bytes)
    is_late = ttft_target is not None and there > ttft_target
    if is_late and math.isfinite(decode.itl_target) and prefill.prefills and here <= there:
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
    """Return whether prefill decodes the request too: it has no other prompts, an ITL target, and is much faster."""
    if prefill.prefills or math.isinf(prefill.itl_target):
        return False
    kept = request._replace(cached={prefill.instance_id: request.tokens})  # no KV has to be transferred
    return forecast_itl(prefill, kept) < MAX_KEPT_ITL * forecast_itl(decode, request)
