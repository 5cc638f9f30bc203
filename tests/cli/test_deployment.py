"""The ports of a deployment. Its processes are in tests/integration."""

import pytest

from pdserve.cli.deployment import PORTS, free_port


def test_a_port_that_is_spoken_for_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = iter([7, 7, 8])
    monkeypatch.setattr("pdserve.cli.deployment._unused_port", lambda: next(offers))
    assert free_port(but=7) == 8


def test_no_connection_of_another_can_take_a_port_before_it_is_listened_on() -> None:
    assert free_port() in PORTS
    assert max(PORTS) + 10_000 < 32_768, "where Linux begins with those of connections, and a Redis Cluster's bus too"
