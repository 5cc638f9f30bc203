"""A prefill that is late is asked of another instance too.

Who has the first token first goes on; both compute, and store under the same keys, the same KV.
"""

import math
from collections.abc import Callable

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.dispatch.selector import InstanceSelector
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.telemetry.metrics import Metrics


class Hedges:
    """What the second one says is held back until it turns out to be the faster one; then `on_output` gets it."""

    def __init__(
        self,
        after: float | None,
        selector: InstanceSelector,
        metrics: Metrics,
        on_output: Callable[[InstanceHandle, pb.Output], None],
    ) -> None:
        """A prefill is late `after` so many seconds; None: never."""
        self.after = math.inf if after is None else after
        self._selector = selector
        self._metrics = metrics
        self._on_output = on_output

    def watch(self, state: RequestState, now: float) -> None:
        if not state.hedged and now - state.started > self.after:
            self.start(state)

    def start(self, state: RequestState) -> None:
        if state.machine.state is not State.PREFILLING or state.hedged:
            return
        assert state.decode is not None
        state.hedged = True
        second = self._selector.second(state.placement_request, state.prefill, state.decode)
        if second is not None:
            state.hedge, decision = second
            state.timeline.decisions.append(("prefill", decision))
            state.held.clear()
            state.submit(state.hedge, pb.PREFILL, state.submission())
            self._metrics.hedges.labels(outcome="asked").inc()

    def on_output(self, state: RequestState, instance: InstanceHandle, output: pb.Output) -> None:
        state.held.append(output)
        if output.HasField("error"):
            instance.release(state.id)
            state.hedge = None
        elif output.token_ids:
            state.let_go(state.prefill)
            self.prefer(state)

    def prefer(self, state: RequestState) -> None:
        """It takes the first one's place, and has said what it has said."""
        assert state.hedge is not None
        state.prefill, state.hedge = state.hedge, None
        state.timeline.prefill_instance = state.prefill.id
        self._metrics.hedges.labels(outcome="preferred").inc()
        for output in state.held:
            self._on_output(state.prefill, output)

    def drop(self, state: RequestState) -> None:
        if state.hedge is not None:
            state.let_go(state.hedge)
            state.hedge = None
