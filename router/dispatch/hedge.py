"""Hedged prefills (hedged requests: Dean & Barroso, The Tail at Scale, 2013).

A late prefill is submitted to a second instance too. Both compute the same KV and store it under the same keys; the first
instance to produce a token wins, and the other one is cancelled.
"""

import math
from collections.abc import Callable

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.dispatch.selector import InstanceSelector
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.telemetry.metrics import Metrics


class PrefillHedger:
    """Starts hedges, buffers their outputs, and replays the buffer into `on_output` if the hedge wins."""

    def __init__(
        self,
        delay: float | None,
        selector: InstanceSelector,
        metrics: Metrics,
        on_output: Callable[[InstanceHandle, pb.Output], None],
    ) -> None:
        """`delay` is the number of seconds after which a prefill is late; None disables hedging."""
        self.delay = math.inf if delay is None else delay
        self._selector = selector
        self._metrics = metrics
        self._on_output = on_output

    def check(self, state: RequestState, now: float) -> None:
        """Start a hedge if the request's prefill is late."""
        if not state.hedge_tried and now - state.submitted_at > self.delay:
            self.start(state)

    def start(self, state: RequestState) -> None:
        """Submit the prefill to a second instance, if there is one; at most once per submission of the request."""
        if state.machine.state is not State.PREFILLING or state.hedge_tried:
            return
        assert state.decode is not None
        state.hedge_tried = True
        selected = self._selector.select_hedge(state.placement_request, state.prefill, state.decode)
        if selected is not None:
            state.hedge, decision = selected
            state.timeline.decisions.append(("prefill", decision))
            state.hedge_outputs.clear()
            state.submit(state.hedge, pb.PREFILL, state.submit_frame())
            self._metrics.hedges.labels(outcome="asked").inc()

    def on_output(self, state: RequestState, instance: InstanceHandle, output: pb.Output) -> None:
        """Buffer an output of the hedge. With its first token it wins; with an error it is dropped."""
        state.hedge_outputs.append(output)
        if output.HasField("error"):
            instance.unassign(state.id)
            state.hedge = None
        elif output.token_ids:
            state.cancel_on(state.prefill)
            self.promote(state)

    def promote(self, state: RequestState) -> None:
        """Make the hedge the request's prefill instance, and replay its buffered outputs."""
        assert state.hedge is not None
        state.prefill, state.hedge = state.hedge, None
        state.timeline.prefill_instance = state.prefill.id
        self._metrics.hedges.labels(outcome="preferred").inc()
        for output in state.hedge_outputs:
            self._on_output(state.prefill, output)

    def cancel(self, state: RequestState) -> None:
        """Cancel the hedge, if there is one."""
        if state.hedge is not None:
            state.cancel_on(state.hedge)
            state.hedge = None
