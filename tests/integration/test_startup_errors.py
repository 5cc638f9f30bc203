"""Start-up errors of every command: one line on stderr that names the cause, and exit code 2."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.cli.deployment import free_port
from pdserve.errors import SetupError
from pdserve.model_path import DEMO

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def assert_start_fails(result: "subprocess.CompletedProcess[str]", *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("pdserve: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr and "never awaited" not in result.stderr, result.stderr
    for part in parts:
        assert part in lines[0]


def write_vit(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    (folder / "model.safetensors").write_bytes(b"")


def test_missing_model_directory(pdserve: Command) -> None:
    assert_start_fails(pdserve("prefill", "--model", "/no/such/place"), "no such model directory: /no/such/place")
    assert_start_fails(
        pdserve("router", "--port", str(free_port()), "--model", "/no/such/place"), "no such model directory"
    )


def test_directory_without_a_checkpoint(pdserve: Command, tmp_path: Path) -> None:
    assert_start_fails(pdserve("decode", "--model", str(tmp_path)), "is not a checkpoint: config.json is missing")


def test_architecture_without_a_decoder(pdserve: Command, tmp_path: Path) -> None:
    write_vit(tmp_path)
    assert_start_fails(pdserve("decode", "--model", str(tmp_path)), "architecture ViTModel is not supported")


def test_architecture_without_a_kv_cache(pdserve: Command, tmp_path: Path) -> None:
    import torch
    import transformers

    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    assert_start_fails(pdserve("decode", "--model", str(tmp_path)), "architecture MambaForCausalLM is not supported")


def test_unknown_connector(pdserve: Command, checkpoint: Callable[..., Path]) -> None:
    result = pdserve("prefill", "--model", str(checkpoint("llama")), "--connector", "carrier-pigeon://x")
    assert_start_fails(result, "There is no connector for carrier-pigeon://", "shm")


def test_a_redis_whose_host_does_not_exist_is_named_without_its_password(
    pdserve: Command, checkpoint: Callable[..., Path]
) -> None:
    """One that only does not answer is no error: tests/integration/test_hanging_store.py."""
    url = "redis://:secret@nowhere.invalid:6379/0"
    result = pdserve("prefill", "--model", str(checkpoint("llama")), "--num-blocks", "32", "--connector", url)
    assert_start_fails(result, "nowhere.invalid")
    assert "secret" not in result.stderr


def test_up_does_not_print_the_password_of_its_store(pdserve: Command, checkpoint: Callable[..., Path]) -> None:
    address = "nowhere.invalid:6379/0"
    model = ("--model", str(checkpoint("llama")), "--num-blocks", "32", "--port", str(free_port()))
    result = pdserve("up", *model, "--connector", f"redis://:secret@{address}")
    assert f" over redis://:***@{address}" in result.stdout
    assert "secret" not in result.stdout + result.stderr


def test_more_shared_memory_than_available(pdserve: Command, checkpoint: Callable[..., Path]) -> None:
    stat = os.statvfs("/dev/shm")
    size = stat.f_blocks * stat.f_frsize + (1 << 30)  # more than there is, whatever other tests free meanwhile
    url = f"shm://test-full?size={size}"
    result = pdserve("prefill", "--model", str(checkpoint("llama")), "--num-blocks", "32", "--connector", url)
    assert_start_fails(result, "/dev/shm")
    assert not list(Path("/dev/shm").glob("pdserve-test-full*"))


def test_port_in_use(pdserve: Command, checkpoint: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = pdserve("router", "--model", str(checkpoint("llama")), "--port", str(port))
        assert_start_fails(result, f"cannot listen on 127.0.0.1:{port}")
        free = str(free_port())
        result = pdserve("router", "--model", str(checkpoint("llama")), "--port", free, "--control-port", str(port))
        assert_start_fails(result, f"control port 127.0.0.1:{port} is in use")
        assert_start_fails(pdserve("up", "--port", str(port)), f"cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefill", "--block-size", "0"], "--block-size must be at least 1, not 0"),
        (["prefill", "--num-blocks", "16", "--max-model-len", "999"], "does not fit into 16 blocks"),
        (["decode", "--registry", "http://x"], "--registry must be the URL of a Redis, such as redis://host:6379/0"),
        (["router", "--port", "0", "--control-port", "0", "--api-key", "a,,b"], "a key is empty"),
        (
            ["router", "--port", "0", "--control-port", "0", "--kv-events-subscribe", '[{"endpoint": "tcp://a"}]'],
            "--kv-events-subscribe: tcp://a: Invalid argument",
        ),
        (
            ["router", "--port", "0", "--control-port", "0", "--response-store", "ftp://a"],
            "--response-store",
        ),
        (["up", "--prefill", "0", "--decode", "1"], "no request could be served"),
        (["router", "--cors", "*"], "error: No such option: --cors"),
    ],
)
def test_invalid_settings(
    arguments: list[str], message: str, pdserve: Command, checkpoint: Callable[..., Path]
) -> None:
    """One that is found when settings are read, and all that are found later."""
    assert_start_fails(pdserve(*arguments, "--model", str(checkpoint("llama"))), message)


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that would start a router, an instance or a deployment in this process fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the settings were accepted")

    for start in (
        "pdserve.router.server.serve",
        "pdserve.instance.process.serve",
        "pdserve.cli.deployment.Deployment.__init__",
    ):
        monkeypatch.setattr(start, refuse)


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["router", "--policy", "best"],
            "--policy must be auto, round_robin, least_loaded",
        ),
        (["prefill", "--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["prefill", "--dtype", "int3"], "--dtype must be auto, float32, bfloat16 or float16, not int3"),
        (["prefill", "--device", "quantum"], "not 'quantum'"),
        (
            ["prefill", "--kernel", "magic"],
            "--kernel must be auto, reference, cpu, triton or flash, or of a package, not magic",
        ),
        (["prefill", "--lease-seconds", "-1"], "--lease-seconds must be at least 0, not -1.0"),
        (["decode", "--drain-seconds", "-1"], "--drain-seconds must be at least 0, not -1.0"),
        (["decode", "--metrics-port", "65536"], "--metrics-port must be from 0 to 65535, not 65536"),
        (["decode", "--router", ","], "--router is empty; write host:port"),
        (["decode", "--router", "127.0.0.1:8001,other"], "--router: 'other' is not an address; write host:port"),
        (["decode", "--registry", "redis://x", "--router", "x:1"], "--router and --registry both name the routers"),
        (["router", "--port", "0", "--drain-seconds", "-1"], "--drain-seconds must be at least 0, not -1.0"),
        (["decode", "--router", "other:0"], "the port of --router other:0 must be from 1 to 65535"),
        (["router", "--control-port", "-1"], "--control-port must be from 0 to 65535, not -1"),
        (["router", "--port", "9000", "--control-port", "9000"], "--port and --control-port are both 9000"),
        (["router", "--workers", "2", "--port", "8002"], "--port and --control-port are both 8002"),
        (
            ["router", "--workers", "2", "--own-port", "65535"],
            "--own-port of the last of --workers 2 must be from 0 to",
        ),
        (["up", "--prefill", "-1", "--both", "1"], "--prefill must be at least 0, not -1"),
        (["up", "--connector", "pigeon://"], "There is no connector for pigeon://; installed schemes: "),
        (["up", "--connector", "shm://kv?sizes=1GiB"], "sizes"),
        (["router", "--cors-origins", "https://a.example,not a url"], "--cors-origins: 'not a url' is not an origin"),
        (["router", "--client-timeout-seconds", "inf"], "-seconds must be more than 0 and at most 86400, not inf"),
        (["up", "--port", "0"], "--port must be from 1 to 65535, not 0"),
        (["simulate", "--think-time", "inf"], "--think-time must be from 0 to 86400, not inf"),  # it would never end
        (["plan", "--busy-threads", "inf"], "--busy-threads must be from 0 to 10000, not inf"),
        (["autoscale", "--interval", "inf"], "--interval must be more than 0 and at most 86400, not inf"),
        (["up", "--port", "9000", "--control-port", "9000"], "--port and --control-port are both 9000"),
    ],
)
def test_settings_that_are_invalid_when_they_are_read(
    arguments: list[str], message: str, checkpoint: Callable[..., Path]
) -> None:
    """Processes print such errors as those above."""
    result = CliRunner().invoke(app, [*arguments, "--model", str(checkpoint("llama"))], standalone_mode=False)
    assert isinstance(result.exception, SetupError), result.output
    (line,) = str(result.exception).splitlines()
    assert message in line


@pytest.mark.parametrize("command", ["up", "demo"])
def test_start_up_error_of_a_child_process_is_shown(command: str, pdserve: Command, tmp_path: Path) -> None:
    write_vit(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)  # without, the router may fail first
    result = pdserve(command, "--model", str(tmp_path), "--port", str(free_port()))
    assert result.returncode == 2
    assert "architecture ViTModel is not supported" in result.stdout + result.stderr
    assert "could not start; see its error above" in result.stderr


@pytest.mark.parametrize("command", ["up", "demo", "profile"])
def test_a_wrong_model_is_reported_once_before_anything_starts(command: str, pdserve: Command, tmp_path: Path) -> None:
    for path, message in (("./nowhere", "no such model directory: ./nowhere"), (tmp_path, "config.json is missing")):
        port = ["--port", str(free_port())] if command == "up" else []
        result = pdserve(command, "--model", str(path), *port)
        assert_start_fails(result, message)
        assert not re.search("router|loading", result.stdout + result.stderr)
