"""A prefill that is late is asked of another instance too.

Who has the first token first goes on; both compute, and store under the same keys, the same KV.
"""

import math
from collections.abc import Callable

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.handover import State
from pdserve.router.dispatch.request_state import Flight
from pdserve.router.dispatch.selector import Chooser
from pdserve.router.instances.fleet import Member
from pdserve.router.telemetry.metrics import Metrics


class Hedges:
    """What the second one says is held back until it turns out to be the faster one; then `on_output` gets it."""

    def __init__(
        self,
        after: float | None,
        chooser: Chooser,
        metrics: Metrics,
        on_output: Callable[[Member, pb.Output], None],
    ) -> None:
        """A prefill is late `after` so many seconds; None: never."""
        self.after = math.inf if after is None else after
        self._chooser = chooser
        self._metrics = metrics
        self._on_output = on_output

    def watch(self, flight: Flight, now: float) -> None:
        if not flight.hedged and now - flight.started > self.after:
            self.ask(flight)

    def ask(self, flight: Flight) -> None:
        if flight.machine.state is not State.PREFILLING or flight.hedged:
            return
        assert flight.decode is not None
        flight.hedged = True
        second = self._chooser.second(flight.ask, flight.prefill, flight.decode)
        if second is not None:
            flight.hedge, decision = second
            flight.timeline.decisions.append(("prefill", decision))
            flight.held.clear()
            flight.submit(flight.hedge, pb.PREFILL, flight.submission())
            self._metrics.hedges.labels(outcome="asked").inc()

    def on_output(self, flight: Flight, member: Member, output: pb.Output) -> None:
        flight.held.append(output)
        if output.HasField("error"):
            member.release(flight.id)
            flight.hedge = None
        elif output.token_ids:
            flight.let_go(flight.prefill)
            self.prefer(flight)

    def prefer(self, flight: Flight) -> None:
        """It takes the first one's place, and has said what it has said."""
        assert flight.hedge is not None
        flight.prefill, flight.hedge = flight.hedge, None
        flight.timeline.prefill_instance = flight.prefill.id
        self._metrics.hedges.labels(outcome="preferred").inc()
        for output in flight.held:
            self._on_output(flight.prefill, output)

    def drop(self, flight: Flight) -> None:
        if flight.hedge is not None:
            flight.let_go(flight.hedge)
            flight.hedge = None
