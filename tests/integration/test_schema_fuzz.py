"""Schemathesis tests a deployment with requests generated from /openapi.json; scripts/fuzz runs it for longer."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from pdserve.cli.deployment import Deployment

EXAMPLES = 4  # per operation, the same in every run
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_responses_conform_to_the_schema(
    deploy: Callable[..., AbstractContextManager[Deployment]],
    checkpoint: Callable[[str], Path],
    metric: Callable[..., float],
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("Schemathesis is not installed: pip install schemathesis")
    with deploy(model=str(checkpoint("llama")), served_model_name="demo", max_model_len=48) as deployment:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{deployment.url}/openapi.json"]
        command += ["--checks", CHECKS, "--phases", "examples,fuzzing", "--max-examples", str(EXAMPLES)]
        command += ["--generation-deterministic", "--suppress-health-check", "all", "--request-timeout", "1000"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1200)
        assert result.returncode == 0, result.stdout + result.stderr
        described = sum(map(len, httpx.get(f"{deployment.url}/openapi.json").json()["paths"].values()))
        assert re.search(rf"Operations: +{described} selected", result.stdout)
        assert metric(deployment, "requests_total", finish_reason="length") > 0, "no valid request was generated"
