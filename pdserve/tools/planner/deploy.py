"""A planned fleet as settings of a deployment: variables of the Compose files, and values of the Helm chart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config import DEFAULT_CONTROL_PORT, InstanceConfig, RouterConfig, parse_size
from pdserve.errors import SetupError
from pdserve.profile.profile import Profile
from pdserve.tools.load_config import FleetConfig
from pdserve.tools.planner.search import Trial
from pdserve.tools.simulator.fleet import Fleet, scheme_of

ENGINE_SETTINGS = ("max_num_batched_tokens",)  # flags of instances; the others are the router's
ROLES = ("prefill", "decode", "both")
ENV_FILE, VALUES_FILE = "plan.env", "plan-values.yaml"
ROUTER_SETTINGS = ("policy", "prefill_policy", "decode_policy", "local_prefill_tokens", "ttft_target_ms")
NIXL = ("nixl", "rdma", "nvlink", "pcie")  # ways between GPUs that this connector takes
REDIS_ROOM = 1.5  # memory of Redis' container ÷ that of its values


@dataclass(frozen=True)
class Common:
    """What all fleets of a plan were simulated with.

    Attributes:
        engine, router: flags of instances and of routers, without dashes and defaults.
        model, served_name: of the deployment; empty: of its other settings.
        routers: how many there are.
        scheme: of the connector, or the way of KV by the data sheet; empty: of its other settings.
        store_size: of the KV store, such as `8GiB`.
        has_gpus: instances have GPUs.
        remarks: what neither file can say.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    served_name: str = ""
    routers: int = 1
    scheme: str = ""
    store_size: str = FleetConfig.store_size
    has_gpus: bool = True
    remarks: tuple[str, ...] = ()


def common_of(config: FleetConfig, profile: Profile) -> Common:
    """Return what the settings and the profile say of all fleets.

    On CPUs the flags have the threads and the pool of the instance that was measured: others are no part of the profile.
    """
    known, size = profile.engine, config.block_size or profile.engine.block_size
    has_gpus = config.gpu is not None or profile.machine.device not in ("", "cpu")
    engine: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs or known.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens or known.max_num_batched_tokens,
        "block_size": size,
        "num_blocks": config.num_blocks or (None if has_gpus else known.num_blocks * known.block_size // size or None),
        "max_loras": config.max_loras,
        "threads": None if has_gpus else profile.machine.threads or None,
        "speculate": "suffix" if has_gpus and config.acceptance else None,  # where auto does not
        "speculative_tokens": config.speculative_tokens,
    }
    if config.speculate == "draft" and profile.draft is not None:
        engine |= {"speculate": "draft", "speculative_model": profile.draft.model}
    router = {name: getattr(config, name) for name in ROUTER_SETTINGS}
    flags = {name: value for name, value in profile.flags.items() if name != "tensor-parallel-size"}  # in files by role
    model = config.model if config.gpu else flags.pop("model", profile.model)
    weights = f"# MODEL has to be a checkpoint with weights in {config.weights}"
    adapters = f"# with {config.adapters} adapters, by --lora-modules or --lora-folder in ENGINE_FLAGS"
    remarks = [weights] if config.gpu and config.weights != FleetConfig.weights else []
    return Common(
        engine=flags | _without_defaults(engine, InstanceConfig),
        router=_without_defaults(router, RouterConfig),
        model=model,
        served_name="" if config.gpu or profile.model == model else profile.model,
        routers=config.routers,
        scheme=scheme_of(config, profile),
        store_size=config.store_size,
        has_gpus=has_gpus,
        remarks=(*remarks, *([adapters] if config.adapters else [])),
    )


def _without_defaults(values: Mapping[str, Any], config: type) -> dict[str, Any]:
    return {_dashed(name): value for name, value in values.items() if value not in (None, getattr(config, name))}


def flags_of(fleet: Fleet, common: Common) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of a fleet's instances and routers, which are those of all and its own."""
    settings = {one: value for one, value in fleet.settings if not one.endswith("_tensor_parallel_size")}
    settings.pop("connector", None)
    engine = {} if fleet.itl_target_ms is None else {"itl-target-ms": fleet.itl_target_ms}
    engine |= {**common.engine} | {_dashed(name): value for name, value in settings.items() if name in ENGINE_SETTINGS}
    router = {_dashed(name): value for name, value in settings.items() if name not in ENGINE_SETTINGS}
    return engine, {**common.router} | router


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _scheme(fleet: Fleet, common: Common) -> str:
    return str(dict(fleet.settings).get("connector", common.scheme))


def _converts(fleet: Fleet, by_role: Mapping[str, int]) -> bool:
    """Return whether decode gets KV that is divided among another number of GPUs."""
    return bool(fleet.prefill and fleet.decode) and by_role["prefill"] != by_role["decode"]


def _remarks(fleet: Fleet, common: Common) -> list[str]:
    """Return what neither file can say."""
    scheme = _scheme(fleet, common)
    unknown = f"# with a KV store of the connector {scheme}, as CONNECTOR"
    return [*common.remarks, *([unknown] if scheme not in ("", "shm", "redis", *NIXL) else [])]


def _store_lines(fleet: Fleet, common: Common) -> list[str]:
    """Return the variables of the KV store that was simulated."""
    scheme, size = _scheme(fleet, common), common.store_size
    if scheme == "shm":
        return [f"CONNECTOR=shm://pdserve?size={size}"]
    if scheme == "redis":
        return ["CONNECTOR=redis://redis:6379/0", f"REDIS_MEMORY={parse_size(size)}"]
    return ["CONNECTOR=nixl://", "IPC=host"] if scheme in NIXL else []


def env_lines(trial: Trial, by_role: Mapping[str, int], common: Common) -> list[str]:
    """Return the lines for `.env` of a Compose file that deploy a fleet; the GPUs are numbered from 0.

    Args:
        by_role: GPUs of an instance.
    """
    fleet, first = trial.fleet, 0
    lines = [f"MODEL={common.model}"] if common.model else []
    lines += [f"SERVED_MODEL_NAME={common.served_name}"] if common.served_name else []
    for role in ROLES:
        count, each = getattr(fleet, role), by_role[role]
        if count or role != "both":
            lines.append(f"{role.upper()}={count}")
        if count and common.has_gpus:
            last = first + count * each
            lines.append(f"{role.upper()}_GPUS={','.join(map(str, range(first, last)))}")
            lines += [f"{role.upper()}_TENSOR_PARALLEL_SIZE={each}"] if each > 1 else []
            first = last
    engine, router = flags_of(fleet, common)
    if common.routers > 1:  # each worker has a control port of its own
        ports = range(DEFAULT_CONTROL_PORT, DEFAULT_CONTROL_PORT + common.routers)
        engine["router"] = ",".join(f"router:{port}" for port in ports)
        router["workers"] = common.routers
    for name, flags in zip(("ENGINE_FLAGS", "ROUTER_FLAGS"), (engine, router), strict=True):
        lines += [f"{name}={' '.join(Fleet(settings=tuple(flags.items())).flags)}"] if flags else []
    lines += ["DECODE_FLAGS=--convert-kv"] if _converts(fleet, by_role) else []
    return [*lines, *_store_lines(fleet, common), *_remarks(fleet, common)]


def helm_values(trial: Trial, by_role: Mapping[str, int], common: Common) -> dict[str, Any]:
    """Return the values of the chart that deploy a fleet.

    Args:
        by_role: GPUs of an instance.
    """
    fleet = trial.fleet
    engine, router = flags_of(fleet, common)
    names = {"name": common.model, "servedName": common.served_name}
    values: dict[str, Any] = {"model": names} if common.model else {}
    for role in ROLES:
        count, gpus = getattr(fleet, role), by_role[role]
        values[role] = {"enabled": count > 0, "replicas": count}
        if count and common.has_gpus:
            values[role]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
            values[role]["flags"] = {"tensor-parallel-size": gpus} if gpus > 1 else {}
    if _converts(fleet, by_role):
        values["decode"].setdefault("flags", {})["convert-kv"] = True
    values["router"] = {"replicas": common.routers, "flags": router}
    values["instances"] = {"flags": engine}
    return values | _store_values(values["instances"], fleet, common)


def _store_values(instances: dict[str, Any], fleet: Fleet, common: Common) -> dict[str, Any]:
    """Return the values of the KV store that was simulated; of shared memory, also in those of all instances."""
    scheme, size = _scheme(fleet, common), common.store_size
    if scheme == "shm":
        instances["sharedMemory"] = {"host": True}
        return {"connector": f"shm://pdserve?size={size}"}
    if scheme == "redis":
        memory = {"memory": str(int(REDIS_ROOM * parse_size(size)))}
        resources = {"requests": {"cpu": "1"} | memory, "limits": memory}
        return {"redis": {"memory": str(parse_size(size)), "resources": resources}}
    return {"connector": "nixl://"} if scheme in NIXL else {}


def files_of(folder: str) -> list[Path]:
    """Return the files that `write` writes."""
    return [Path(folder, name) for name in (ENV_FILE, VALUES_FILE)]


def write(folder: str, trial: Trial, by_role: Mapping[str, int], common: Common) -> Sequence[str]:
    """Write both files into a folder, and return how they are used, a line each.

    Raises:
        SetupError: a file cannot be written.
    """
    remarks = ["# JSON is YAML", *_remarks(trial.fleet, common)]
    if _scheme(trial.fleet, common) == "shm":
        remarks.append("# shm:// joins instances of one node: for several, plan with another --connector")
    values = json.dumps(helm_values(trial, by_role, common), indent=2)
    file = "docker-compose.yml" if common.has_gpus else "docker-compose.cpu.yml"
    texts = {
        ENV_FILE: "\n".join(env_lines(trial, by_role, common)),
        VALUES_FILE: "\n".join([*remarks, values]),
    }
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
