"""Fleets to compare, and the simulation of one of them by the settings of `pdserve simulate` and `pdserve plan`."""

import math
import random
import re
import signal
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any

from pdserve.config import InstanceConfig, RouterConfig, parse_size
from pdserve.errors import SetupError
from pdserve.parent import receive_at_end
from pdserve.profile.profile import Profile
from pdserve.tools.bench.datasets import draw_load
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.requests import Request, Sample, counted
from pdserve.tools.bench.slo import METRICS
from pdserve.tools.bench.sweep import is_saturated
from pdserve.tools.bench.traces import BLOCK
from pdserve.tools.load_config import FleetConfig, parse_acceptance
from pdserve.tools.machine import num_cores
from pdserve.tools.roofline.estimate import MEDIAN_ERROR, WORST_ERROR, Estimate
from pdserve.tools.roofline.shape import load as load_shape
from pdserve.tools.simulator.breakdown import breakdown
from pdserve.tools.simulator.cores import SharedCores, cores_needed
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.simulation import MODEL, Deployment, Simulation
from pdserve.tools.simulator.verdict import Limit

PERCENTILES = (50, 90, 95, 99)
CHARS_PER_TOKEN = 4  # of texts, which are not tokenized
MAX_NUMBERS = 1000
DAY_S, MAX_DAYS = 86_400, 31  # of a load: idle instances have events, too
MAX_ITL_TARGET_MS = 1e9  # beyond which routers refuse an instance


@dataclass(frozen=True, order=True)
class Fleet:
    """Numbers of instances, their setting --itl-target-ms (None: off), and settings of `FleetConfig` of its own."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    itl_target_ms: float | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> int:
        return self.prefill + self.decode + self.both

    @property
    def is_complete(self) -> bool:
        """There are instances for both phases."""
        return self.both > 0 or (self.prefill > 0 and self.decode > 0)

    @property
    def shape(self) -> str:
        """Its numbers of instances, such as `2P+1D` or `3 both`."""
        parts = [f"{count}{letter}" for count, letter in ((self.prefill, "P"), (self.decode, "D")) if count]
        return "+".join([*parts, *([f"{self.both} both"] if self.both else [])])

    def __str__(self) -> str:
        return " ".join([self.shape, *self.flags])

    @property
    def flags(self) -> list[str]:
        """Its settings as on the command line."""
        target = [] if self.itl_target_ms is None else [f"--itl-target-ms {self.itl_target_ms:g}"]
        return target + [f"--{name.replace('_', '-')} {_text(value)}" for name, value in self.settings]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Forecast:
    """Forecast of a fleet by simulation.

    Attributes:
        figures: those of `pdserve bench serve`, of the simulated run, and the parts of TTFT.
        busy: share of the time in which the instances of each role were in a step, in the mean, and in which the routers'
            threads ("router") and the way to the KV store ("link") were busy.
        saturated: the requests in flight kept growing while requests arrived.
        samples: one per request that counts.
        is_given_up: a limit of the run was exceeded; the figures are of the requests until then.
    """

    fleet: Fleet
    figures: dict[str, Any]
    busy: dict[str, float]
    preemptions: int
    saturated: bool
    samples: list[Sample]
    is_given_up: bool = False


def parse_numbers(flag: str, text: str) -> list[int]:
    """Parse numbers such as `1`, `1..4` or `1,2,4`.

    Raises:
        SetupError: the text has another form.
    """
    numbers = list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", part)
        if match is None or len(span := range(int(match[1]), int(match[2] or match[1]) + 1)) not in range(
            1, MAX_NUMBERS
        ):
            raise SetupError(f"{flag}: {part!r} is no number of instances; write such as 2, 1..4 or 1,2,4")
        numbers += span
    return numbers


def parse_fleet(text: str) -> Fleet:
    """Parse numbers of instances such as `2P+1D` or `2B`.

    Raises:
        ValueError: the text has another form, or the fleet cannot serve.
    """
    parts = re.findall(r"(\d+)([PDB])", text)
    numbers = {letter: int(count) for count, letter in parts}
    fleet = Fleet(numbers.get("P", 0), numbers.get("D", 0), numbers.get("B", 0))
    is_well_formed = re.fullmatch(r"\d+[PDB](\+\d+[PDB])*", text) and len(numbers) == len(parts)
    if not is_well_formed or not fleet.is_complete:
        raise ValueError(f"{text!r} is no fleet; write such as 2P+1D, or 3B for instances with the role both")
    return fleet


def parse_itl_targets(text: str) -> list[float | None]:
    """Parse milliseconds such as `30` or `off,20,50`.

    Raises:
        SetupError: the text has another form.
    """
    try:
        targets = [None if part.strip() == "off" else float(part) for part in text.split(",")]
    except ValueError:
        targets = [0.0]
    if not all(target is None or 0 < target <= MAX_ITL_TARGET_MS for target in targets):
        raise SetupError(f"--itl-target-ms: {text!r} is not such as 30 or off,20,50")
    return targets


def load_profile(config: FleetConfig) -> Profile:
    """Read the profile that the settings name, or estimate that of their GPUs.

    Raises:
        SetupError: it cannot be read, or lacks the connector; the model is unknown or does not fit.
    """
    try:
        profile = roofline_profile(config) if config.gpu else Profile.load(config.profile)
    except OSError as error:
        reason = f"--profile {config.profile} cannot be read: {error.strerror}"
        raise SetupError(f"{reason}; `pdserve profile` writes one") from None
    except ValueError as error:
        raise SetupError(str(error)) from None
    if config.connector and config.connector not in profile.transfers:
        known = ", ".join(profile.transfers) or "none"
        raise SetupError(f"--connector {config.connector}: the profile has {known}")
    if config.speculate == "draft" and profile.draft is None:
        raise SetupError(
            "--speculate draft: the profile has no steps of a draft model; `pdserve profile --speculate draft` measures them"
        )
    return profile


def roofline_profile(config: FleetConfig, role: str = "") -> Profile:
    """Return the profile of an instance on GPUs, in a role if that has a number of them of its own.

    Raises:
        SetupError: the model is unknown, or does not fit.
    """
    return estimate_of(config, gpus_of(config, role)).profile()


def estimate_of(config: FleetConfig, gpus: int) -> Estimate:
    """Return the model of the settings on so many GPUs, with the sequences of the load where it has windows."""
    shape, context = load_shape(config.model), 1024.0
    if any(group.window for group in shape.kv.groups):
        context = statistics.fmean(one.input_tokens + one.output_tokens / 2 for one in draw_requests(config, math.inf))
    return Estimate(shape, config.gpu or "", gpus, config.weights, context=context)


def gpus_of(config: FleetConfig, role: str = "") -> int:
    """Return the GPUs of an instance.

    Raises:
        SetupError: they are to be chosen.
    """
    if (own := getattr(config, f"{role}_tensor_parallel_size", None)) is not None:
        return int(own)
    if config.tensor_parallel_size == "auto":
        raise SetupError("--tensor-parallel-size auto is of `pdserve plan`: give a number")
    return int(config.tensor_parallel_size)


def num_gpus(config: FleetConfig, fleet: Fleet) -> int:
    """Return the GPUs of a fleet."""
    config = replace(config, **dict(fleet.settings))
    return sum(getattr(fleet, role) * gpus_of(config, role) for role in fleet_roles(fleet))


def draw_requests(config: FleetConfig, rate: float) -> list[Request]:
    """Return the requests of a run at a mean rate; infinite: as the settings say.

    Raises:
        SetupError: they would go on for too long, or cannot be read.
    """
    requests = draw_load(config, rate, random.Random(config.seed), lambda text: max(1, len(text) // CHARS_PER_TOKEN))
    if config.ramp_up_strategy is not None and math.isfinite(
        rate
    ):  # a ramp has its own rates: it is slowed or hastened
        factor = _rate_of(requests) / rate
        requests = [replace(request, at=(request.at or 0.0) * factor) for request in requests]
    if (days := max(request.at or 0.0 for request in requests) / DAY_S) > MAX_DAYS:
        raise SetupError(f"the load takes {days:.3g} days, of at most {MAX_DAYS}: raise its rate, or --trace-speed")
    return _with_adapters([_stretch(request, config) for request in requests], config)


def adapter_names(config: FleetConfig) -> tuple[str, ...]:
    """Return the names of the adapters among which requests are drawn."""
    return tuple(f"adapter-{number}" for number in range(1, 1 + config.adapters))


def _with_adapters(requests: list[Request], config: FleetConfig) -> list[Request]:
    """Draw an adapter for each conversation; its turns have the same."""
    if not config.adapters:
        return requests
    names, drawn, chosen = adapter_names(config), random.Random(config.seed), dict[int, str]()
    weights = [number**-config.adapter_skew for number in range(1, 1 + config.adapters)]
    for one in requests:
        first = chosen.get(one.after) if one.after is not None else None
        chosen[one.index] = first or drawn.choices(names, weights)[0]
    return [replace(one, adapter=chosen[one.index]) for one in requests]


def mean_rate(config: FleetConfig) -> float:
    """Return the mean rate of the load in requests per second.

    Raises:
        SetupError: there is none, because all requests come at once.
    """
    if math.isfinite(config.request_rate) and config.ramp_up_strategy is None:
        return config.request_rate
    return _rate_of(draw_requests(config, math.inf))


def _rate_of(requests: list[Request]) -> float:
    times = [request.at or 0.0 for request in requests]
    if not max(times) > min(times):
        raise SetupError("give the load a --request-rate, or a data set with times")
    return len(times) / (max(times) - min(times))


def check_fits(config: FleetConfig, profile: Profile) -> None:
    """Raise SetupError if there are requests that no instance takes, so that no fleet could serve all of them."""
    most = instance_model(config, profile).max_model_len
    sizes = [one.input_tokens + one.output_tokens for one in draw_requests(config, math.inf)]
    if too_long := [size for size in sizes if size > most]:
        raise SetupError(
            f"{len(too_long)} of {len(sizes)} requests need up to {max(too_long)} tokens, and an instance takes {most}: "
            "shorten them (--stretch-prompts, --trace-length-scale), or give a profile with a longer context or a larger pool"
        )


def notes(config: FleetConfig, profile: Profile, sizes: Sequence[int] = ()) -> list[str]:
    """Return sentences on what a forecast takes from the profile that was not measured, and on cores that fleets of these
    sizes lack."""
    known = profile.machine
    limits = {
        "sequences": (config.max_num_seqs or profile.engine.max_num_seqs, profile.step.decode),
        "prompt tokens": (config.max_num_batched_tokens or profile.engine.max_num_batched_tokens, profile.step.prefill),
    }
    sentences = [
        f"Steps may have up to {limit} {name}, and were measured with up to {knots[-1][0]}: beyond, times are extrapolated."
        for name, (limit, knots) in limits.items()
        if limit > knots[-1][0]
    ]
    used = ("step", "transfers", "overheads")
    assumed = [name for name in profile.assumed if name.partition(".")[0] in used]
    if config.gpu:
        sentences.append(
            f"Steps are estimated by roofline, which is {MEDIAN_ERROR:.0%} off in the median at published points, and "
            f"{WORST_ERROR:.0%} at worst; KV goes over {scheme_of(config, profile)}."
        )
    if (
        config.cores is None
        and sizes
        and (needed := cores_needed(max(sizes), known.busy_threads, config.routers)) > known.cores > 0
    ):
        sentences.append(
            f"{max(sizes)} instances, routers and a client need {needed} cores, and the profile's machine has {known.cores}: "
            f"--cores {known.cores} forecasts them there."
        )
    if config.adapters and profile.adapters is None:
        assumed.append("what adapters add to steps")
    return [*sentences, *([f"Not measured but assumed: {', '.join(assumed)}."] if assumed else [])]


def _stretch(request: Request, config: FleetConfig) -> Request:
    """Return the request with the lengths that the settings ask for; texts count by their characters."""
    blocks = request.blocks or ((f"text-{request.index}", max(1, len(request.text) // CHARS_PER_TOKEN)),)
    blocks = tuple((name, max(1, round(size * config.stretch_prompts))) for name, size in blocks)
    output = max(1, round(request.output_tokens * config.stretch_answers))
    return replace(request, blocks=blocks, output_tokens=output, input_tokens=sum(size for _, size in blocks))


def scheme_of(config: FleetConfig, profile: Profile) -> str:
    """Return the scheme of the connector that is simulated; empty: it is not known, and taken to be `shm`."""
    return config.connector or next(iter(profile.transfers), "")


def instance_model(config: FleetConfig, profile: Profile) -> InstanceModel:
    """Return the model of the instances.

    Raises:
        SetupError: the number of blocks is unknown.
    """
    block_size = config.block_size or (BLOCK if config.dataset_name == "mooncake" else None)
    scheme = scheme_of(config, profile) or "shm"
    try:
        model = InstanceModel.from_profile(profile, scheme, num_blocks=config.num_blocks, block_size=block_size)
    except ValueError as error:
        raise SetupError(str(error)) from None
    draft = model.draft if config.speculate == "draft" else None
    return replace(model, acceptance=parse_acceptance(config.acceptance), draft=draft, adapters=adapter_names(config))


def deployment_of(config: FleetConfig, profile: Profile, fleet: Fleet) -> Deployment:
    """Return a fleet with the settings of its instances and routers."""
    instance = InstanceConfig(
        model=MODEL,
        max_num_seqs=config.max_num_seqs or profile.engine.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or profile.engine.max_num_batched_tokens,
        itl_target_ms=fleet.itl_target_ms,
        max_loras=config.max_loras,
        speculative_tokens=config.speculative_tokens,
    )
    router = RouterConfig(
        model=MODEL,
        policy=config.policy,
        prefill_policy=config.prefill_policy,
        decode_policy=config.decode_policy,
        local_prefill_tokens=config.local_prefill_tokens,
        ttft_target_ms=config.ttft_target_ms,
    )
    return Deployment(
        prefill=fleet.prefill,
        decode=fleet.decode,
        both=fleet.both,
        routers=config.routers,
        store_bytes=parse_size(config.store_size),
        instance=instance,
        router=router,
    )


def simulate(
    config: FleetConfig,
    profile: Profile,
    objectives: dict[str, float],
    fleet: Fleet,
    rate: float,
    limits: Sequence[Limit] = (),
) -> Forecast:
    """Simulate a fleet under the load that the settings describe, at a mean rate, as long as the limits can be met."""
    config = replace(config, **dict(fleet.settings))
    requests, model = draw_requests(config, rate), instance_model(config, profile)
    deployment = deployment_of(config, profile, fleet)
    cores, warmup = shared_cores(config, profile, fleet), config.warmup_requests
    simulation = Simulation(deployment, model, config.seed, cores=cores, models=role_models(config, fleet))
    limits = limits if not warmup else ()  # which are of the requests that count
    outcome = simulation.play(requests, is_chat=config.chat, think_s=config.think_time, warmup=warmup, limits=limits)
    samples = counted(outcome.samples, warmup)
    figures = summarize(samples, objectives, METRICS, PERCENTILES, [])
    figures |= {"ttft_parts_ms": breakdown(samples, outcome.stamps)} | outcome.drafts
    busy = {
        role: [share for name, share in outcome.busy.items() if name.startswith(role)] for role in fleet_roles(fleet)
    }
    return Forecast(
        fleet,
        figures,
        {role: sum(shares) / len(shares) for role, shares in busy.items()} | outcome.shared_busy,
        outcome.preemptions,
        is_saturated(outcome.samples, warmup),
        samples,
        outcome.is_given_up,
    )


def role_models(config: FleetConfig, fleet: Fleet) -> dict[str, InstanceModel]:
    """Return the models of instances whose role has a number of GPUs of its own, by role."""
    roles = [one for one in fleet_roles(fleet) if getattr(config, f"{one}_tensor_parallel_size", None) and config.gpu]
    return {role: instance_model(config, roofline_profile(config, role)) for role in roles}


def shared_cores(config: FleetConfig, profile: Profile, fleet: Fleet) -> SharedCores | None:
    """Return the cores of `--cores`; None if there are none, or if enough of them compute side by side without contention."""
    threads, busy, contention = profile.machine.busy_threads, config.busy_threads, profile.machine.contention
    enough = config.cores is not None and cores_needed(fleet.size, threads, config.routers) + busy <= config.cores
    if config.cores is None or (enough and contention == 1):
        return None
    return SharedCores(config.cores, threads, busy, contention)


def fleet_roles(fleet: Fleet) -> list[str]:
    """Return the roles of which a fleet has instances."""
    return [role for role in ("prefill", "decode", "both") if getattr(fleet, role)]


def simulate_all(
    config: FleetConfig,
    profile: Profile,
    objectives: dict[str, float],
    runs: list[tuple[Fleet, float]],
) -> Iterator[Forecast]:
    """Simulate (fleet, rate) pairs side by side, and yield the forecasts in order."""
    one = partial(_simulate_pair, config, profile, objectives)
    jobs = min(config.jobs or num_cores(), len(runs))
    if jobs <= 1:
        yield from map(one, runs)
        return
    context = get_context("fork")  # new processes would import torch first, which takes as long as several runs
    others = active_children()
    with ProcessPoolExecutor(jobs, context, _begin_worker) as pool:
        try:
            yield from pool.map(one, runs)
        except BaseException:  # such as Ctrl-C: what is being simulated would go on, and be waited for
            for process in set(active_children()).difference(others):
                process.terminate()
            raise


def _begin_worker() -> None:
    """Prepare a forked process, which has none of the threads of torch: it would wait for them for ever. Ctrl-C ends it
    without a traceback."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # first: the parent's handlers would print one
        signal.signal(signum, signal.SIG_DFL)
    receive_at_end()
    import torch

    torch.set_num_threads(1)


def _simulate_pair(
    config: FleetConfig, profile: Profile, objectives: dict[str, float], run: tuple[Fleet, float]
) -> Forecast:
    return simulate(config, profile, objectives, *run)
