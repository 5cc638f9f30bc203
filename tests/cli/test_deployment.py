"""Port selection of a deployment; tests/integration covers its processes."""

import pytest

from pdserve.cli.deployment import PORT_RANGE, free_port


def test_free_port_skips_the_excluded_port(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = iter([7, 7, 8])
    monkeypatch.setattr("pdserve.cli.deployment._random_unused_port", lambda: next(candidates))
    assert free_port(exclude=7) == 8


def test_free_ports_are_below_the_ephemeral_range() -> None:
    assert free_port() in PORT_RANGE
    assert max(PORT_RANGE) + 10_000 < 32_768, (
        "a Redis Cluster's bus port (+10,000) must be below Linux's ephemeral ports too"
    )
