"""Commands derived from config dataclasses."""

import inspect
from dataclasses import dataclass, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import pdserve
from pdserve.cli import commands
from pdserve.cli.commands import CONFIGURED
from pdserve.cli.flags import GroupedCommand, command_from_config
from pdserve.config import EngineConfig, RouterConfig, TransferConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.settings import Settings, flag


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    size: int = flag("the size", 3, least=0)


def test_command_has_one_option_per_field_and_calls_run() -> None:
    calls: list[tuple[Config, str]] = []

    def run(config: Config, role: str) -> None:
        """Help text."""
        calls.append((config, role))

    command = command_from_config(Config, run, role="decode")
    (parameter,) = inspect.signature(command).parameters.values()
    assert (parameter.name, parameter.default, command.__doc__) == ("size", 3, "Help text.")
    command(size=5)
    assert calls == [(Config(size=5), "decode")]
    with pytest.raises(SetupError, match="--size must be at least 0, not -1"):
        command(size=-1)


def test_a_flag_can_be_set_by_its_environment_variable() -> None:
    calls: list[TransferConfig] = []
    app = typer.Typer()
    app.command()(command_from_config(TransferConfig, calls.append))
    result = CliRunner().invoke(app, [], env={"PDSERVE_CONNECTOR": "shm://from-environment"})
    assert result.exit_code == 0 and calls[0].connector == "shm://from-environment"
    CliRunner().invoke(app, ["--connector", "shm://flag"], env={"PDSERVE_CONNECTOR": "shm://from-environment"})
    assert calls[1].connector == "shm://flag"


def test_help_shows_the_limits() -> None:
    app = typer.Typer()
    app.command()(command_from_config(Config, lambda config: None))
    assert "the size; at least 0" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_n": 0}, "--max-n must be at least 1, not 0"),
        ({"port": 65536}, "--port must be from 0 to 65535, not 65536"),
        ({"instance_timeout_seconds": 0.0}, "--instance-timeout-seconds must be more than 0, not 0.0"),
        ({"instance_timeout_seconds": float("nan")}, "--instance-timeout-seconds must be more than 0, not nan"),
        ({"instance_timeout_seconds": float("inf")}, r"--instance-timeout-seconds must be at most 1e\+09, not inf"),
        ({"drain_seconds": 1e300}, r"--drain-seconds must be at most 1e\+09, not 1e\+300"),
        ({"timelines": 10**400}, r"--timelines must be at most 1e\+15, not 1000"),
        ({"log_format": "xml"}, "--log-format must be text or json, not xml"),
        (
            {"decode_policy": "best"},
            "--decode-policy must be auto, round_robin, .* or prefix_aware, or of a package, not best",
        ),
    ],
)
def test_values_beyond_the_limits_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**settings)


def test_share_has_two_limits() -> None:
    with pytest.raises(ValueError, match=r"--gpu-memory-utilization must be more than 0 and at most 1, not 1\.5"):
        TransferConfig(gpu_memory_utilization=1.5)
    assert TransferConfig(gpu_memory_utilization=1.0).num_blocks is None, "no limit holds for None"


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, config, *_ in CONFIGURED])
def test_help_has_every_flag_whole_in_a_narrow_terminal(
    name: str, config: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(commands.app, [name, "--help"]).output.splitlines()
    assert {f"--{field.name.replace('_', '-')}" for field in fields(config)} <= {
        line.split()[0] for line in lines if line
    }
    assert max(map(len, lines)) <= 80
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(headings) > 1 and headings[-1] == "Options:"


def test_help_of_a_router_is_grouped_by_subject() -> None:
    groups: dict[str, list[str]] = {}
    for line in CliRunner().invoke(commands.app, ["router", "--help"]).output.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            flags = groups.setdefault(line[:-1], [])
        elif line.startswith("  --"):
            flags.append(line.split()[0])
    assert groups["Keys"] == ["--api-key", "--keys-file", "--share-kv", "--admin-key", "--control-token"]
    assert groups["Routing"][0] == "--policy" and "--port" in groups["Clients"]
    assert groups["A router's ports"][0] == "--control-host", "a class begins a group of its own"
    assert max(map(len, groups.values())) <= 10


def test_up_has_every_flag_of_routers_but_those_of_their_ports() -> None:
    missing = {field.name for field in fields(RouterConfig)} - {field.name for field in fields(UpConfig)}
    assert missing == {"control_host", "registry", "announce_host", "quota_file", "own_port", "reuse_port"}


def test_version_and_the_name_of_other_servers() -> None:
    assert CliRunner().invoke(commands.app, ["--version"]).output == f"{pdserve.__version__}\n"
    refused = CliRunner().invoke(commands.app, ["serve", "org/model", "--port", "1"])
    assert isinstance(refused.exception, SetupError) and "pdserve up --model org/model" in str(refused.exception)


def test_the_prefix_cache_has_vllms_flags_too() -> None:
    calls: list[UpConfig] = []
    app = typer.Typer()
    app.command(cls=GroupedCommand)(command_from_config(UpConfig, calls.append))
    for arguments in (["--no-enable-prefix-caching"], ["--enable-prefix-caching"], []):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert [config.prefix_caching for config in calls] == ["off", "on", "on"]
    refused = CliRunner().invoke(app, ["--prefix-caching", "off", "--warm-prompts", "file"])
    assert "--warm-prompts are of no use" in str(refused.exception)


def test_speculation_is_set_as_in_vllm() -> None:
    config = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}')
    assert (config.speculate, config.speculative_tokens) == ("ngram", 4)
    assert EngineConfig(speculative_config='{"method": "suffix"}').speculative_tokens == EngineConfig.speculative_tokens
    for text in ('{"model": "x", "num_speculative_tokens": 5}', '{"method": "draft_model", "model": "x"}'):
        config = EngineConfig(speculative_config=text)
        assert (config.speculate, config.speculative_model) == ("draft", "x")
        assert config.draft_length == (5 if "5" in text else 8) and EngineConfig().draft_length == 16
    for wrong, message in {
        "ngram": "not JSON",
        "[" * 100_000: "not JSON",
        '{"num_speculative_tokens": 4}': "needs a method or a model",
        '{"method": "eagle3"}': "must be one of",
        '{"method": "ngram", "model": "x"}': "belong together",
        '{"method": "draft_model"}': "belong together",
        '{"model": ["x"]}': "a directory or a hub id",
        '{"method": "ngram", "disable_by_batch_size": 4}': "prompt_lookup_max only, not",
        '{"method": "ngram", "num_speculative_tokens": -1}': "a number from 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            EngineConfig(speculative_config=wrong)
    settings: list[dict[str, Any]] = [
        {"speculative_model": "x"},
        {"speculate": "draft"},
        {"speculate": "draft", "speculative_model": "x", "tensor_parallel_size": 2},
        {"speculate": "draft", "speculative_model": "x", "paced": "x"},
    ]
    for one in settings:
        with pytest.raises(ValueError, match="belong together" if len(one) == 1 else "on one device that computes"):
            EngineConfig(**one)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lora-modules", "a=x", "--lora-modules", "b=y"],
        ["--lora-modules", "a=x", "b=y"],
        ["--lora-modules=a=x", "--seed", "0", "--lora-modules", "b=y"],
        ["--lora-modules", "a=x,b=y", "--seed", "0"],
    ],
)
def test_adapters_are_named_one_by_one_or_together(arguments: list[str]) -> None:
    got: list[EngineConfig] = []
    app = typer.Typer()
    app.command(cls=GroupedCommand)(command_from_config(EngineConfig, got.append))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert got[0].adapters == {"a": "x", "b": "y"}
