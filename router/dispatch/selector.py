"""Who serves a request: whoever could, those of them who can work together, and one of these by the policies."""

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.breaker import BreakerState
from pdserve.router.scheduling.placement import Placement, place
from pdserve.router.scheduling.policy import Decision, PlacementRequest, decide
from pdserve.router.scheduling.store_reachability import MAX_FAILED_HANDOVERS, StoreReachability
from pdserve.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Who is to serve a request.

    Attributes:
        ask: with what each instance has cached.
        decode: None: prefill does everything.
        decisions: (role, how its instance was picked), for the timeline.
    """

    request: PlacementRequest
    prefill: InstanceHandle
    decode: InstanceHandle | None
    placement: Placement
    decisions: list[tuple[str, Decision]]


class InstanceSelector:
    """Knows instances and what was asked; what becomes of a request, it learns from `handed_over` only."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._reachability = StoreReachability()
        self._policies = {
            "prefill": config.prefill_policy or config.policy,
            "decode": config.decode_policy or config.policy,
        }
        self._local_prefill_tokens = config.local_prefill_tokens
        self._missed = ""  # the role that nobody had at the last choice
        self._turn = secrets.randbits(32)  # routers that start together do not go round together

    def select(
        self, request: PlacementRequest, keys: Mapping[int, Sequence[bytes]], avoid: InstanceHandle | None = None
    ) -> Choice:
        """Picks the prefill and the decode instance. `keys` are the prompt's, by block size.

        Raises:
            Unavailable: there is none of either kind.
        """
        able = {role: self._able(role, avoid) for role in ("prefill", "decode")}
        there = [role for role, instances in able.items() if instances]
        if not there:
            raise Unavailable(f"{self.missing(avoid)} is there to take it", kind="no_instance", retry_after_s=1)
        self._turn += 1
        alone = len(there) == 1 or all(instance.role == "both" for instance in able["prefill"])
        request = request._replace(turn=self._turn, cached=self._cached(request.tokens, keys), alone=alone)
        if len(there) == 1:
            return self._stand_in(request, there[0], able[there[0]])
        self._missed = ""
        return self._place(request, able)

    def second(
        self, request: PlacementRequest, first: InstanceHandle, decode: InstanceHandle
    ) -> tuple[InstanceHandle, Decision] | None:
        """Picks who prefills for `decode` what `first` prefills too, if there is anybody."""
        able = [
            instance
            for instance in self._partners(decode, self._able("prefill", avoid=first))
            if instance is not decode
        ]
        able = [instance for instance in able if instance.hello.namespace == first.hello.namespace]
        if not able:
            return None
        decision = self._decide("prefill", request._replace(turn=self._turn), able)
        return self._take("prefill", decision), decision

    def missing(self, avoid: InstanceHandle | None = None) -> str:
        """Which role nobody has, such as `no decode instance`, or nothing."""
        roles = [role for role in ("prefill", "decode") if not self._able(role, avoid)]
        if not roles:
            return ""
        breakers, now = self._fleet.breakers, time.monotonic()
        out = [name for name in self._fleet.instances if breakers.state(name, now) is not BreakerState.CLOSED]
        but = f" but {', '.join(out)}, out after repeated faults," if out else ""
        return f"no {' and no '.join(roles)} instance{but}"

    def handed_over(self, prefill: pb.Hello, decode: pb.Hello, blocks: int) -> None:
        """Whether the two reach the same store is known once decode has tried to load what prefill stored: so many came."""
        if self._reachability.handed_over((prefill.instance_id, decode.instance_id), blocks, time.monotonic()):
            log.warning(
                "%s (%s://) found nothing of what %s (%s://) had stored, %d times in a row: their --connector seems to lead "
                "to different stores, or to one that is far too small. Prompts are computed twice; the two are kept apart "
                "for a while if there are others.",
                decode.instance_id,
                decode.connector,
                prefill.instance_id,
                prefill.connector,
                MAX_FAILED_HANDOVERS,
                extra={"event": "failed_handovers", "instance": decode.instance_id},
            )

    def forget(self, instance: InstanceHandle) -> None:
        """It has left."""
        self._reachability.forget(instance.id)

    def _stand_in(self, request: PlacementRequest, role: str, able: list[InstanceHandle]) -> Choice:
        """One of those who are there does everything: its role says what an instance is asked for, not what it can do."""
        missing = "decode" if role == "prefill" else "prefill"
        if missing != self._missed:
            self._missed, extra = missing, {"event": "missing"}
            log.warning("no %s instance is there: %s instances do everything meanwhile", missing, role, extra=extra)
        decision = self._decide(role, request, able)
        placement = Placement(role, f"no_{missing}_instance")
        return Choice(request, self._take(role, decision), None, placement, [(role, decision)])

    def _place(self, request: PlacementRequest, able: dict[str, list[InstanceHandle]]) -> Choice:
        if request.output_tokens == 1:  # the first token is all there is to do
            decision = self._decide("prefill", request, able["prefill"])
            instance = self._take("prefill", decision)
            return Choice(request, instance, None, Placement("prefill", "one_token"), [("prefill", decision)])
        decision = self._decide("decode", request, able["decode"])
        decode, decisions = self._take("decode", decision), [("decode", decision)]
        partners, both = self._partners(decode, able["prefill"]), decode.role == "both"
        if partners == [decode]:
            return Choice(request, decode, None, Placement("both", "no_prefill_instance"), decisions)
        decision = self._decide("prefill", request, partners)
        prefill = self._fleet.instances[decision.chosen]
        if both:
            placement = Placement("both" if prefill is decode else "split", "policy")
        else:
            placement = place(prefill.load, decode.load, request, self._local_prefill_tokens)
        if placement.way == "decode":
            return Choice(request, decode, None, placement, decisions)
        self._take("prefill", decision)
        decisions.append(("prefill", decision))
        return Choice(request, prefill, None if prefill is decode else decode, placement, decisions)

    def _decide(self, role: str, request: PlacementRequest, able: list[InstanceHandle]) -> Decision:
        """What the role's policy says."""
        request = request._replace(decode=role == "decode")
        return decide(self._policies[role], [instance.load for instance in able], request)

    def _take(self, role: str, decision: Decision) -> InstanceHandle:
        """Counts a decision that is carried out."""
        self._metrics.decisions.labels(role=role, policy=decision.policy).inc()
        return self._fleet.instances[decision.chosen]

    def _cached(self, tokens: int, keys: Mapping[int, Sequence[bytes]]) -> dict[str, int]:
        """Leading tokens of the prompt that each instance need not compute, by the index. The last token always is."""
        cached: dict[str, int] = {}
        for block_size, blocks_keys in sorted(keys.items(), reverse=True):  # an instance's own tells the most
            most = (tokens - 1) // block_size
            for name, blocks in self._fleet.index.match(blocks_keys).items():
                cached[name] = (blocks if blocks < most else most) * block_size
        return cached

    def _able(self, role: str, avoid: InstanceHandle | None = None) -> list[InstanceHandle]:
        able = [instance for instance in self._fleet.serving(role, "both") if instance is not avoid]
        breakers, now = self._fleet.breakers, time.monotonic()
        if not breakers.any_failed:
            return able
        return [instance for instance in able if breakers.allows(instance.id, len(instance.requests), now)]

    def _partners(self, decode: InstanceHandle, able: list[InstanceHandle]) -> list[InstanceHandle]:
        """Who may prefill for it: those that reach its store, if any do. A `both` asks no other `both`, but itself."""
        now = time.monotonic()
        if decode.role == "both":
            able = [instance for instance in able if instance is decode or instance.role == "prefill"]
        if not self._reachability.any_apart:
            return able
        return [instance for instance in able if not self._reachability.apart((instance.id, decode.id), now)] or able
