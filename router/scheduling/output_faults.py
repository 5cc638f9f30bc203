"""Faulty outputs of instances. What one client sees may be due to its input; what several see is the instance's fault.

A model may compute NaN for one input on every honest instance, so a single faulty output only fails its request.
"""

from collections import deque

MIN_REQUESTS = 3  # with faulty outputs, within `WINDOW_S`, that count against their instance
MIN_CLIENTS = 2  # that have sent these
WINDOW_S = 60.0
MAX_KEPT = 64  # faults of each instance


class OutputFaults:
    """The latest faulty outputs. The current time is an argument, in monotonic seconds.

    Attributes:
        by_instance: instance id → (time, client, request) of each. Of instances without any of late there is none.
    """

    def __init__(self) -> None:
        self.by_instance: dict[str, deque[tuple[float, str, str]]] = {}

    def record(self, instance_id: str, request_id: str, client: str, now: float) -> bool:
        """Add a faulty output. Return True if it counts against the instance."""
        for name, faults in [*self.by_instance.items()]:  # also of instances that have left
            if now - faults[-1][0] > WINDOW_S:
                del self.by_instance[name]
        faults = self.by_instance.setdefault(instance_id, deque(maxlen=MAX_KEPT))
        faults.append((now, client, request_id))
        return self.is_suspect(instance_id, now)

    def is_suspect(self, instance_id: str, now: float) -> bool:
        """Return True if several requests of several clients have had faulty outputs of this instance."""
        if (faults := self.by_instance.get(instance_id)) is None:
            return False
        while faults and now - faults[0][0] > WINDOW_S:
            faults.popleft()
        if not faults:
            del self.by_instance[instance_id]
        clients = {client for _, client, _ in faults}
        requests = {(client, request) for _, client, request in faults}
        return len(requests) >= MIN_REQUESTS and len(clients) >= MIN_CLIENTS
