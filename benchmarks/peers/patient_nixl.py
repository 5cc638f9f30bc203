"""vLLM's NixlConnector with a progress thread that looks every 100 µs. As it comes, that thread spins on a core, which the
workers of a small machine need.

vLLM imports this by the name that its --kv-transfer-config has as `kv_connector_module_path`.
"""

from typing import Any

from nixl import _bindings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

DELAY_US = 100


class PatientConfig(_bindings.nixlAgentConfig):  # type: ignore[misc]
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, DELAY_US if name == "pthrDelay" else value)


_bindings.nixlAgentConfig = PatientConfig
