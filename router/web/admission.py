"""The way in for requests: the limits of their keys, and a queue in fair order while as many as may be are under way.

place = await gate.enter(key, plan, receive)    it may have waited, or been refused
place.leave(tokens)                             however the request has ended
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded, RequestError
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.api.streaming import unless_disconnected
from pdserve.router.limits.fair_queue import FairQueue
from pdserve.router.limits.key_file import ApiKey
from pdserve.router.limits.quota import Quota
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web.auth import ANYONE


@dataclass(eq=False)
class AdmissionSlot:
    """What one HTTP request holds: places for its choices, or in the queue, and tokens of its key."""

    admission: "AdmissionController"
    key: str
    choices: int
    prompt_tokens: int
    max_tokens: int  # prompt and outputs
    turn: "asyncio.Future[Overloaded | None]"
    released: bool = False

    def release(self, tokens: int) -> None:
        """Says how many tokens it has taken, prompt and outputs. Harmless when it has left already."""
        if not self.released:
            self.released = True
            self.admission.release(self, tokens)

    async def wait(self) -> None:
        """Raises Overloaded if it has to go because too many wait."""
        refusal = await asyncio.shield(self.turn)  # who stops waiting may still have a turn to give back
        if refusal is not None:
            raise refusal


class AdmissionController:
    """One event loop, no locks."""

    def __init__(self, keys: Sequence[ApiKey], config: RouterConfig, metrics: Metrics) -> None:
        self.keys = keys
        everybody = [*keys, ApiKey(ANYONE, b"")]
        self.quotas = {key.name: Quota(key.limits) for key in everybody}
        self._queue = FairQueue[AdmissionSlot]({key.name: key.weight for key in everybody})
        self._free = self._max_requests = config.max_requests
        self._max_queue = config.max_queue
        self._metrics = metrics

    async def enter(self, key: str, parsed: ParsedRequest, receive: Receive) -> AdmissionSlot | None:
        """None: the client has left while it waited.

        Raises:
            RequestError: it asks for more than its key may have, now or ever, or too many wait.
        """
        prompt_tokens, choices = sum(map(len, parsed.prompts)), len(parsed.requests)
        max_tokens = prompt_tokens + sum(request.sampling.max_tokens for request in parsed.requests)
        now, quota = time.monotonic(), self.quotas[key]
        if (refusal := quota.refusal(choices, max_tokens, now)) is not None:
            raise self._counted(key, refusal)
        quota.take(choices, max_tokens, now)
        turn = asyncio.get_running_loop().create_future()
        slot = AdmissionSlot(self, key, choices, prompt_tokens, max_tokens, turn)
        self._queue.push(key, slot, prompt_tokens, parsed.requests[0].priority)
        self._let_in()
        if turn.done():
            return slot
        if len(self._queue) > self._max_queue:
            self._drop()
        self._metrics.key_waiting.labels(key=key).inc()
        inside = False
        try:
            inside = await unless_disconnected(receive, slot.wait())
        finally:
            self._metrics.key_waiting.labels(key=key).dec()
            if not inside:
                slot.release(0)
        return slot if inside else None

    def release(self, slot: AdmissionSlot, tokens: int) -> None:
        """A place is free again, in the queue or among those under way."""
        tokens = min(tokens, slot.max_tokens)
        self.quotas[slot.key].give_back(slot.choices, slot.max_tokens - tokens, time.monotonic())
        if not slot.turn.done():
            self._queue.remove(slot.key, slot)
        elif slot.turn.result() is None:
            self._free += slot.choices
            self._metrics.key_requests.labels(key=slot.key).dec(slot.choices)
            self._metrics.key_tokens.labels(key=slot.key).inc(tokens)
            self._queue.charge(slot.key, max(0, tokens - slot.prompt_tokens))
        self._let_in()

    def headers(self, key: str) -> dict[str, str]:
        """What is left of a key's limits, in OpenAI's words."""
        return self.quotas[key].headers(time.monotonic())

    def _let_in(self) -> None:
        """Nobody overtakes one that waits for several places."""
        while (slot := self._queue.first()) is not None and slot.choices <= self._free:
            self._queue.pop()
            self._free -= slot.choices
            self._metrics.key_requests.labels(key=slot.key).inc(slot.choices)
            slot.turn.set_result(None)

    def _drop(self) -> None:
        slot = self._queue.drop()
        words = (
            f"{self._max_requests - self._free} requests are under way and {len(self._queue)} wait, which are all that "
        )
        words += "--max-requests and --max-queue allow"
        refusal = Overloaded(words, kind="max_requests", retry_after_s=1)
        slot.turn.set_result(refusal)
        self._counted(slot.key, refusal)

    def _counted(self, key: str, refusal: RequestError) -> RequestError:
        self._metrics.refusals.labels(reason=refusal.kind).inc()
        self._metrics.key_refusals.labels(key=key, reason=refusal.kind).inc()
        return refusal
