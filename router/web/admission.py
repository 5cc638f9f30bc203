"""Admission of HTTP requests: waits for the decisions of the admission queue, and leaves it when the client disconnects."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from pdserve.config import RouterConfig
from pdserve.router.api.generation import Generation
from pdserve.router.api.parsing import UnknownFields
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.backend import ModelInfo
from pdserve.router.limits.admission_queue import AdmissionQueue, AdmissionSlot
from pdserve.router.limits.body_budget import BodyBudget
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey
from pdserve.router.parse_server import ParseServer
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web.parse_queue import ParseQueue


class AdmissionController:
    """Lets HTTP requests wait until they may start. Lives on one event loop, so it needs no locks.

    Attributes:
        metrics: those of the router.
        queue: decides when requests may start.
        body_budget: counts the bodies that are being read or wait to be parsed.
        kv_salts: the salt that separates the KV of each key, by its name, and from that before the last reset.
        has_prefix_cache: requests may find the KV of earlier ones.
        parse_queue: where bodies wait to be parsed. It holds no more than may run and be queued afterwards.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        config: RouterConfig,
        metrics: Metrics,
        now: Callable[[], float],
        parse_server: ParseServer | None = None,
    ) -> None:
        """`now` is the router's clock, in seconds; `parse_server` is for the parse queue."""
        self.keys = keys
        self.metrics = metrics
        self.kv_salts = self._own_salts = {key.name: key.kv_salt for key in keys} | {ANONYMOUS: ""}
        self._adapters = {key.name: key.adapters for key in keys if key.adapters is not None}
        self.has_prefix_cache = config.prefix_caching == "on"
        self.queue = AdmissionQueue(keys, config, metrics, now)
        self.body_budget = BodyBudget(
            has_keys=bool(keys), largest=config.max_body_bytes, on_refusal=lambda key: _count_refusal(metrics, key)
        )
        max_waiting = config.max_requests + config.max_queue
        self.parse_queue = ParseQueue(max_waiting, self.queue.weights, self.body_budget, metrics, parse_server)
        if config.unknown_fields == "ignore":
            self.parse_queue.unknown_fields = UnknownFields(metrics.ignored_fields.inc)

    def served(self, key: str, info: ModelInfo | None) -> ModelInfo | None:
        """Return the model as a key may use it: with the adapters that are declared for it, or all."""
        if info is None or (allowed := self._adapters.get(key)) is None:
            return info
        return replace(info, adapters={name: one for name, one in info.adapters.items() if name in allowed})

    def begin_epoch(self, epoch: int) -> None:
        """Give later requests keys of their own, since the prefix cache was reset."""
        self.kv_salts = {name: f"{salt}/{epoch:x}" for name, salt in self._own_salts.items()}

    async def enter(self, key: str, generation: Generation, client: ClientConnection) -> AdmissionSlot | None:
        """Wait until the request may start; return its slot, or None if the client disconnected while it was queued.

        From here on, the request is that of the key's tenant.

        The caller releases the slot.

        Raises:
            RequestError: the request exceeds a limit of its key, or was dropped from a full queue.
        """
        if self.keys:  # else there is one tenant, which is the default
            tenant = self.queue.tenants[key]
            generation.requests[:] = [structs.replace(request, tenant=tenant) for request in generation.requests]
        prompt_tokens, requests = sum(map(len, generation.prompts)), generation.requests
        sampling = requests[0].sampling
        choices = max(len(requests), len(generation.prompts) * sampling.beam_width)  # instances compute all beams
        max_tokens = prompt_tokens + choices * sampling.max_tokens
        slot = self.queue.enter(key, prompt_tokens, max_tokens, choices, requests[0].priority)
        if slot.is_admitted:
            return slot
        entered = False
        try:
            entered = await client.run(_decision(slot))
        finally:
            if not entered:
                slot.release(0)
        return slot if entered else None


def _count_refusal(metrics: Metrics, key: str) -> None:
    metrics.refusals.labels(reason="body_bytes").inc()
    metrics.key_refusals.labels(key=key, reason="body_bytes").inc()


async def _decision(slot: AdmissionSlot) -> None:
    """Wait until a queued request is admitted. Raises RequestError if it is dropped."""
    decided = asyncio.Event()
    slot.on_decision = decided.set
    await decided.wait()
    if slot.refusal is not None:
        raise slot.refusal
