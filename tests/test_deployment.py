"""The ports of a deployment. Its processes are in tests/integration."""

from pdserve.deployment import free_port


def test_a_port_that_is_spoken_for_is_not_given() -> None:
    offers = iter([7, 7, 8])
    assert free_port(but=7, draw=lambda: next(offers)) == 8
