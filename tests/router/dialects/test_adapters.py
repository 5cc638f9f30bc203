"""The endpoints that load and unload adapters, on top of a scripted backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.router.dialects import adapters

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

JSON = {"Content-Type": "application/json"}


def test_an_order_that_instances_do_not_answer_is_an_error(
    client: Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(backend, "change_adapter", lambda *_: None)
    response = client.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"}, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")
