"""The retry budget for repeated migrations."""

from pdserve.router.scheduling.retry_budget import CAPACITY, DEPOSIT, RetryBudget


def test_first_migrations_are_free_and_further_ones_need_deposits() -> None:
    budget = RetryBudget()
    assert all(budget.try_withdraw(0) for _ in range(1000)) and budget.balance == CAPACITY
    assert [budget.try_withdraw(1) for _ in range(101)] == [True] * 100 + [False]
    for _ in range(9):
        budget.deposit()
    assert not budget.try_withdraw(2)
    for _ in range(2):
        budget.deposit()
    assert budget.try_withdraw(2)
    for _ in range(int(2 * CAPACITY / DEPOSIT)):
        budget.deposit()
    assert budget.balance == CAPACITY
