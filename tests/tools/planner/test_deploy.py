"""`pdserve plan --apply`: what it writes starts the planned fleet, by the Compose files and by the chart."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pdserve.cli.commands import app
from pdserve.config import InstanceConfig
from pdserve.profile.profile import DraftFacts, EngineFacts, Machine, Profile, StepModel
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.planner.command import run
from pdserve.tools.planner.deploy import ENV_FILE, VALUES_FILE, Common, common_of, write
from pdserve.tools.planner.search import Trial, judge
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.simulator.fleet import Fleet, Forecast, deployment_of, roofline_profile

ROOT = Path(__file__).parents[3]
GPUS = {"prefill": 2, "decode": 1, "both": 4}
SETTINGS = (("max_num_batched_tokens", 512), ("policy", "least_loaded"))
FLEETS = [Fleet(3, 2, 0, 20.0, SETTINGS), Fleet(both=2, itl_target_ms=30.0), Fleet(1, 1)]
EACH = pytest.mark.parametrize("fleet", FLEETS, ids=str)
COMMON = Common(model="Qwen/Qwen3-8B", scheme="shm", store_size="3GiB", routers=2)


def trial(fleet: Fleet) -> Trial:
    figures = {"p90_ttft_ms": 90.0, "failed": 0}
    return judge(parse_targets("ttft.p90=100ms"), Forecast(fleet, figures, {}, 0, False, []))


def parsed(command: str, arguments: list[str]) -> dict[str, Any]:
    """Return the settings that the command line makes of arguments."""
    commands: Any = typer.main.get_command(app)
    return dict(commands.commands[command].make_context(command, arguments).params)


@EACH
@pytest.mark.parametrize("has_gpus", [True, False])
def test_compose_starts_what_was_planned(fleet: Fleet, has_gpus: bool, tmp_path: Path) -> None:
    usage = write(str(tmp_path), trial(fleet), GPUS, replace(COMMON, has_gpus=has_gpus))
    file = usage[0].split()[3]
    assert file == ("docker-compose.yml" if has_gpus else "docker-compose.cpu.yml")
    lines = [line for line in (tmp_path / ENV_FILE).read_text().splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    services = yaml.safe_load((ROOT / file).read_text())["services"]

    def filled_in(value: Any) -> str:
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), str(value))

    assert variables["MODEL"] == "Qwen/Qwen3-8B"
    router = parsed("router", shlex.split(variables.get("ROUTER_FLAGS", "")))
    assert router["policy"] == dict(fleet.settings).get("policy", "auto") and router["workers"] == 2
    gpus = list[str]()
    for role in ("prefill", "decode", "both"):
        service, count = services[role], getattr(fleet, role)
        assert int(filled_in(service["scale"])) == count
        environment = {name: filled_in(value) for name, value in service["environment"].items()}
        settings = parsed(role, shlex.split(environment["FLAGS"]))
        assert settings["itl_target_ms"] == fleet.itl_target_ms
        assert settings["router"] == "router:8001,router:8002", "each router has its control port"
        assert settings["convert_kv"] is (role == "decode" and fleet.both == 0), "ranks differ"
        assert environment["PDSERVE_CONNECTOR"] == "shm://pdserve?size=3GiB"
        assert settings["max_num_batched_tokens"] == dict(fleet.settings).get("max_num_batched_tokens", 2048)
        if has_gpus and count:
            own = environment["GPUS"].split(",")
            assert len(own) == count * GPUS[role] and environment["TENSOR_PARALLEL_SIZE"] == str(GPUS[role])
            gpus += own
    assert gpus == sorted(set(gpus), key=int), "each GPU is of one instance"


@EACH
def test_the_chart_starts_what_was_planned(fleet: Fleet, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    write(str(tmp_path), trial(fleet), GPUS, COMMON)
    values = yaml.safe_load((tmp_path / VALUES_FILE).read_text())
    with helm.Chart.load(ROOT / "deploy" / "helm" / "pdserve") as chart:
        templates = chart.render(values, name="chat", namespace="prod")
    documents = [one for name, text in templates.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    deployments = {one["metadata"]["name"]: one["spec"] for one in documents if one and one["kind"] == "Deployment"}
    for role in ("prefill", "decode", "both"):
        count, spec = getattr(fleet, role), deployments.get(f"chat-pdserve-{role}")
        assert (spec or {"replicas": 0})["replicas"] == count
        if spec:
            (container,) = spec["template"]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == GPUS[role]
            settings = parsed(role, [str(one) for one in container["args"][1:]])
            assert settings["tensor_parallel_size"] == GPUS[role] and settings["model"] == "Qwen/Qwen3-8B"
            assert settings["itl_target_ms"] == fleet.itl_target_ms
            assert settings["convert_kv"] is (role == "decode" and fleet.both == 0), "ranks differ"
            assert {"name": "PDSERVE_CONNECTOR", "value": "shm://pdserve?size=3GiB"} in container["env"]
    assert deployments["chat-pdserve-router"]["replicas"] == 2
    (router,) = deployments["chat-pdserve-router"]["template"]["spec"]["containers"]
    policy = parsed("router", [str(one) for one in router["args"][1:]])["policy"]
    assert policy == dict(fleet.settings).get("policy", "auto")


MEASURED = Profile(
    model="m", engine=EngineFacts(32, 4096, 900, 1024, 48, 4096), machine=Machine(threads=3, device="cpu")
)
GIVEN = PlanConfig(policy="least_loaded", local_prefill_tokens=0, max_num_batched_tokens=512, num_blocks=700)
RENTED = PlanConfig(model="Qwen/Qwen3-8B", gpu="h100", ttft_target_ms=250.0)


@pytest.mark.parametrize(
    ("config", "profile"),
    [(PlanConfig(), MEASURED), (GIVEN, MEASURED), (RENTED, roofline_profile(RENTED))],
    ids=["of the profile", "given", "of a data sheet"],
)
def test_settings_of_all_fleets_are_started_too(config: PlanConfig, profile: Profile, tmp_path: Path) -> None:
    """What was simulated with 256 sequences is not started with the default of 64."""
    fleet, has_gpus = Fleet(1, 1, itl_target_ms=20.0, settings=(("max_num_batched_tokens", 256),)), config is RENTED
    common = common_of(config, profile)
    assert common.has_gpus is has_gpus
    write(str(tmp_path), trial(fleet), dict.fromkeys(GPUS, 1), common)
    lines = (tmp_path / ENV_FILE).read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    values = yaml.safe_load((tmp_path / VALUES_FILE).read_text())
    simulated = deployment_of(config, profile, fleet)
    for role, flags in (("decode", "ENGINE_FLAGS"), ("router", "ROUTER_FLAGS")):
        settings = parsed(role, shlex.split(variables.get(flags, "")))
        of_chart = values["instances" if role == "decode" else role]["flags"]
        assert parsed(role, [f"--{name}={value}" for name, value in of_chart.items()]) == settings
        if role == "decode":
            assert settings["max_num_seqs"] == simulated.instance.max_num_seqs != 64
            assert settings["max_num_batched_tokens"] == 256 and settings["itl_target_ms"] == 20
            assert settings["block_size"] == profile.engine.block_size
            own = (config.num_blocks or 900, 3)
            assert (settings["num_blocks"], settings["threads"]) == ((None, None) if has_gpus else own)
        else:
            for name in ("policy", "local_prefill_tokens", "ttft_target_ms"):
                assert settings[name] == getattr(simulated.router, name)


def test_a_plan_says_and_writes_the_same_lines(
    tiny_profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {"num_prompts": 10, "request_rate": 5.0, "random_input_len": 100, "random_output_len": 10, "jobs": 1}
    settings: dict[str, Any] = {"profile": str(tiny_profile), "apply": str(tmp_path), "policy": "round_robin", **load}
    assert not run(PlanConfig(**settings, slo="ttft=9s", max_num_seqs=8, instances=1))
    printed = capsys.readouterr().out.splitlines()
    written = (tmp_path / ENV_FILE).read_text().splitlines()
    assert "ROUTER_FLAGS=--policy round_robin" in written and set(written) <= set(printed)
    assert any("--max-num-seqs 8 " in line and "--num-blocks 1000" in line for line in written)


def test_the_folder_is_made(tmp_path: Path) -> None:
    write(str(tmp_path / "a" / "b"), trial(Fleet(1, 1)), GPUS, Common(has_gpus=False))
    assert (tmp_path / "a" / "b" / ENV_FILE).exists()


def written(folder: Path, config: PlanConfig, profile: Profile, fleet: Fleet = FLEETS[2]) -> tuple[list[str], Any]:
    """Return the lines for Compose and the values for Helm of a plan."""
    write(str(folder), trial(fleet), dict.fromkeys(GPUS, 1), common_of(config, profile))
    return (folder / ENV_FILE).read_text().splitlines(), yaml.safe_load((folder / VALUES_FILE).read_text())


def test_the_model_that_was_measured_is_started_as_it_was(tmp_path: Path) -> None:
    """Not the demo model, nor the same one in another dtype or with other weights."""
    flags = {"model": "/models/own", "dtype": "bfloat16", "quantization": "int4"}
    lines, values = written(tmp_path, PlanConfig(), replace(MEASURED, model="own", flags=flags))
    assert {"MODEL=/models/own", "SERVED_MODEL_NAME=own"} <= set(lines)
    assert values["model"] == {"name": "/models/own", "servedName": "own"}
    assert "--dtype bfloat16 --quantization int4" in next(line for line in lines if line.startswith("ENGINE_FLAGS"))
    assert values["instances"]["flags"].items() >= {"dtype": "bfloat16", "quantization": "int4"}.items()
    assert "MODEL=m" in written(tmp_path, PlanConfig(), MEASURED)[0]


@pytest.mark.parametrize(
    ("scheme", "lines", "connector"),
    [
        ("shm", ["CONNECTOR=shm://pdserve?size=2GiB"], "shm://pdserve?size=2GiB"),
        ("redis", ["CONNECTOR=redis://redis:6379/0", "REDIS_MEMORY=2147483648"], ""),
        ("file", ["# with a KV store of the connector file, as CONNECTOR"], ""),
    ],
)
def test_the_store_is_the_one_that_was_simulated(scheme: str, lines: list[str], connector: str, tmp_path: Path) -> None:
    config = PlanConfig(connector=scheme, store_size="2GiB")
    env, values = written(tmp_path, config, MEASURED)
    assert env[-len(lines) :] == lines and values.get("connector", "") == connector
    assert not any("_GPUS=" in line for line in env)
    if scheme == "redis":
        assert values["redis"]["memory"] == "2147483648"
        assert int(values["redis"]["resources"]["limits"]["memory"]) > 2**31


def test_a_draft_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    config = PlanConfig(acceptance="0.7", speculate="draft", speculative_tokens=4)
    profile = replace(MEASURED, draft=DraftFacts("org/small", StepModel(), 100, 4096))
    lines, values = written(tmp_path, config, profile)
    flags = values["instances"]["flags"]
    assert (flags["speculate"], flags["speculative-model"], flags["speculative-tokens"]) == ("draft", "org/small", 4)
    assert any("--speculate draft" in line and "--speculative-model org/small" in line for line in lines)
    InstanceConfig(**{name.replace("-", "_"): value for name, value in flags.items()})


def test_kv_between_gpus_goes_as_in_the_data_sheet(tmp_path: Path) -> None:
    config = PlanConfig(model="Qwen/Qwen3-8B", gpu="h100", weights="fp8", acceptance="0.7")
    lines, values = written(tmp_path, config, roofline_profile(config))
    assert {"CONNECTOR=nixl://", "IPC=host", "# MODEL has to be a checkpoint with weights in fp8"} <= set(lines)
    assert values["connector"] == "nixl://" and values["instances"]["flags"]["speculate"] == "suffix"
