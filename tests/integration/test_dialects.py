"""A dialect from outside the tree: found by its entry point, it streams answers, and makes its own errors."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest


def test_a_dialect_of_another_package(
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    install_connectors: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Path(__file__).parent / "terse_dialect.py"
    install_connectors(tmp_path, "terse_package", source, {"terse": "Terse"}, group="pdserve.dialects")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = checkpoint("llama")
    short, huge = [5 * i % 251 for i in range(40)], [5 * i % 251 for i in range(11_000)]
    with deploy(model=str(path)) as deployment, httpx.Client(base_url=deployment.url, timeout=600) as client:
        answer = client.post("/terse", json={"say": short, "count": 6})
        *lines, end = answer.text.splitlines()
        assert (answer.status_code, end) == (200, "6") and len(lines) > 1
        assert answer.headers["x-request-id"].startswith("terse-")
        assert [int(one) for one in re.findall(r"\d+", " ".join(lines))] == generate(path, [short], 6)[0]

        wrong = client.post("/terse", json={"say": short})
        assert wrong.status_code == 400
        assert wrong.json() == {"wrong": "missing_field", "request": wrong.headers["x-request-id"]}
        assert client.get("/terse").json()["wrong"] == "method_not_allowed"
        large = client.post("/terse", json={"say": huge, "count": 6})  # parsed in another process
        assert large.status_code == 400 and large.json()["wrong"] == "context_length_exceeded"
        assert client.post("/v1/completions", json={}).json()["error"]["code"] == "invalid_prompt", "OpenAI's, as ever"
        described = client.get("/openapi.json").json()["paths"]["/terse"]["post"]["responses"]["400"]
        assert described["content"]["application/json"]["schema"]["$ref"].endswith("/TerseError")
