"""The command `pdserve profile`."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.table import Table

from pdserve.config import InstanceConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.profile.drift import check_match, drift_of
from pdserve.profile.fit import fit_steps, fit_transfer, step_residuals
from pdserve.profile.profile import (
    EngineFacts,
    Machine,
    Overheads,
    Profile,
    Residuals,
    TransferModel,
    groups_of,
)
from pdserve.settings import shared_settings
from pdserve.tools.bench.report import check_writable
from pdserve.tools.load_config import ProfileConfig
from pdserve.tools.machine import num_cores, processor
from pdserve.tools.profiling import deployment, imports

Start = Callable[[UpConfig], AbstractContextManager[Any]]
Show = Callable[[str], None]
CHECKED_STEPS = 60  # random ones, which the model is not fitted to
TRANSFER_BLOCKS = (1, 8, 64)
CONCURRENCY = (1, 4)
ASSUMED = (  # until a deployment is measured
    "start_up_s",
    "role_flip_s",
    *(f"overheads.{name}_s" for name in ("client", "router_request", "router_prompt_token", "router_token", "frame")),
)
TRANSFER_S = 0.5  # of each size and concurrency
WITHOUT_DRAFTS = {"speculate": "off", "speculative_model": "", "speculative_config": ""}
FLAGS = (  # settings of an instance that change its times, besides those that `EngineFacts` has
    "model",
    "dtype",
    "tensor_parallel_size",
    "kv_cache_dtype",
    "max_model_len",
    "kernel",
    "quantization",
    "batch_invariant",
    "async_scheduling",
)


def run(config: ProfileConfig, start: Start) -> bool:
    """Measure, read or import a profile, print it, and write it to its file.

    Args:
        start: returns a deployment with these settings.

    Returns:
        False if an instance has drifted from the profile that it is compared with.

    Raises:
        SetupError: something cannot be measured, read or written.
    """
    if not config.compare:
        check_writable(config.output)
    if config.from_fleet:
        profile = imports.from_fleet(config.from_fleet)
    elif config.import_source is not None:
        profile = imports.import_file(config.import_source, config.import_file, config.import_entry)
    else:
        try:
            profile = _measure(config, start)
        except KeyboardInterrupt:
            raise SetupError("stopped; no profile was written") from None
    _print(profile)
    if config.compare:
        return _compare(_load(config.compare), profile, force=config.force)
    try:
        profile.save(config.output)
    except OSError as error:
        raise SetupError(f"{config.output} cannot be written: {error.strerror}") from None
    print(f"written to {config.output}")
    return True


def _load(file: str) -> Profile:
    try:
        return Profile.load(file)
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SetupError(str(error)) from None


def _compare(profile: Profile, live: Profile, *, force: bool) -> bool:
    if reason := check_match(profile, live, force=force):
        print(f"{reason[0].upper()}{reason[1:]}.")
    sentences = drift_of(profile, live.step)
    print("\n".join(sentences) or "The profile holds.")
    return not sentences


def _measure(config: ProfileConfig, start: Start) -> Profile:
    """Measure everything; with `--quick`, the router in front of an instance that is paced by what has been measured."""
    with _progress() as show, TemporaryDirectory() as folder:
        profile = _measure_engine(config, show)
        transfers, residuals = _measure_transfers(config, profile.engine.block_bytes, show)
        profile = replace(profile, transfers=transfers, residuals=profile.residuals | residuals)
        settings = shared_settings(config, UpConfig) | {
            "connector": UpConfig.connector,
            "threads": profile.machine.threads,
            **WITHOUT_DRAFTS,  # tokens that come together cost routers less
        }
        for name in ("PDSERVE_API_KEY", "PDSERVE_ADMIN_KEY"):
            os.environ.pop(
                name, None
            )  # the router that is measured must not require the keys of a permanent deployment
        alone = UpConfig(**settings, prefill=0, decode=0)
        try:
            if config.quick:
                show("a router and a paced instance: requests")
                profile.save(paced := f"{folder}/profile.json")
                with start(replace(alone, both=1, paced=paced, lora_modules="", lora_folder="")) as one:
                    one.wait_ready()
                    profile, measured = deployment.measure_router(one, profile, quick=True), ["overheads"]
            else:
                show("a router and an instance: start-up, role changes, requests")
                profile = deployment.measure(lambda both: start(replace(alone, both=both)), profile)
                measured = ["overheads", "start_up_s", "role_flip_s"]
        except httpx.HTTPError as error:
            raise SetupError(f"the deployment that was started to be measured does not answer: {error}") from None
        return replace(profile, assumed=tuple(one for one in profile.assumed if one.split(".")[0] not in measured))


def _measure_engine(config: ProfileConfig, show: Show) -> Profile:
    """Time the steps of an instance of this process, and what its thread does around them."""
    import torch

    from pdserve.engine.warm_up import measure_swaps
    from pdserve.instance.instance import Instance
    from pdserve.speculation.model_drafter import ModelDrafter
    from pdserve.tools.profiling.adapters import time_adapters
    from pdserve.tools.profiling.contention import time_contention
    from pdserve.tools.profiling.drafts import time_drafts
    from pdserve.tools.profiling.steps import grid, random_steps, time_around_steps, time_steps

    show("loading the model")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    settings = shared_settings(config, InstanceConfig) | {"connector": "memory://profile?size=64MiB"}
    if config.speculate == "draft":
        settings["speculative_tokens"] = config.draft_length  # always, whether they pay or not
    instance = Instance.start(InstanceConfig(**settings), lambda link, frame: None)
    engine, layout = instance.engine, instance.engine.layout
    limits = engine.max_model_len - 1, config.max_num_batched_tokens, config.max_num_seqs
    works, checked = grid(*limits, quick=config.quick), random_steps(*limits, CHECKED_STEPS, config.seed)
    timings = list(time_steps(engine, works + checked, config.repeat, show))
    try:
        step, residuals = fit_steps(timings[: len(works)])
    except ValueError as error:
        raise SetupError(f"the limits of the engine leave {error}") from None
    checks = step_residuals(step, timings[len(works) :])
    adapters = time_adapters(engine, config, config.repeat, show) if config.lora_modules else None
    draft = None
    if isinstance(engine.drafter, ModelDrafter):
        draft, of_draft = time_drafts(engine, engine.drafter, config.speculative_model, config.repeat, show)
        residuals |= of_draft
    engine.drafter = None  # whose time is none of the steps'
    engine_step_s, engine_sequence_s = time_around_steps(instance, config.max_num_seqs, show)
    swaps = list(measure_swaps(engine))
    for blocks, seconds in swaps:
        instance.reporter.meter.calibrate_swap(blocks, seconds)
    swap = instance.reporter.meter.costs(time.monotonic()).swap
    return Profile(
        model=config.name,
        model_fingerprint=layout.model_fingerprint,
        source="measured",
        machine=Machine(
            processor=processor(),
            threads=torch.get_num_threads(),
            cores=num_cores(),
            contention=time_contention(engine, show),
            device=str(engine.checkpoint.device),
            torch=torch.__version__,
            numerics=layout.numerics,
        ),
        engine=_facts_of(engine, config),
        step=step,
        adapters=adapters,
        draft=draft,
        swap=swap,
        overheads=Overheads(engine_step_s=engine_step_s, engine_sequence_s=engine_sequence_s),
        residuals=residuals | {f"{kind}, not fitted": value for kind, value in checks.items()},
        assumed=(*ASSUMED, *(() if swaps else ("swap",))),
        flags=flags_of(config),
    )


def _facts_of(engine: Any, config: ProfileConfig) -> EngineFacts:
    """Return what the profile says of an `Engine`, whose module is imported late."""
    layout, runner = engine.layout, engine.runner
    return EngineFacts(
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        num_blocks=runner.kv.num_blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=engine.max_model_len,
        dtype=layout.dtype,
        groups=groups_of(layout, runner.window),
        num_pages=runner.kv.num_pages,
    )


def flags_of(config: ProfileConfig) -> dict[str, Any]:
    """Return the flags with which an instance is as the one that was measured, without dashes and defaults."""
    values = {name: getattr(config, name) for name in FLAGS}
    return {name.replace("_", "-"): one for name, one in values.items() if one != getattr(InstanceConfig, name)}


def _measure_transfers(
    config: ProfileConfig, block_bytes: int, show: Show
) -> tuple[dict[str, TransferModel], dict[str, Residuals]]:
    """Store and load blocks of this size through the connector."""
    from pdserve.kv_transfer.bench import GiB, figures
    from pdserve.kv_transfer.connectors.shm.connector import removing_new_segments

    scheme = config.connector.partition("://")[0]
    size = max(1024, -(-block_bytes // 8) * 8)
    url = config.connector if config.connector != UpConfig.connector else f"shm://profile-{os.getpid()}?size=1GiB"
    points: dict[str, list[tuple[float, float]]] = {"load": [], "store": []}
    link = 0.0
    seconds = TRANSFER_S / 5 if config.quick else TRANSFER_S
    with removing_new_segments(url):
        for figure in figures(
            url, size, TRANSFER_BLOCKS, CONCURRENCY, seconds, lambda name, _: show(f"{scheme}://: {name}")
        ):
            if figure.failed:
                raise SetupError(f"{scheme}:// did not move {figure.failed} of the blocks: {figure.outcomes}")
            if figure.concurrency == 1:
                points[figure.operation].append((figure.blocks * size, figure.p50_ms / 1e3))
            elif figure.operation == "load":
                link = max(link, figure.gib_s * GiB)
    model, residuals = fit_transfer(points["load"], points["store"], link)
    return {scheme: model}, {f"{scheme}:// load": residuals}


def _print(profile: Profile) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    costs = profile.costs
    (a, b, c), (decode_a, decode_b, decode_c) = costs.prefill, costs.decode
    machine = f"{profile.machine.processor} {profile.machine.device}".strip()
    console.print(f"{profile.model} on {machine}: {profile.source}", markup=False)
    console.print(f"prefill  {a * 1e3:.2f} ms + {b * 1e6:.2f} µs × tokens + {c * 1e9:.2f} ns × pairs")
    console.print(
        f"decode   {decode_a * 1e3:.2f} ms + {decode_b * 1e6:.1f} µs × sequences + {decode_c * 1e9:.0f} ns × context tokens"
    )
    batch, most = profile.step.saturation, profile.step.decode[-1][0]
    console.print(
        f"B_sat    {batch or f'more than {most}'} sequences, whose decode step takes twice as long as that of one"
    )
    if profile.machine.contention > 1:
        console.print(f"cores    a step takes {profile.machine.contention:.2f} times as long while the others compute")
    if profile.adapters is not None:
        added = ", ".join(f"{1e3 * seconds:.2f} ms with {rows} rows" for rows, seconds in profile.adapters.rows)
        console.print(f"adapter  {added}; {1e3 * profile.adapters.adapter_s:.2f} ms for each further one")
    if profile.draft is not None:
        first, (most, last) = profile.draft.step.decode_seconds(1, 0), profile.draft.step.decode[-1]
        times = f"{1e3 * first:.2f} ms with one row, {1e3 * last:.2f} ms with {most} rows"
        console.print(f"drafts   {times}: a step of {profile.draft.model}", markup=False)
    for scheme, one in profile.transfers.items():
        speeds = f"{one.bytes_per_s / 1e9:.2f} GB/s alone, {one.link_bytes_per_s / 1e9:.2f} GB/s together"
        console.print(f"{scheme}://  {one.latency_s * 1e3:.2f} ms per load, {speeds}", markup=False)
    if profile.assumed:
        console.print(f"not measured, so the defaults: {', '.join(profile.assumed)}")
    if not profile.residuals:
        return
    table = Table(box=None, header_style="bold")
    for column in ("model", "points", "error p50", "p90", "p99", "bias"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, residuals in profile.residuals.items():
        errors = (residuals.p50, residuals.p90, residuals.p99)
        table.add_row(name, str(residuals.n), *(f"{error:.1%}" for error in errors), f"{residuals.bias:+.1%}")
    console.print(table)


@contextmanager
def _handling_interrupts(handler: Callable[[int, FrameType | None], NoReturn]) -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _progress() -> Iterator[Show]:
    """Yield a function that shows what happens: on a terminal as it changes, otherwise a line every few seconds.

    It raises KeyboardInterrupt after a Ctrl-C that was lost, as in a callback of C code or in a destructor.
    """
    console, last, interrupted = Console(stderr=True), 0.0, False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    with console.status("") as status, _handling_interrupts(interrupt):

        def show(text: str) -> None:
            nonlocal last
            if interrupted:
                raise KeyboardInterrupt
            status.update(text)
            if not console.is_terminal and time.monotonic() - last > 5:
                last = time.monotonic()
                print(text, file=sys.stderr)

        yield show
