"""SLO admission: rejects a request whose forecast latency on the selected instances would break the SLO.

The error is a 429, which invites a retry. So only load that will pass counts, such as queued prompts and running
sequences. A request that would break the SLO on an idle instance too is admitted when the instance is idle.
"""

import math

from pdserve.errors import Overloaded
from pdserve.router.scheduling.policy import Candidate, PlacementRequest, forecast_itl, forecast_ttft, room_seconds
from pdserve.slo import Slo

MAX_RETRY_AFTER_S = 60


def check_slo(
    slo: Slo, prefill: Candidate, decode: Candidate, request: PlacementRequest, waited: float = 0.0
) -> Overloaded | None:
    """Return the error for a request that would break the SLO, or None if it is admitted.

    The forecasts are those of the policy `auto`, whatever policies are configured. A request without tokens to decode has
    no ITL.

    Args:
        prefill: the selected prefill instance.
        decode: the selected decode instance; may be the same object as `prefill`.
        waited: seconds since the request arrived.
    """
    ttft = waited + forecast_ttft(prefill, request)
    room = 0.0 if prefill is decode or request.tokens <= prefill.free_tokens else room_seconds(decode, request.tokens)
    if (ttft := ttft + room) > slo.ttft and (prefill.prefills or room):
        cause = "prompts that wait for room on decode" if room else "queued prompts"
        message = f"the forecast TTFT of {ttft:.3g} s exceeds the SLO of {slo.ttft:.3g} s, because of {cause}"
        return Overloaded(message, kind="slo_ttft", retry_after_s=_retry_after(ttft - slo.ttft))
    if prefill is decode:  # no KV has to be transferred
        request = request._replace(cached={decode.instance_id: request.tokens})
    itl = forecast_itl(decode, request._replace(prefills_itself=False))
    if itl > slo.itl and request.output_tokens > 1 and decode.requests:
        message = f"the forecast ITL of {itl:.3g} s exceeds the SLO of {slo.itl:.3g} s, because of running requests"
        next_finish_in = itl * decode.output_tokens / decode.requests
        return Overloaded(message, kind="slo_itl", retry_after_s=_retry_after(next_finish_in))
    return None


def _retry_after(seconds: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))
