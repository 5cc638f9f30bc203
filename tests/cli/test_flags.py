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
from pdserve.cli.supervisor import child_of
from pdserve.config import EngineConfig, InstanceConfig, RouterConfig, TransferConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.settings import Settings, flag
from pdserve.tools.load_config import ProfileConfig


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
    assert "--warm-prompts has no effect beside --prefix-caching off" in str(refused.exception)


def test_relations_are_between_settings_of_a_class_or_its_subclasses() -> None:
    kinds = [Settings]
    for kind in kinds:
        kinds += [one for one in kind.__subclasses__() if one.__module__.startswith("pdserve.")]
    for kind in kinds:
        own = {field.name for field in fields(kind)}
        known = own.union(*({field.name for field in fields(one)} for one in kinds if issubclass(one, kind)))
        for table in (vars(kind).get("ONLY_WITH", {}), vars(kind).get("NOT_WITH", {})):
            named = {condition.partition("=")[0] for conditions in table.values() for condition in conditions}
            assert table.keys() <= own and named <= known, kind


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "bench serve --burstiness 2",
            "without --request-rate or --ramp-up-strategy or --slo-sweep: add that, or leave it out",
        ),
        ("simulate --burstiness 2", "without --request-rate or --ramp-up-strategy: add that, or leave it out"),
        ("bench serve --request-rate 2 --ramp-up-strategy linear", "beside --ramp-up-strategy: leave one of them out"),
        ("bench serve --ramp-up-strategy linear --slo-sweep", "beside --slo-sweep"),
        ("plan --random-input-len 7 --dataset-name sharegpt", "without --dataset-name random:"),
        ("bench tune --prefix-repetition-prefix-len 7", "without --dataset-name prefix_repetition:"),
        ("bench serve --trace-speed 2", "without --dataset-name mooncake or azure or burstgpt:"),
        ("bench serve --dataset-name azure --request-rate 3 --trace-speed 2", "beside --request-rate"),
        ("bench serve --output-len 7", "without --dataset-name sharegpt or custom:"),
        ("bench serve --dataset-path x", "without --dataset-name sharegpt or custom or mooncake or azure or burstgpt:"),
        ("bench serve --think-time 1 --dataset-name custom", "without --multi-turn:"),
        ("bench serve --ramp-up-end-rps 2", "without --ramp-up-strategy:"),
        ("bench serve --save-detailed", "without --save-result:"),
        ("bench serve --slo-sweep --csv x", "beside --slo-sweep"),
        ("bench serve --base-url http://x --port 1", "beside --base-url"),
        ("bench tune --prefill 2", "here: leave it out"),
        ("bench tune --try-max-num-seqs 1,2 --max-num-seqs 4", "beside --try-max-num-seqs"),
        ("bench latency --keys-file x", "here: leave it out"),
        ("router --announce-host x", "without --registry:"),
        ("router --quota-file x --registry redis://x", "without --keys-file:"),
        ("router --quota-file x --registry redis://x --keys-file y", "beside --registry"),
        ("router --share-kv", "without --keys-file:"),
        ("router --response-ttl-seconds 5", "without --response-store:"),
        ("router --batch-concurrency 5", "without --batch-folder:"),
        ("router --allowed-hosts x --api-key k", "beside --api-key"),
        ("up --ttft-target-ms 5", "without --itl-target-ms: add that, or leave it out"),
        ("up --max-instances 5", "without --autoscale:"),
        ("up --max-loras 5", "without --lora-modules or --lora-folder:"),
        ("decode --speculative-tokens 5 --speculate off", "beside --speculate off"),
        ("decode --kv-cache-memory 1GiB --num-blocks 9", "beside --num-blocks: leave one of them out"),
        ("up --gpu-memory-utilization 0.5 --kv-cache-memory 1GiB", "beside --kv-cache-memory"),
        ("both --gpu-memory-utilization 0.5 --device cpu", "beside --device cpu"),
        ("prefill --kernel cpu --paced x", "beside --paced"),
        ("decode --vllm-metrics", "without --metrics-port:"),
        ("prefill --force", "without --paced or --profile:"),
        ("demo --autoscale x --profile y", "here: leave it out"),
        ("profile --compare x", "without --from-fleet:"),
        ("profile --threads 2 --from-fleet http://x", "beside --from-fleet"),
        ("profile --import-entry x", "without --import-source:"),
        ("simulate --adapter-skew 2", "without --adapters:"),
        ("simulate --profile x --gpu h100 --model y", "beside --gpu"),
        ("plan --instances 2 --max-instances 3", "beside --instances"),
        ("autoscale --num-prompts 3", "without --simulate:"),
        ("autoscale --simulate --random-input-len 3 --dataset-name azure", "without --dataset-name random:"),
        ("autoscale --simulate --apply", "beside --simulate"),
    ],
)
def test_a_flag_without_effect_is_refused(arguments: str, reason: str) -> None:
    refused = CliRunner().invoke(commands.app, arguments.split())
    assert isinstance(refused.exception, SetupError), refused.output
    message = str(refused.exception)
    assert f" has no effect {reason}" in message and message.startswith("--") and "\n" not in message


def test_what_the_environment_sets_for_other_processes_is_no_mistake() -> None:
    calls: list[ProfileConfig] = []
    app = typer.Typer()
    app.command()(command_from_config(ProfileConfig, calls.append))
    arguments, variables = ["--from-fleet", "http://x"], {"PDSERVE_CONNECTOR": "shm://a"}
    assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0 and calls
    refused = CliRunner().invoke(app, [*arguments, "--connector", "shm://b"], env=variables)
    assert str(refused.exception).startswith("--connector has no effect beside --from-fleet")


def test_a_child_gets_no_flag_without_effect() -> None:
    """It would refuse it; what runs it for a command of its own need not know of that."""
    config = InstanceConfig(vllm_metrics=True, max_loras=3, threads=2)
    assert child_of("one", "decode", config).arguments == ["decode", "--threads", "2"]


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
        '{"method": "suffix", "num_speculative_tokens": 7}': "says otherwise than --speculative-tokens",
    }.items():
        with pytest.raises(ValueError, match=message):
            EngineConfig(speculative_config=wrong, speculative_tokens=5 if "otherwise" in message else None)
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
