"""Command lines of router child processes; tests/integration covers running workers."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.deployment import Deployment
from pdserve.cli.supervisor import child_of
from pdserve.cli.workers import quota_file, worker_children
from pdserve.config import RouterConfig, UpConfig


def test_changed_settings_become_flags_and_secrets_variables() -> None:
    child = child_of("router-0", "router", RouterConfig(port=9000, reuse_port=True, admin_key="secret"))
    assert child.arguments == ["router", "--port", "9000", "--reuse-port"]
    assert child.environment == {"PDSERVE_ADMIN_KEY": "secret"}


def test_a_default_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings say what a child does, also where they are defaults: `--response-store ''`, or those of a Python program."""
    for name in ("PDSERVE_ADMIN_KEY", "PDSERVE_RESPONSE_STORE"):
        monkeypatch.setenv(name, "of the environment")
    child = child_of("router-0", "router", RouterConfig(admin_key="secret"))
    assert child.environment == {"PDSERVE_ADMIN_KEY": "secret", "PDSERVE_RESPONSE_STORE": ""}


def test_workers_share_the_quotas_of_keys() -> None:
    config = RouterConfig(workers=2, keys_file="keys.toml")
    with quota_file(config) as path:
        children = worker_children(replace(config, quota_file=path))
        assert [child.arguments[child.arguments.index("--quota-file") + 1] for child in children] == [path, path]
        Path(path).touch()
    assert not Path(path).exists()
    for other in (
        replace(config, workers=1),
        replace(config, keys_file=""),
        replace(config, registry="redis://localhost:6379/0"),
    ):
        with quota_file(other) as path:
            assert path == ""
    with quota_file(replace(config, quota_file="mine")) as path:
        assert path == "mine"


def test_routers_of_a_deployment_share_the_quotas_of_keys() -> None:
    deployment = Deployment(UpConfig(workers=2, keys_file="keys.toml"))
    routers = [child.arguments for child in deployment.children[:2]]
    paths = {arguments[arguments.index("--quota-file") + 1] for arguments in routers}
    assert len(paths) == 1 and "" not in paths
    deployment.stop_all()
    alone = Deployment(UpConfig(keys_file="keys.toml"))
    assert "--quota-file" not in alone.children[0].arguments
