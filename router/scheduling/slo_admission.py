"""Whether a request is let in: a plain function of a snapshot of the instances that would serve it.

A 429 says: later. So a request is refused only for what will be over later: prompts that are queued, streams of others. What
an idle instance could not do in time either is let in when it is idle.
"""

import math

from pdserve.errors import Overloaded
from pdserve.router.scheduling.policy import Candidate, PlacementRequest, time_between_tokens, time_to_first_token
from pdserve.slo import Slo

LONGEST_RETRY_S = 60


def admit(
    slo: Slo, prefill: Candidate, decode: Candidate, request: PlacementRequest, waited: float = 0.0
) -> Overloaded | None:
    """By the forecasts of `auto`, whatever the policies are. Prefill and decode may be the same instance. `waited` is how
    many seconds ago the request came.

    Returns the error for the client, with the seconds after which it may look better, or None.

    A request in which there is nothing to decode has no time between tokens.
    """
    ttft = waited + time_to_first_token(prefill, request)
    if ttft > slo.ttft and prefill.prefills:
        words = f"the first token would come after {ttft:.3g} s, by forecast, because of the prompts before this one"
        words += f"; --slo says {slo.ttft:.3g} s"
        return Overloaded(words, kind="slo_ttft", retry_after_s=_whole(ttft - slo.ttft))
    if prefill is decode:  # no KV has to come from elsewhere
        request = request._replace(cached={decode.instance_id: request.tokens})
    itl = time_between_tokens(decode, request._replace(alone=False))
    if itl > slo.itl and request.output_tokens > 1 and decode.requests:
        words = f"a token would come every {itl:.3g} s, by forecast, because of the others that are being decoded"
        words += f"; --slo says {slo.itl:.3g} s"
        one_ends = itl * decode.output_tokens / decode.requests
        return Overloaded(words, kind="slo_itl", retry_after_s=_whole(one_ends))
    return None


def _whole(seconds: float) -> int:
    return min(LONGEST_RETRY_S, max(1, math.ceil(seconds)))
