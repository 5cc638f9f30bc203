"""Port selection of a deployment; tests/integration covers its processes."""

import os

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.deployment import PORT_RANGE, Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.cli.workers import worker_children
from pdserve.config import InstanceConfig, RouterConfig, UpConfig


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


def test_no_command_line_of_a_worker_has_the_password_of_the_registry() -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    children = worker_children(RouterConfig(registry=url, workers=2))
    assert not any("secret" in argument for child in children for argument in child.arguments)
    assert all(child.environment["PDSERVE_REGISTRY"] == url for child in children)


def test_a_registry_in_the_environment_is_not_that_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_REGISTRY", "redis://127.0.0.1:6379/0")
    deployment, configs, app = Deployment(UpConfig(control_port=7777)), list[InstanceConfig](), typer.Typer()
    app.command()(command_from_config(InstanceConfig, configs.append))
    child = deployment.child("decode-0")
    result = CliRunner().invoke(app, child.arguments[1:], env=child.environment)
    assert result.exit_code == 0, result.output
    assert (configs[0].registry, configs[0].router) == ("", "127.0.0.1:7777")


def test_deployments_of_one_process_have_stores_of_their_own() -> None:
    with Deployment(UpConfig()) as first, Deployment(UpConfig()) as second:
        assert first.connector != second.connector
        assert all(str(os.getpid()) in one.connector for one in (first, second))
