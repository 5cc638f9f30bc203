"""Instance selection: filters the instances that can serve a request, and lets the policies pick among them."""

import logging
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
class Selection:
    """The instances selected for a request.

    Attributes:
        request: what the policies were given, with the cached tokens per instance.
        prefill: the instance that computes the prompt, or does everything.
        decode: the decode instance; None if `prefill` does everything.
        decisions: (role, decision of its policy), for the timeline.
    """

    request: PlacementRequest
    prefill: InstanceHandle
    decode: InstanceHandle | None
    placement: Placement
    decisions: list[tuple[str, Decision]]


class InstanceSelector:
    """Selects instances for requests. It keeps no requests; it learns about failed hand-overs from `record_handover`."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics, seed: int) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._reachability = StoreReachability()
        self._policies = {
            "prefill": config.prefill_policy or config.policy,
            "decode": config.decode_policy or config.policy,
        }
        self._local_prefill_tokens = config.local_prefill_tokens
        self._ttft_target = None if config.ttft_target_ms is None else config.ttft_target_ms / 1e3
        self._last_missing_role = ""  # the role without an eligible instance at the last selection; empty: none
        self._turn = seed

    def select(
        self, request: PlacementRequest, keys: Mapping[int, Sequence[bytes]], avoid: InstanceHandle | None = None
    ) -> Selection:
        """Select the instances for a request.

        Args:
            keys: block size → block keys of the prompt.
            avoid: an instance that is not eligible, such as the one that has just failed.

        Raises:
            Unavailable: no instance of any role is eligible.
        """
        eligible = {role: self._eligible(role, avoid, request) for role in ("prefill", "decode")}
        roles = [role for role, instances in eligible.items() if instances]
        if not roles:
            missing = self.missing_roles(avoid) or f"no instance for {request.context} tokens"
            raise Unavailable(f"{missing} is available", kind="no_instance", retry_after_s=1)
        self._turn += 1
        prefills_itself = len(roles) == 1 or all(instance.role == "both" for instance in eligible["prefill"])
        cached, stored = ({}, 0) if request.scores_prompt else self._cached_tokens(request.tokens, keys)
        request = request._replace(turn=self._turn, cached=cached, stored=stored, prefills_itself=prefills_itself)
        if len(roles) == 1:
            return self._select_single_role(request, roles[0], eligible[roles[0]])
        self._last_missing_role = ""
        return self._select_pair(request, eligible)

    def missing_roles(self, avoid: InstanceHandle | None = None) -> str:
        """Describe the roles without an eligible instance, such as `no decode instance`; empty if there is none."""
        roles = [role for role in ("prefill", "decode") if not self._eligible(role, avoid)]
        if not roles:
            return ""
        breakers, now = self._fleet.breakers, self._fleet.now()
        tripped = [name for name in self._fleet.instances if breakers.state(name, now) is not BreakerState.CLOSED]
        exclusion = f" (excluded after repeated faults: {', '.join(tripped)})" if tripped else ""
        return f"no {' and no '.join(roles)} instance{exclusion}"

    def record_handover(self, prefill: pb.Hello, decode: pb.Hello, blocks: int) -> None:
        """Record how many blocks `decode` loaded of those that `prefill` had stored: it shows whether they share a store."""
        if self._reachability.record_handover((prefill.instance_id, decode.instance_id), blocks, self._fleet.now()):
            log.warning(
                "%s (%s://) found none of the blocks that %s (%s://) had stored, in %d consecutive hand-overs: their "
                "--connector URLs seem to lead to different stores, or the store is far too small. Prompts are computed "
                "twice; the two are not paired for a while if there are other instances.",
                decode.instance_id,
                decode.connector,
                prefill.instance_id,
                prefill.connector,
                MAX_FAILED_HANDOVERS,
                extra={"event": "failed_handovers", "instance": decode.instance_id},
            )

    def forget(self, instance: InstanceHandle) -> None:
        """Drop what was recorded about an instance that left."""
        self._reachability.forget(instance.id)

    def _select_single_role(self, request: PlacementRequest, role: str, eligible: list[InstanceHandle]) -> Selection:
        """Let an instance of the only available role do everything; every instance contains the code of both roles."""
        missing = "decode" if role == "prefill" else "prefill"
        if missing != self._last_missing_role:
            self._last_missing_role, extra = missing, {"event": "missing"}
            log.warning("no %s instance is available: %s instances do everything for now", missing, role, extra=extra)
        decision = self._decide(role, request, eligible)
        placement = Placement(role, f"no_{missing}_instance")
        return Selection(request, self._commit(role, decision), None, placement, [(role, decision)])

    def _select_pair(self, request: PlacementRequest, eligible: dict[str, list[InstanceHandle]]) -> Selection:
        """Pick the decode instance, then a prefill instance that can hand over to it, then the placement."""
        if request.output_tokens == 1:  # nothing is left to decode after the first token
            decision = self._decide("prefill", request, eligible["prefill"])
            instance = self._commit("prefill", decision)
            return Selection(request, instance, None, Placement("prefill", "one_token"), [("prefill", decision)])
        decision = self._decide("decode", request, eligible["decode"])
        decode, decisions = self._commit("decode", decision), [("decode", decision)]
        if request.scores_prompt:
            way = "both" if decode.role == "both" else "decode"
            return Selection(request, decode, None, Placement(way, "prompt_logprobs"), decisions)
        partners = self._prefill_partners(decode, eligible["prefill"])
        if partners == [decode]:
            return Selection(request, decode, None, Placement("both", "no_prefill_instance"), decisions)
        decision = self._decide("prefill", request, partners)
        prefill = self._fleet.instances[decision.chosen]
        if decode.role == "both":
            placement = Placement("both" if prefill is decode else "split", "policy")
        else:
            placement = place(
                prefill.candidate, decode.candidate, request, self._local_prefill_tokens, self._ttft_target
            )
        if placement.way == "decode":
            return Selection(request, decode, None, placement, decisions)
        self._commit("prefill", decision)
        decisions.append(("prefill", decision))
        return Selection(request, prefill, decode if placement.way == "split" else None, placement, decisions)

    def _decide(self, role: str, request: PlacementRequest, eligible: list[InstanceHandle]) -> Decision:
        """Apply the role's policy."""
        request = request._replace(decode=role == "decode")
        return decide(self._policies[role], [instance.candidate for instance in eligible], request)

    def _commit(self, role: str, decision: Decision) -> InstanceHandle:
        """Count a decision that takes effect, and return the chosen instance."""
        self._metrics.decisions.labels(role=role, policy=decision.policy).inc()
        return self._fleet.instances[decision.chosen]

    def _cached_tokens(self, num_tokens: int, keys: Mapping[int, Sequence[bytes]]) -> tuple[dict[str, int], int]:
        """Return instance id → cached leading tokens, by the prefix index, and the number of leading tokens in the KV store.

        The last token always has to be computed.
        """
        cached: dict[str, int] = {}
        stored = 0
        for block_size, block_keys in sorted(keys.items(), reverse=True):  # smallest last: the own size matches most
            max_blocks = (num_tokens - 1) // block_size
            for name, blocks in self._fleet.index.match(block_keys).items():
                cached[name] = (blocks if blocks < max_blocks else max_blocks) * block_size
            for blocks in self._fleet.stored.match(block_keys).values():
                stored = max(stored, min(blocks, max_blocks) * block_size)
        return cached, stored

    def _eligible(
        self, role: str, avoid: InstanceHandle | None = None, request: PlacementRequest | None = None
    ) -> list[InstanceHandle]:
        """Return the instances for a role that accept such a request, and whose circuit breakers allow one more."""
        context, version = (0, 0) if request is None else (request.context, request.newest_field[0])
        instances = [
            one
            for one in self._fleet.serving(role, "both")
            if one is not avoid and one.max_model_len >= context and one.hello.protocol_version >= version
        ]
        breakers, now = self._fleet.breakers, self._fleet.now()
        if not breakers.any_faults:
            return instances
        return [instance for instance in instances if breakers.allows(instance.id, len(instance.requests), now)]

    def _prefill_partners(self, decode: InstanceHandle, eligible: list[InstanceHandle]) -> list[InstanceHandle]:
        """Return the instances that may prefill for `decode`: those that reach its store, or all if none does.

        A `both` instance uses prefill instances and itself, but no other `both`.
        """
        now = self._fleet.now()
        if decode.role == "both":
            eligible = [instance for instance in eligible if instance is decode or instance.role == "prefill"]
        if not self._reachability.any_unreachable:
            return eligible
        reachable = [one for one in eligible if not self._reachability.is_unreachable((one.id, decode.id), now)]
        return reachable or eligible
