"""Ports and GPUs of a deployment; tests/integration covers its processes."""

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.deployment import PORT_RANGE, Deployment, free_port, with_own_admin_key
from pdserve.cli.flags import command_from_config
from pdserve.cli.gpus import parse_list
from pdserve.cli.workers import worker_children
from pdserve.config import InstanceConfig, RouterConfig, UpConfig
from pdserve.errors import SetupError


def test_free_port_skips_the_excluded_port(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = iter([7, 7, 8])
    monkeypatch.setattr("pdserve.cli.deployment._random_unused_port", lambda: next(candidates))
    assert free_port(exclude=7) == 8


def test_free_ports_are_below_the_ephemeral_range() -> None:
    assert free_port() in PORT_RANGE
    assert max(PORT_RANGE) + 10_000 < 32_768, (
        "a Redis Cluster's bus port (+10,000) must be below Linux's ephemeral ports too"
    )


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("0.0.0.0", "0.0.0.0"), ("", "127.0.0.1")])
def test_the_urls_are_those_that_clients_write(host: str, shown: str) -> None:
    deployment = Deployment(UpConfig(host=host, port=9000, workers=2))
    assert deployment.url == f"http://{shown}:9000"
    assert all(re.fullmatch(rf"http://{re.escape(shown)}:\d+", url) for url in deployment.routers)


def test_no_command_line_of_an_instance_has_the_password_of_the_store() -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    with Deployment(UpConfig(connector=url)) as deployment:
        assert not any("secret" in argument for child in deployment.children for argument in child.arguments)
        instances = [child for child in deployment.children if not child.name.startswith("router")]
        assert len(instances) == 2 and all(child.environment["PDSERVE_CONNECTOR"] == url for child in instances)


def test_no_command_line_of_a_worker_has_the_password_of_the_registry() -> None:
    url = "redis://:secret@127.0.0.1:6379/0"
    children = worker_children(RouterConfig(registry=url, workers=2))
    assert not any("secret" in argument for child in children for argument in child.arguments)
    assert all(child.environment["PDSERVE_REGISTRY"] == url for child in children)


def test_a_registry_in_the_environment_is_not_that_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_REGISTRY", "redis://127.0.0.1:6379/0")
    deployment, configs, app = Deployment(UpConfig(control_port=7777)), list[InstanceConfig](), typer.Typer()
    app.command()(command_from_config(InstanceConfig, configs.append))
    child = deployment.child("decode-0")
    result = CliRunner().invoke(app, child.arguments[1:], env=child.environment)
    assert result.exit_code == 0, result.output
    assert (configs[0].registry, configs[0].router) == ("", "127.0.0.1:7777")


def test_further_instances_have_new_names_and_the_settings_of_the_others() -> None:
    deployment = Deployment(UpConfig(prefill=2, threads=3, block_size=32))
    for role in ("prefill", "both", "prefill"):
        deployment.start(role)
    names = [child.name for child in deployment.children]
    assert names == ["router", "prefill-0", "prefill-1", "decode-0", "prefill-2", "both-0", "prefill-3"]
    first, further = (deployment.child(name) for name in ("prefill-0", "prefill-2"))
    assert [word.replace("-0", "-2") for word in first.arguments] == further.arguments
    assert first.environment == further.environment


def test_there_is_no_starting_of_other_roles_and_no_stopping_of_others() -> None:
    deployment = Deployment(UpConfig())
    with pytest.raises(ValueError, match="an instance is prefill, decode or both, not 'router'"):
        deployment.start("router")
    for name in ("router", "decode-1"):
        with pytest.raises(SetupError, match=f"there is no instance '{name}' here, but prefill-0, decode-0"):
            deployment.stop(name)


def instances_on(gpus: str | list[str], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[InstanceConfig]:
    """Return the settings of the instances of `pdserve up`, on listed GPUs or those that CUDA_VISIBLE_DEVICES names.

    Their `served_model_name` is the id of the GPU that CUDA shows them.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if isinstance(gpus, str):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    else:
        monkeypatch.setattr("pdserve.cli.gpus._installed", lambda: gpus)
    configs = list[InstanceConfig]()
    app = typer.Typer()
    app.command()(command_from_config(InstanceConfig, configs.append))
    for child in Deployment(UpConfig(**settings)).children[1:]:
        environment = child.environment | {"PDSERVE_REGISTRY": ""}
        assert CliRunner().invoke(app, child.arguments[1:], env=environment).exit_code == 0
        configs[-1] = replace(configs[-1], served_model_name=child.environment.get("CUDA_VISIBLE_DEVICES", "any"))
    return configs


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], {}, [("GPU-a", "auto", 0.9), ("GPU-b", "auto", 0.9)]),
        (["GPU-a"], {}, [("GPU-a", "auto", 0.45), ("GPU-a", "auto", 0.45)]),
        (["MIG-a", "MIG-b"], {"device": "cuda"}, [("MIG-a", "cuda", 0.9), ("MIG-b", "cuda", 0.9)]),
        (["GPU-a", "GPU-b"], {"device": "cuda:1"}, [("GPU-b", "cuda", 0.45), ("GPU-b", "cuda", 0.45)]),
        ("3,1", {"device": "cuda:1"}, [("1", "cuda", 0.45), ("1", "cuda", 0.45)]),
        ("GPU-x,MIG-y", {}, [("GPU-x", "auto", 0.9), ("MIG-y", "auto", 0.9)]),
        ("2, -1,0", {}, [("2", "auto", 0.45), ("2", "auto", 0.45)]),
        ([], {}, [("any", "auto", 0.9), ("any", "auto", 0.9)]),
        ("", {}, [("any", "auto", 0.9), ("any", "auto", 0.9)]),
        # On WSL there may be no list: the instances find the GPU themselves, and share its memory.
        ([], {"device": "cuda"}, [("any", "cuda", 0.45), ("any", "cuda", 0.45)]),
        ([], {"device": "cuda:1"}, [("any", "cuda:1", 0.45), ("any", "cuda:1", 0.45)]),
        (["GPU-a"], {"device": "cpu"}, [("any", "cpu", 0.9), ("any", "cpu", 0.9)]),
        ([*"abcd"], {"tensor_parallel_size": 2}, [("a,b", "auto", 0.9), ("c,d", "auto", 0.9)]),
        ([*"ab"], {"tensor_parallel_size": 2}, [("a,b", "auto", 0.45), ("a,b", "auto", 0.45)]),
    ],
)
def test_instances_divide_gpus_and_their_memory(
    gpus: str | list[str],
    settings: dict[str, Any],
    expected: list[tuple[str, str, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = instances_on(gpus, monkeypatch, **settings)
    found = [(config.served_model_name, config.device, config.gpu_memory_utilization) for config in configs]
    assert found == expected
    # KV of GPUs fills the default size at once: a prompt of 3,000 tokens of a model with 0.6B parameters takes 344 MB.
    assert [("?size=" in config.connector) for config in configs] == [
        expected[0][0] != "any" or "cuda" in expected[0][1]
    ] * 2


def test_a_gpu_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=r"--device cuda:2: there are 2 GPUs here \(GPU-a, GPU-b\), counted from 0"):
        instances_on(["GPU-a", "GPU-b"], monkeypatch, device="cuda:2")
    with pytest.raises(SetupError, match=r"^--tensor-parallel-size 3 needs as many GPUs; there are 2 here$"):
        instances_on(["GPU-a", "GPU-b"], monkeypatch, tensor_parallel_size=3)


def test_the_list_of_nvidia_smi_has_slices_in_place_of_their_gpu() -> None:
    listing = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
"""
    assert parse_list(listing) == ["MIG-c6d4f1ef-42e4-5de3", "MIG-cba663e8-9bed-5b25", "GPU-aaaa"]
    assert parse_list("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


def test_further_instances_get_free_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pdserve.cli.gpus._installed", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    deployment = Deployment(UpConfig())
    deployment.start("decode")
    instances = [child for child in deployment.children if child.name != "router"]
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in instances] == ["GPU-a", "GPU-b", "GPU-c"]
    with pytest.raises(SetupError, match="each of 3 GPUs has 1 instance"):
        deployment.start("decode")


def test_deployments_of_one_process_have_stores_of_their_own() -> None:
    with Deployment(UpConfig()) as first, Deployment(UpConfig()) as second:
        assert first.connector != second.connector
        assert all(str(os.getpid()) in one.connector for one in (first, second))


def test_who_starts_a_deployment_can_have_a_key_for_operators_of_its_own() -> None:
    """A router with API keys and no admin key refuses all requests to /admin."""
    assert with_own_admin_key(UpConfig()) == (UpConfig(), ""), "none is needed"
    for config in (UpConfig(api_key="a"), UpConfig(admin_key="sha256:b"), UpConfig(keys_file="keys.toml")):
        found, own = with_own_admin_key(config)
        assert own and found.admin_key.split(",") == [*filter(None, [config.admin_key]), own]
        assert (found.api_key, found.keys_file) == (config.api_key, config.keys_file)
