"""`pdserve plan --apply`: what it writes starts the planned fleet, by the Compose files and by the chart."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pdserve.cli.commands import app
from pdserve.tools.planner.deploy import ENV_FILE, VALUES_FILE, write
from pdserve.tools.planner.search import Trial, judge
from pdserve.tools.planner.targets import parse_targets
from pdserve.tools.simulator.fleet import Fleet, Forecast

ROOT = Path(__file__).parents[3]
GPUS = {"prefill": 2, "decode": 1, "both": 4}
SETTINGS = (("max_num_batched_tokens", 512), ("policy", "least_loaded"))
FLEETS = [Fleet(3, 2, 0, 20.0, SETTINGS), Fleet(both=2, itl_target_ms=30.0), Fleet(1, 1)]
EACH = pytest.mark.parametrize("fleet", FLEETS, ids=str)


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
    usage = write(str(tmp_path), trial(fleet), GPUS, "Qwen/Qwen3-8B", has_gpus=has_gpus)
    file = usage[0].split()[3]
    assert file == ("docker-compose.yml" if has_gpus else "docker-compose.cpu.yml")
    lines = [line for line in (tmp_path / ENV_FILE).read_text().splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    services = yaml.safe_load((ROOT / file).read_text())["services"]

    def filled_in(value: Any) -> str:
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), str(value))

    assert variables["MODEL"] == "Qwen/Qwen3-8B"
    router = parsed("router", shlex.split(variables.get("ROUTER_FLAGS", "")))
    assert router["policy"] == dict(fleet.settings).get("policy", "auto")
    gpus = list[str]()
    for role in ("prefill", "decode", "both"):
        service, count = services[role], getattr(fleet, role)
        assert int(filled_in(service["scale"])) == count
        environment = {name: filled_in(value) for name, value in service["environment"].items()}
        settings = parsed(role, shlex.split(environment["FLAGS"]))
        assert settings["itl_target_ms"] == fleet.itl_target_ms
        assert settings["max_num_batched_tokens"] == dict(fleet.settings).get("max_num_batched_tokens", 2048)
        if has_gpus and count:
            own = environment["GPUS"].split(",")
            assert len(own) == count * GPUS[role] and environment["TENSOR_PARALLEL_SIZE"] == str(GPUS[role])
            gpus += own
    assert gpus == sorted(set(gpus), key=int), "each GPU is of one instance"


@EACH
def test_the_chart_starts_what_was_planned(fleet: Fleet, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    write(str(tmp_path), trial(fleet), GPUS, "Qwen/Qwen3-8B", has_gpus=True)
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
    (router,) = deployments["chat-pdserve-router"]["template"]["spec"]["containers"]
    policy = parsed("router", [str(one) for one in router["args"][1:]])["policy"]
    assert policy == dict(fleet.settings).get("policy", "auto")


def test_the_folder_is_made(tmp_path: Path) -> None:
    write(str(tmp_path / "a" / "b"), trial(Fleet(1, 1)), GPUS, "", has_gpus=False)
    assert (tmp_path / "a" / "b" / ENV_FILE).exists()
