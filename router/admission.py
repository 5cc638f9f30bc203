"""Whether a request is let in: a plain function of a snapshot of the instances that would serve it.

A 429 says: later. So a request is refused only for what will be over later: prompts that are queued, streams of others. What
an idle instance could not do in time either is let in when it is idle.
"""

import math
from dataclasses import dataclass, replace

from pdserve.router.policy import Ask, Candidate, time_between_tokens, time_to_first_token
from pdserve.slo import Slo

LONGEST_RETRY_S = 60


@dataclass(frozen=True)
class Refusal:
    """Why not, as a label and in words, and after how many whole seconds it may look better."""

    reason: str
    words: str
    retry_after_s: int = 1


def admit(slo: Slo, prefill: Candidate, decode: Candidate, ask: Ask) -> Refusal | None:
    """By the forecasts of `auto`, whatever the policies are. Prefill and decode may be the same instance.

    A request in which there is nothing to decode has no time between tokens.
    """
    ttft = time_to_first_token(prefill, ask)
    if ttft > slo.ttft and prefill.prefills:
        words = f"its first token would come after {ttft:.3g} s, by forecast, because of the prompts before it"
        return Refusal("slo_ttft", f"{words}; --slo says {slo.ttft:.3g} s", _whole(ttft - slo.ttft))
    if prefill is decode:  # no KV has to come from elsewhere
        ask = replace(ask, cached={decode.instance_id: ask.tokens})
    itl = time_between_tokens(decode, replace(ask, alone=False))
    if itl > slo.itl and ask.output_tokens > 1 and decode.requests:
        words = f"its tokens would come every {itl:.3g} s, by forecast, because of the others that are being decoded"
        one_ends = itl * decode.output_tokens / decode.requests
        return Refusal("slo_itl", f"{words}; --slo says {slo.itl:.3g} s", _whole(one_ends))
    return None


def _whole(seconds: float) -> int:
    return min(LONGEST_RETRY_S, max(1, math.ceil(seconds)))
