"""How often requests may move again that have moved before, so that trouble is not multiplied."""

SHARE = 0.1  # of a move, that each new request adds
FULL = 100.0


class RetryBudget:
    """The first move of a request costs nothing: when an instance dies, all of its streams move. Further moves cost one each:
    a request that fails wherever it goes, or an outage that goes round, would make the fleet do everything several times.

    Attributes:
        left: moves; not below 0.
    """

    def __init__(self) -> None:
        self.left = FULL

    def earn(self) -> None:
        """A new request has come."""
        self.left = min(FULL, self.left + SHARE)

    def spend(self, moves: int) -> bool:
        """Whether a request may move that has moved so often."""
        if moves == 0:
            return True
        if self.left < 1:
            return False
        self.left -= 1
        return True
