"""Port selection of a deployment; tests/integration covers its processes."""

import pytest

from pdserve.cli.deployment import PORT_RANGE, Deployment, free_port
from pdserve.config import UpConfig


def test_free_port_skips_the_excluded_port(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = iter([7, 7, 8])
    monkeypatch.setattr("pdserve.cli.deployment._random_unused_port", lambda: next(candidates))
    assert free_port(exclude=7) == 8


def test_free_ports_are_below_the_ephemeral_range() -> None:
    assert free_port() in PORT_RANGE
    assert max(PORT_RANGE) + 10_000 < 32_768, (
        "a Redis Cluster's bus port (+10,000) must be below Linux's ephemeral ports too"
    )


def test_no_command_line_of_an_instance_has_the_password_of_the_store() -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    with Deployment(UpConfig(connector=url)) as deployment:
        assert not any("secret" in argument for child in deployment.children for argument in child.arguments)
        instances = [child for child in deployment.children if not child.name.startswith("router")]
        assert len(instances) == 2 and all(child.environment["PDSERVE_CONNECTOR"] == url for child in instances)
