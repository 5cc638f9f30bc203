"""Admission control: API key limits, and a fair queue while the maximum number of requests is running.

slot = await admission.enter(key, parsed, receive)    may wait in the queue; raises if refused
slot.release(tokens)                                  however the request ended
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive

from pdserve.config import RouterConfig
from pdserve.errors import Overloaded, RequestError
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.api.streaming import run_unless_disconnected
from pdserve.router.limits.fair_queue import FairQueue
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey
from pdserve.router.limits.quota import Quota
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web.parse_queue import ParseQueue


@dataclass(eq=False)
class AdmissionSlot:
    """The capacity that one HTTP request holds: places for its choices, running or queued, and tokens of its key.

    Attributes:
        key: name of the API key.
        max_tokens: the most tokens that it can use, prompts and outputs.
        decision: pending while the request is queued; None once admitted, an error once refused.
    """

    admission: "AdmissionController"
    key: str
    choices: int
    prompt_tokens: int
    max_tokens: int
    decision: "asyncio.Future[Overloaded | None]"
    released: bool = False

    def release(self, tokens: int) -> None:
        """Return the capacity; `tokens` were used, prompts and outputs. Only the first call has an effect."""
        if not self.released:
            self.released = True
            self.admission.release(self, tokens)

    async def wait(self) -> None:
        """Wait for admission. Raises Overloaded if the request is dropped from a full queue."""
        # Shielded: a waiter that is cancelled may have been admitted already, and `release` reads the result.
        refusal = await asyncio.shield(self.decision)
        if refusal is not None:
            raise refusal


class AdmissionController:
    """Decides when requests may start. Lives on one event loop, so it needs no locks.

    Attributes:
        parse_queue: where bodies wait to be parsed. It holds no more than may run and be queued afterwards.
    """

    def __init__(self, keys: Sequence[ApiKey], config: RouterConfig, metrics: Metrics) -> None:
        self.keys = keys
        all_keys = [*keys, ApiKey(ANONYMOUS, b"")]
        self.quotas = {key.name: Quota(key.limits) for key in all_keys}
        self._queue = FairQueue[AdmissionSlot]({key.name: key.weight for key in all_keys})
        self._free = self._max_requests = config.max_requests
        self._max_queue = config.max_queue
        self._metrics = metrics
        self.parse_queue = ParseQueue(config.max_requests + config.max_queue, metrics)

    async def enter(self, key: str, parsed: ParsedRequest, receive: Receive) -> AdmissionSlot | None:
        """Wait until the request may start; return its slot, or None if the client disconnected while it was queued.

        Raises:
            RequestError: the request exceeds a limit of its key, or was dropped from a full queue.
        """
        prompt_tokens, choices = sum(map(len, parsed.prompts)), len(parsed.requests)
        max_tokens = prompt_tokens + sum(request.sampling.max_tokens for request in parsed.requests)
        now, quota = time.monotonic(), self.quotas[key]
        if (refusal := quota.refusal(choices, max_tokens, now)) is not None:
            self._count_refusal(key, refusal)
            raise refusal
        quota.take(choices, max_tokens, now)
        decision = asyncio.get_running_loop().create_future()
        slot = AdmissionSlot(self, key, choices, prompt_tokens, max_tokens, decision)
        self._queue.push(key, slot, prompt_tokens, parsed.requests[0].priority)
        self._admit_queued()
        if decision.done():
            return slot
        if len(self._queue) > self._max_queue:
            self._drop_one()
        self._metrics.key_waiting.labels(key=key).inc()
        admitted = False
        try:
            admitted = await run_unless_disconnected(receive, slot.wait())
        finally:
            self._metrics.key_waiting.labels(key=key).dec()
            if not admitted:
                slot.release(0)
        return slot if admitted else None

    def release(self, slot: AdmissionSlot, tokens: int) -> None:
        """Free the capacity of a slot, running or queued, and admit requests that now fit."""
        tokens = min(tokens, slot.max_tokens)
        self.quotas[slot.key].give_back(slot.choices, slot.max_tokens - tokens, time.monotonic())
        if not slot.decision.done():
            self._queue.remove(slot.key, slot)
        elif slot.decision.result() is None:
            self._free += slot.choices
            self._metrics.key_requests.labels(key=slot.key).dec(slot.choices)
            self._metrics.key_tokens.labels(key=slot.key).inc(tokens)
            self._queue.charge(slot.key, max(0, tokens - slot.prompt_tokens))
        self._admit_queued()

    def headers(self, key: str) -> dict[str, str]:
        """Return OpenAI's rate-limit headers for the key."""
        return self.quotas[key].headers(time.monotonic())

    def _admit_queued(self) -> None:
        """Admit queued requests in order. A request that needs several places is not overtaken by smaller ones."""
        while (slot := self._queue.peek()) is not None and slot.choices <= self._free:
            self._queue.pop()
            self._free -= slot.choices
            self._metrics.key_requests.labels(key=slot.key).inc(slot.choices)
            slot.decision.set_result(None)

    def _drop_one(self) -> None:
        slot = self._queue.drop()
        running = self._max_requests - self._free
        message = (
            f"the router is full: {running} requests are running and {len(self._queue)} are queued "
            "(limits: --max-requests and --max-queue)"
        )
        refusal = Overloaded(message, kind="max_requests", retry_after_s=1)
        slot.decision.set_result(refusal)
        self._count_refusal(slot.key, refusal)

    def _count_refusal(self, key: str, refusal: RequestError) -> None:
        self._metrics.refusals.labels(reason=refusal.kind).inc()
        self._metrics.key_refusals.labels(key=key, reason=refusal.kind).inc()
