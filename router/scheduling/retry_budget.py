"""Retry budget for migrations (as in Twitter's Finagle), so that a fault does not multiply the load."""

DEPOSIT = 0.1  # migrations that each new request adds to the budget
CAPACITY = 100.0


class RetryBudget:
    """Token bucket that is filled by new requests and drained by migrations of requests that have migrated before.

    The first migration of a request is free: when an instance dies, all of its streams have to move. Without a limit on the
    further ones, a request that fails everywhere, or an outage that spreads, would make the fleet compute everything
    several times.

    Attributes:
        balance: migrations that the budget still allows; from 0 to `CAPACITY`.
    """

    def __init__(self) -> None:
        self.balance = CAPACITY

    def deposit(self) -> None:
        """Credit one new request."""
        self.balance = min(CAPACITY, self.balance + DEPOSIT)

    def try_withdraw(self, previous_migrations: int) -> bool:
        """Charge one migration. Return False if the request has migrated before and the budget is exhausted."""
        if previous_migrations == 0:
            return True
        if self.balance < 1:
            return False
        self.balance -= 1
        return True
