"""Instance selection: filters the instances that can serve a request, and lets the policies pick among them."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.request_state import Needs, RequestState
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.breaker import BreakerState
from pdserve.router.scheduling.policy import (
    Decision,
    Placement,
    PlacementRequest,
    PolicyFault,
    decide,
    place,
    policy_of,
)
from pdserve.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
MAX_FAILED_HANDOVERS = 3  # consecutive hand-overs without a block after which a pair counts as unreachable
RETRY_AFTER_S = 300.0
FALLBACK_POLICY = "least_loaded"

Pair = tuple[str, str]  # ids of a prefill and a decode instance


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
    """Selects instances for requests. It keeps no requests; it learns about failed hand-overs from `record_handover`.

    Attributes:
        failed_handovers: those of `StoreReachability`.
        mean_answer: as in `PlacementRequest`.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics, seed: int) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._reachability = StoreReachability()
        self.failed_handovers = self._reachability.failed_handovers
        self._policies = {
            "prefill": config.prefill_policy or config.policy,
            "decode": config.decode_policy or config.policy,
        }
        for policy in self._policies.values():
            policy_of(policy)  # one that cannot be imported is an error at the start
        self._local_prefill_tokens = config.local_prefill_tokens
        self._ttft_target = None if config.ttft_target_ms is None else config.ttft_target_ms / 1e3
        self._last_missing_role = ""  # the role without an eligible instance at the last selection; empty: none
        self._turn = seed
        self.mean_answer = math.inf

    def select(self, state: RequestState) -> Selection:
        """Select the instances for a request.

        Raises:
            Unavailable: no instance of any role is eligible.
        """
        needs = state.needs
        prefills, decodes = self._eligible("prefill", needs), self._eligible("decode", needs)
        if not prefills and not decodes:
            what = f" with the adapter {state.request.adapter_name!r}" if needs.adapter else ""
            missing = self.missing_roles(Needs(left=needs.left)) or f"no instance{what} for {needs.context} tokens"
            if state.is_suspect:
                missing = "no instance that has been heard from since its last fault"
            raise Unavailable(f"{missing} is available", kind="no_instance", retry_after_s=1)
        self._turn += 1
        scores_prompt = not state.is_plain and state.scores_prompt
        cached, stored = ({}, 0) if scores_prompt else self._cached_tokens(state.num_tokens, state.request.keys)
        request = PlacementRequest(
            state.num_tokens,
            self._turn,
            state.request.session,
            cached,
            state.remaining_tokens + bool(state.request.sampling.beam_width),  # a search decodes for one token, too
            prefills_itself=not prefills or not decodes or all([one.role == "both" for one in prefills]),
            stored=stored,
            mean_answer=self.mean_answer,
        )
        if not prefills or not decodes:
            selection = self._select_single_role(request, "prefill" if prefills else "decode", prefills or decodes)
        else:
            self._last_missing_role = ""
            selection = self._select_pair(request, prefills, decodes, scores_prompt)
        for role, decision in selection.decisions:
            self._metrics.decisions.labels(role=role, policy=decision.policy).inc()
        return selection

    def missing_roles(self, needs: Needs | None = None) -> str:
        """Describe the roles without an eligible instance, such as `no decode instance`; empty if there is none."""
        roles = [role for role in ("prefill", "decode") if not self._eligible(role, needs or Needs())]
        if not roles:
            return ""
        breakers, now = self._fleet.breakers, self._fleet.now()
        tripped = [name for name in self._fleet.instances if breakers.state(name, now) is not BreakerState.CLOSED]
        exclusion = f" (excluded after repeated faults: {', '.join(tripped)})" if tripped else ""
        return f"no {' and no '.join(roles)} instance{exclusion}"

    def record_handover(self, prefill: pb.Hello, decode: pb.Hello, blocks: int) -> None:
        """Record how many blocks `decode` loaded of those that `prefill` had stored, once it has tried to load any: it shows
        whether they share a store. Some blocks are no news while there are no `failed_handovers`, nor is what an instance
        had stored that has left.
        """
        if prefill.instance_id not in self._fleet.instances:
            return
        if not blocks:
            self._metrics.failed_handovers.labels(prefill=prefill.instance_id, decode=decode.instance_id).inc()
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
        counter = self._metrics.failed_handovers
        samples = [sample for metric in counter.collect() for sample in metric.samples]
        for pair in {(sample.labels["prefill"], sample.labels["decode"]) for sample in samples}:
            if instance.id in pair:
                counter.remove(*pair)

    def _select_single_role(self, request: PlacementRequest, role: str, eligible: list[InstanceHandle]) -> Selection:
        """Let an instance of the only available role do everything; every instance contains the code of both roles."""
        missing = "decode" if role == "prefill" else "prefill"
        if missing != self._last_missing_role and not self._eligible(missing, Needs()):
            self._last_missing_role, extra = missing, {"event": "missing"}
            log.warning("no %s instance is available: %s instances do everything for now", missing, role, extra=extra)
        decision, instance = self._decide(role, request._replace(decode=role == "decode"), eligible)
        return Selection(request, instance, None, Placement(role, f"no_{missing}_instance"), [(role, decision)])

    def _select_pair(
        self,
        request: PlacementRequest,
        prefills: list[InstanceHandle],
        decodes: list[InstanceHandle],
        scores_prompt: bool,
    ) -> Selection:
        """Pick the decode instance, then a prefill instance that can hand over to it, then the placement."""
        if request.output_tokens == 1:  # nothing is left to decode after the first token
            decision, instance = self._decide("prefill", request, prefills)
            return Selection(request, instance, None, Placement("prefill", "one_token"), [("prefill", decision)])
        decision, decode = self._decide("decode", request._replace(decode=True), decodes)
        decisions = [("decode", decision)]
        if scores_prompt:
            way = "both" if decode.role == "both" else "decode"
            return Selection(request, decode, None, Placement(way, "prompt_logprobs"), decisions)
        if decode.role == "both" or self._reachability.unreachable_until:
            prefills = self._prefill_partners(decode, prefills)
        if prefills == [decode]:
            return Selection(request, decode, None, Placement("both", "no_prefill_instance"), decisions)
        decision, prefill = self._decide("prefill", request, prefills)
        if decode.role == "both":
            placement = Placement("both" if prefill is decode else "split", "policy")
        else:
            ratio = len(prefills) / len(decodes)
            placement = place(
                prefill.candidate, decode.candidate, request, self._local_prefill_tokens, self._ttft_target, ratio
            )
        if placement.way == "decode":
            return Selection(request, decode, None, placement, decisions)
        decisions.append(("prefill", decision))
        return Selection(request, prefill, decode if placement.way == "split" else None, placement, decisions)

    def _decide(
        self, role: str, request: PlacementRequest, eligible: list[InstanceHandle]
    ) -> tuple[Decision, InstanceHandle]:
        """Apply the role's policy, and return its decision with the chosen instance.

        If a policy of another package fails, the least loaded instance is taken: its fault must not end streams.
        """
        candidates = [instance.candidate for instance in eligible]
        try:
            decision = decide(self._policies[role], candidates, request)
        except PolicyFault as fault:
            log.error("%s; the least loaded instance is taken", fault, exc_info=True, extra={"event": "policy"})
            decision = decide(FALLBACK_POLICY, candidates, request)
            decision = replace(decision, why=f"{fault}; {decision.why}")
        return decision, self._fleet.instances[decision.chosen]

    def _cached_tokens(self, num_tokens: int, keys: Mapping[int, Sequence[bytes]]) -> tuple[dict[str, int], int]:
        """Return instance id → cached leading tokens, by the prefix index, and the number of leading tokens in the KV store.

        The last token always has to be computed.
        """
        cached: dict[str, int] = {}
        stored = 0
        for block_size, block_keys in sorted(keys.items(), reverse=True):  # smallest last: the own size matches most
            max_blocks = (num_tokens - 1) // block_size
            for name, blocks in self._fleet.index.match(block_keys).items():
                blocks = blocks if blocks < max_blocks else max_blocks
                if len(groups := self._fleet.instances[name].groups) > 1:
                    windows = [group.window for group in groups[1:]]
                    blocks = self._fleet.index.usable(name, block_keys, blocks, windows, block_size)
                cached[name] = blocks * block_size
            for blocks in self._fleet.stored.match(block_keys).values():
                stored = max(stored, min(blocks, max_blocks) * block_size)
        return cached, stored

    def _eligible(self, role: str, needs: Needs) -> list[InstanceHandle]:
        """Return the instances for a role that may take a request, and whose circuit breakers allow one more."""
        instances = [
            one
            for one in self._fleet.serving[role]
            if one is not needs.left
            and one.max_model_len >= needs.context
            and one.hello.protocol_version >= needs.version
            and one.last_frame_at >= needs.heard_since
            and (not needs.adapter or needs.adapter in one.adapters)
        ]
        breakers = self._fleet.breakers
        if not breakers.records:
            return instances
        now = self._fleet.now()
        return [one for one in instances if breakers.allows(one.id, len(one.requests), now)]

    def _prefill_partners(self, decode: InstanceHandle, eligible: list[InstanceHandle]) -> list[InstanceHandle]:
        """Return the instances that may prefill for `decode`: those that reach its store, or all if none does.

        A `both` instance uses prefill instances and itself, but no other `both`.
        """
        now = self._fleet.now()
        if decode.role == "both":
            eligible = [instance for instance in eligible if instance is decode or instance.role == "prefill"]
        reachable = [one for one in eligible if not self._reachability.is_unreachable((one.id, decode.id), now)]
        return reachable or eligible


class StoreReachability:
    """Finds (prefill, decode) pairs that do not share a KV store, by hand-overs in which no block arrives.

    The connectors' names do not tell: one server may have two names, and two hosts have shared memory of the same name. The
    evidence is whether decode ever loads KV that prefill has stored. The current time is an argument, in monotonic seconds.

    A pair is unreachable for `RETRY_AFTER_S` after `MAX_FAILED_HANDOVERS` consecutive failures. It is then tried again,
    and one more failure makes it unreachable again.

    Attributes:
        failed_handovers: of each pair, how many in a row; without those that shared a block last.
        unreachable_until: of the pairs that were unreachable since they last shared a block.
    """

    def __init__(self) -> None:
        self.failed_handovers: dict[Pair, int] = {}
        self.unreachable_until: dict[Pair, float] = {}

    def record_handover(self, pair: Pair, blocks: int, now: float) -> bool:
        """Record how many stored blocks decode received. Return True if the pair becomes unreachable for the first time."""
        if blocks:
            self.failed_handovers.pop(pair, None)
            self.unreachable_until.pop(pair, None)
            return False
        self.failed_handovers[pair] = self.failed_handovers.get(pair, 0) + 1
        if self.failed_handovers[pair] >= MAX_FAILED_HANDOVERS:
            self.unreachable_until[pair] = now + RETRY_AFTER_S
        return self.failed_handovers[pair] == MAX_FAILED_HANDOVERS

    def is_unreachable(self, pair: Pair, now: float) -> bool:
        return now < self.unreachable_until.get(pair, now)

    def forget(self, instance_id: str) -> None:
        """Drop all pairs of an instance that left; it may come back with other settings."""
        for pair in [pair for pair in self.failed_handovers if instance_id in pair]:
            del self.failed_handovers[pair]
            self.unreachable_until.pop(pair, None)
