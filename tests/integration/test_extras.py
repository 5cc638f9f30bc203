"""Without the packages of extras, a setting that needs one says in one sentence what to install; see also test_up.py."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pdserve import errors
from pdserve.cli.deployment import free_port
from tests.extras import BLOCK_EXTRAS, MAIN

ROUTER = ["router", "--model", "demo", "--control-port", "0"]
DECODE = ["decode", "--model", "demo"]  # which is not loaded
EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq"}'
# Extra → a command that needs it.
COMMANDS = [
    ("batches", [*ROUTER, "--batch-folder", "FOLDER"]),
    ("grpc", [*ROUTER, "--grpc-port", "0"]),
    ("grpc", [*DECODE, "--metrics-port", "0", "--grpc-health-port", "PORT"]),
    ("kv-events", [*ROUTER, "--kv-events-subscribe", "tcp://127.0.0.1:5557"]),
    ("kv-events", [*DECODE, "--kv-events-config", EVENTS]),
    ("otel", [*ROUTER, "--otlp-endpoint", "http://127.0.0.1:4318"]),
    ("redis", [*ROUTER, "--registry", "redis://127.0.0.1:1"]),
    ("redis", [*DECODE, "--connector", "redis://127.0.0.1:1"]),
]


@pytest.mark.parametrize(("extra", "words"), COMMANDS, ids=[f"{words[0]}{words[-2]}" for _, words in COMMANDS])
def test_a_missing_extra_is_one_sentence(fork_server: Any, extra: str, words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "without.py"
    script.write_text(BLOCK_EXTRAS + MAIN)
    named = {"FOLDER": str(tmp_path / "folder"), "PORT": str(free_port())}
    port = ["--port", str(free_port())] if words[0] == "router" else []
    process = fork_server.spawn([str(script), *(named.get(word, word) for word in words), *port], os.environ)
    with process.stdout as output:
        printed = output.read()
    assert process.wait() == 2, printed
    (line,) = [line for line in printed.splitlines() if line.startswith("pdserve: ")]
    assert line.removesuffix(".").endswith(f": pip install -e '.[{extra}]'") and "Traceback" not in printed
    assert words[-2] in line or ("--connector" in words and "redis://" in line)


def test_the_core_requires_no_package_of_an_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    core = {Requirement(line).name for line in project["dependencies"]}
    assert not core & {
        Requirement(line).name
        for name, lines in project["optional-dependencies"].items()
        if name != "dev"
        for line in lines
    }


@pytest.mark.parametrize(
    ("is_checkout", "command"), [(True, "pip install -e '.[redis]'"), (False, "pip install 'pdserve[redis]'")]
)
def test_the_sentence_fits_the_installation(monkeypatch: pytest.MonkeyPatch, is_checkout: bool, command: str) -> None:
    monkeypatch.setattr(errors, "IS_CHECKOUT", is_checkout)
    assert str(errors.not_imported("redis://", ModuleNotFoundError(name="redis"))).endswith(f": {command}")
