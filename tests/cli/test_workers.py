"""Command lines of router child processes; tests/integration covers running workers."""

from pdserve.cli.workers import router_child
from pdserve.config import RouterConfig


def test_changed_settings_become_flags_and_secrets_variables() -> None:
    child = router_child("router-0", RouterConfig(port=9000, reuse_port=True, admin_key="secret"))
    assert child.arguments == ["router", "--port", "9000", "--reuse-port"]
    assert child.environment == {"PDSERVE_ADMIN_KEY": "secret"}
