"""A planned fleet as settings of a deployment: variables of the Compose files, and values of the Helm chart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.errors import SetupError
from pdserve.profile.profile import Profile
from pdserve.tools.load_config import FleetConfig
from pdserve.tools.planner.search import Trial
from pdserve.tools.simulator.fleet import Fleet

ENGINE_SETTINGS = ("max_num_batched_tokens",)  # flags of instances; the others are the router's
ROLES = ("prefill", "decode", "both")
ENV_FILE, VALUES_FILE = "plan.env", "plan-values.yaml"
ROUTER_SETTINGS = ("policy", "prefill_policy", "decode_policy", "local_prefill_tokens", "ttft_target_ms")
Flags = tuple[dict[str, Any], dict[str, Any]]  # of instances and of routers, without dashes
NO_FLAGS: Flags = ({}, {})


def common_flags(config: FleetConfig, profile: Profile, *, has_gpus: bool) -> Flags:
    """Return the flags with which all fleets were simulated, but for defaults.

    On CPUs these are also the threads and the pool of the instance that was measured: others are no part of the profile.
    """
    known, size = profile.engine, config.block_size or profile.engine.block_size
    engine: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs or known.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens or known.max_num_batched_tokens,
        "block_size": size,
        "num_blocks": config.num_blocks or (None if has_gpus else known.num_blocks * known.block_size // size or None),
        "threads": None if has_gpus else profile.machine.threads or None,
    }
    router = {name: getattr(config, name) for name in ROUTER_SETTINGS}
    return _without_defaults(engine, InstanceConfig), _without_defaults(router, RouterConfig)


def _without_defaults(values: Mapping[str, Any], config: type) -> dict[str, Any]:
    return {_dashed(name): value for name, value in values.items() if value not in (None, getattr(config, name))}


def flags_of(fleet: Fleet, common: Flags = NO_FLAGS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of a fleet, which are those of all and its own."""
    settings = {one: value for one, value in fleet.settings if not one.endswith("_tensor_parallel_size")}
    settings.pop("connector", None)
    engine = {} if fleet.itl_target_ms is None else {"itl-target-ms": fleet.itl_target_ms}
    engine |= common[0] | {_dashed(name): value for name, value in settings.items() if name in ENGINE_SETTINGS}
    router = {_dashed(name): value for name, value in settings.items() if name not in ENGINE_SETTINGS}
    return engine, common[1] | router


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _remarks(fleet: Fleet) -> list[str]:
    """Return what neither file can say."""
    connector = dict(fleet.settings).get("connector")
    return [f"# with a KV store of the connector {connector}, as CONNECTOR"] if connector else []


def env_lines(trial: Trial, by_role: Mapping[str, int], common: Flags = NO_FLAGS) -> list[str]:
    """Return the lines for `.env` of docker-compose.yml that deploy a fleet; the GPUs are numbered from 0.

    Args:
        by_role: GPUs of an instance.
        common: flags of all fleets.
    """
    fleet, lines, first = trial.fleet, list[str](), 0
    for role in ROLES:
        count, each = getattr(fleet, role), by_role[role]
        if count or role != "both":
            lines.append(f"{role.upper()}={count}")
        if count:
            last = first + count * each
            lines.append(f"{role.upper()}_GPUS={','.join(map(str, range(first, last)))}")
            lines += [f"{role.upper()}_TENSOR_PARALLEL_SIZE={each}"] if each > 1 else []
            first = last
    for name, flags in zip(("ENGINE_FLAGS", "ROUTER_FLAGS"), flags_of(fleet, common), strict=True):
        lines += [f"{name}={' '.join(Fleet(settings=tuple(flags.items())).flags)}"] if flags else []
    return [*lines, *_remarks(fleet)]


def helm_values(trial: Trial, by_role: Mapping[str, int], model: str, common: Flags = NO_FLAGS) -> dict[str, Any]:
    """Return the values of the chart that deploy a fleet.

    Args:
        by_role: GPUs of an instance; 0 without GPUs.
        model: empty to leave it to other values.
        common: flags of all fleets.
    """
    fleet = trial.fleet
    engine, router = flags_of(fleet, common)
    values: dict[str, Any] = {"model": {"name": model}} if model else {}
    for role in ROLES:
        count, gpus = getattr(fleet, role), by_role[role]
        values[role] = {"enabled": count > 0, "replicas": count}
        if count and gpus:
            values[role]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
            values[role]["flags"] = {"tensor-parallel-size": gpus} if gpus > 1 else {}
    return values | {"instances": {"flags": engine}, "router": {"flags": router}}


def write(
    folder: str, trial: Trial, by_role: Mapping[str, int], model: str, common: Flags = NO_FLAGS, *, has_gpus: bool
) -> Sequence[str]:
    """Write both files into a folder, and return how they are used, a line each.

    Args:
        common: flags of all fleets.

    Raises:
        SetupError: a file cannot be written.
    """
    gpus = by_role if has_gpus else dict.fromkeys(by_role, 0)
    values = json.dumps(helm_values(trial, gpus, model, common), indent=2)
    env = [f"MODEL={model}"] if model else []
    file = "docker-compose.yml" if has_gpus else "docker-compose.cpu.yml"
    texts = {ENV_FILE: "\n".join([*env, *env_lines(trial, by_role, common)]), VALUES_FILE: f"# JSON is YAML\n{values}"}
    for name, text in texts.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text + "\n")
        except OSError as error:
            raise SetupError(f"--apply {folder}: {name} cannot be written: {error.strerror}") from None
    return [
        f"docker compose -f {file} --env-file {Path(folder, ENV_FILE)} up",
        f"helm upgrade --install pdserve deploy/helm/pdserve -f {Path(folder, VALUES_FILE)}",
    ]
