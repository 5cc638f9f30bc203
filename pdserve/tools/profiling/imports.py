"""Published timings as profiles: DistServe's and Splitwise's files, and the cost models that a live fleet reports."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from pdserve.admin_client import DIRECT, admin_headers
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.profile.fit import Timing, fit_steps
from pdserve.profile.profile import EngineFacts, Machine, Profile, StepModel, TransferModel

BATCHES = (1, 2, 4, 8, 16, 32, 64, 94, 95, 128, 192, 256)  # DistServe's model changes at 95
CONTEXTS = (128, 512, 1024, 2048)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
# What reading another form raises.
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)
REST = ("transfers", "swap", "start_up_s", "role_flip_s", "overheads")  # not in published files


def import_file(source: str, file: str, entry: str) -> Profile:
    """Return one entry of a published file as a profile.

    Args:
        entry: what of the file, such as `facebook/opt-13b,1`. With a single entry it may be empty.

    Raises:
        SetupError: the file cannot be read, is of another form, or has no such entry.
    """
    readers: dict[str, Callable[[Path], dict[str, Profile]]] = {"distserve": _distserve, "splitwise": _splitwise}
    try:
        profiles = readers[source](Path(file))
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}") from None
    except (*MALFORMED, csv.Error, ArithmeticError) as error:
        raise SetupError(f"{file} is not a file of {source}: {type(error).__name__} {error}") from None
    if len(profiles) == 1 and not entry:
        return next(iter(profiles.values()))
    if entry not in profiles:
        raise SetupError(f"--import-entry must be one of: {'; '.join(profiles)}")
    return profiles[entry]


def _distserve(file: Path) -> dict[str, Profile]:
    """Read DistServe's coefficients in ms. Entries are `model,tensor parallelism`.

    Its models are prefill a + b × Σ length + c × Σ length², and decode a + b × Σ context + c × batch, with other coefficients
    from a batch size on. KV capacity is read from `distserve_max_num_tokens.csv` beside the file, if it is there.
    """
    capacities = {}
    if (beside := file.with_name("distserve_max_num_tokens.csv")).exists():
        with beside.open(newline="") as rows:
            capacities = {
                f"{row['model']},{row['tp']}": int(row["max_num_tokens"])
                for row in csv.DictReader(rows)
                if row["pp"] == "1"
            }
    profiles = {}
    for model, by_degree in read_json(file.read_text()).items():
        for degree, fits in by_degree.items():
            name = f"{model},{degree}"
            facts = EngineFacts(num_blocks=capacities.get(name, 0) // 16, max_num_seqs=256, max_model_len=2048)
            profiles[name] = _published(
                "distserve", name, model, f"A100-80G x{degree}", _distserve_timings(fits), facts
            )
    return profiles


def _distserve_timings(fits: dict[str, Any]) -> list[Timing]:
    a, b, c = fits["prefill"]
    timings: list[Timing] = [
        ([(length, 0)] * count, (a + b * length * count + c * length**2 * count) / 1e3)
        for length in PROMPTS
        for count in (1, 2, 4)
    ]
    for batch in BATCHES:
        is_small = batch < fits["decoding_large_small_bs_threshold"]
        a, b, c = fits["decoding_smallbs" if is_small else "decoding_largebs"]
        timings += [([(1, past)] * batch, (a + b * batch * (past + 1) + c * batch) / 1e3) for past in CONTEXTS]
    return timings


def _splitwise(file: Path) -> dict[str, Profile]:
    """Read Splitwise's measurements, times in ms. Entries are `model,hardware,tensor parallelism`."""
    runs: dict[str, dict[tuple[int, int, int], list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            sizes = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            times = float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3
            runs[f"{row['model']},{row['hardware']},{row['tensor_parallel']}"][sizes].append(times)
    profiles = {}
    for name, by_sizes in runs.items():
        timings: list[Timing] = []
        for (prompt, batch, output), samples in by_sizes.items():
            prefill, decode = (statistics.median(one[i] for one in samples) for i in (0, 1))
            timings.append(([(prompt, 0)] * batch, prefill))
            timings.append(([(1, prompt + output // 2)] * batch, decode))  # the mean over the answer
        model, hardware, degree = name.split(",")
        profiles[name] = _published(
            "splitwise", name, model, f"{hardware} x{degree}", timings, EngineFacts(max_num_seqs=64)
        )
    return profiles


def _published(source: str, name: str, model: str, device: str, timings: list[Timing], facts: EngineFacts) -> Profile:
    step, residuals = fit_steps(timings)
    fixed = min(Profile(model="", step=step).costs.prefill[0], step.prefill[0][1])
    return Profile(
        model=model,
        source=f"{source}: {name}",
        machine=Machine(device=device),
        engine=facts,
        step=replace(step, mixed=(-fixed, 1.0, 1.0)),  # as `pdserve.costs`: what prompts add has no fixed part
        residuals=residuals,
        assumed=("step.mixed", "engine", *REST),
    )


def from_fleet(url: str) -> Profile:
    """Return what the first instance of a live fleet reports.

    Raises:
        SetupError: the router does not respond, or has no instance, or it has not reported its costs yet.
    """
    try:
        with httpx.Client(headers=admin_headers(), timeout=30.0, mounts=DIRECT) as http:
            answer = http.get(f"{url.rstrip('/')}/debug/instances").raise_for_status()
        profiles = list(map(_of_instance, read_json(answer.content)["instances"][:1]))
    except (httpx.HTTPError, httpx.InvalidURL, *MALFORMED) as error:
        raise SetupError(
            f"{url} gives no /debug/instances of a pdserve router: {type(error).__name__} {error}"
        ) from None
    if not profiles:
        raise SetupError(f"{url} has no instance at all")
    return profiles[0]


def _of_instance(one: dict[str, Any]) -> Profile:
    costs = one["costs"]
    (a, b, pair_s), (decode_a, decode_b, context_s), (latency_s, byte_s) = (
        costs[name] for name in ("prefill", "decode", "transfer")
    )
    bytes_per_s = 1 / max(byte_s, 1e-15)
    return Profile(
        model=one["model"],
        source=f"fleet: {one['instance_id']}",
        machine=Machine(device=one["device"], numerics=one["numerics"]),
        engine=EngineFacts(block_size=one["block_size"], num_blocks=one["num_blocks"], dtype=one["dtype"]),
        step=StepModel(
            decode=((1, decode_a + decode_b), (64, decode_a + 64 * decode_b)),
            context_s=context_s,
            prefill=((1, a + b), (2048, a + 2048 * b)),
            pair_s=pair_s,
            mixed=(-a, 1.0, 1.0),
        ),
        transfers={one["connector"]: TransferModel(latency_s, bytes_per_s, latency_s, bytes_per_s, bytes_per_s)},
        assumed=(
            "step.mixed",
            "engine",
            "transfers.link_bytes_per_s",
            "swap",
            "start_up_s",
            "role_flip_s",
            "overheads",
        ),
    )
