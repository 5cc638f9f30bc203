"""The command `pdserve bench serve`."""

import json
import math
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from pdserve.admin_client import key_header
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.server_url import server_url
from pdserve.tools.bench import report
from pdserve.tools.bench.datasets import draw_load
from pdserve.tools.bench.energy import EnergyMeter
from pdserve.tools.bench.load import Target
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.requests import Request, counted, failures
from pdserve.tools.bench.run_page import run_page, sweep_page
from pdserve.tools.bench.server import acceptance, find_model, read_breakdown, read_drafts
from pdserve.tools.bench.slo import METRICS, is_good, mean_interval, parse_goodput, wilson
from pdserve.tools.bench.sweep import Search, Trial, is_saturated, is_short
from pdserve.tools.bench.vocabulary import Vocabulary, load_vocabulary
from pdserve.tools.bench.workers import Run, play
from pdserve.tools.load_config import BenchServeConfig

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
PROMPT_TOLERANCE = 0.05  # of prompt lengths that the server counts, beyond which there is a warning
WARM_UP_RUN = "w"
LOCAL = ("127.0.0.1", "localhost", "::1")  # hosts whose energy can be measured


@dataclass(frozen=True)
class Benchmark:
    """The parsed settings, and the server's model."""

    config: BenchServeConfig
    target: Target
    vocabulary: Vocabulary
    objectives: dict[str, float]
    metrics: list[str]
    percentiles: list[float]
    is_ours: bool


def run(config: BenchServeConfig) -> bool:
    """Measure, and report in the forms that the settings name. Returns False if no request succeeded."""
    result: Path | str = (
        Path(config.result_dir) / (config.result_filename or "result.json") if config.save_result else ""
    )
    report.check_writable(result, config.csv, config.html)
    benchmark = prepare(config)
    warm_up(benchmark)
    figures, page, ok = measure_sweep(benchmark) if config.slo_sweep else measure_once(benchmark)
    if config.save_result:
        name = config.result_filename or _file_name(config, str(figures["model_id"]))
        report.write_json(Path(config.result_dir) / name, figures)
    if config.html:
        report.write_file(Path(config.html), page())
    return ok


def prepare(config: BenchServeConfig) -> Benchmark:
    """Parse the settings and ask the server for its model.

    Raises:
        SetupError: a setting is wrong, or the server cannot be used.
    """
    try:
        objectives = parse_goodput(config.goodput)
    except ValueError as error:
        raise SetupError(str(error)) from None
    percentiles, body = _percentages("--metric-percentiles", config.metric_percentiles), _body(config.extra_body)
    if config.slo_sweep and not objectives:
        raise SetupError("--slo-sweep needs --goodput, such as ttft:500,itl:50")
    _sweep_shares(config)
    metrics = [name.strip() for name in config.percentile_metrics.split(",") if name.strip()]
    if wrong := [name for name in metrics if name not in METRICS]:
        raise SetupError(f"--percentile-metrics: there is no {wrong[0]!r}; there are {', '.join(METRICS)}")
    url = server_url(config.base_url or f"http://{config.host}:{config.port}", "--base-url", "--api-key")
    headers = key_header("--api-key", config.api_key)
    model = find_model(url, headers, config.model)
    vocabulary = load_vocabulary(config.tokenizer or str(model.get("root") or ""), required=bool(config.tokenizer))
    target = Target(
        url=url,
        path=config.endpoint or PATHS[config.backend],
        chat=config.backend == "openai-chat",
        model=model["id"],
        body={"temperature": config.temperature} | ({"ignore_eos": True} if config.ignore_eos else {}) | body,
        headers=headers,
        words=vocabulary.words,
        run=f"bench-{uuid.uuid4().hex[:8]}",
        seed=config.seed,
        max_concurrency=config.max_concurrency,
        think_time=config.think_time,
    )
    is_ours = model.get("owned_by") == "pdserve"
    return Benchmark(config, target, vocabulary, objectives, metrics, percentiles, is_ours)


def _percentages(flag: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= one <= 100 for one in found):
        raise SetupError(f"{flag} must be percentages such as 90,95,99, not {text!r}")
    return found


def _sweep_shares(config: BenchServeConfig) -> list[float]:
    """Return the shares of requests that must meet the SLO."""
    found = _percentages("--sweep-attainment", config.sweep_attainment)
    if min(found) <= 0:
        raise SetupError(f"--sweep-attainment must be more than 0, not {config.sweep_attainment!r}")
    return [one / 100 for one in found]


def _body(text: str) -> dict[str, Any]:
    """Return the fields of `--extra-body`."""
    try:
        found = read_json(text or "{}")
        json.dumps(found, allow_nan=False)  # Python reads NaN, which servers refuse
    except ValueError as error:
        raise SetupError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SetupError(f'--extra-body must be a JSON object such as {{"top_k": 5}}, not {text[:40]}')
    return found


def requests_of(benchmark: Benchmark, rate: float, seed: int) -> list[Request]:
    """Return the requests of one run with their times."""
    return draw_load(benchmark.config, rate, random.Random(seed), benchmark.vocabulary.count)


def warm_up(benchmark: Benchmark) -> None:
    """Send a few requests that are not counted.

    Raises:
        SetupError: the server cannot answer them. A 429 is an answer.
    """
    config = benchmark.config
    if not config.num_warmups:
        return
    first = requests_of(benchmark, math.inf, config.seed)[0]
    requests = [replace(first, index=index, at=0.0, after=None) for index in range(config.num_warmups)]
    target = replace(benchmark.target, run=f"{benchmark.target.run}-{WARM_UP_RUN}", seed=config.seed - 1)
    with progress("warm-up", len(requests)) as show:
        samples = play(requests, target, 1, show).samples
    if failed := next((one for one in samples if not one.ok and not one.rejected), None):
        raise SetupError(f"{target.url}{target.path} does not answer the warm-up request: {failed.error}")


def measure_once(benchmark: Benchmark) -> tuple[dict[str, Any], Callable[[], str], bool]:
    """Play the load once and print the report. Returns its figures, its page, and whether any request succeeded."""
    config = benchmark.config
    requests = requests_of(benchmark, config.request_rate, config.seed)
    drafts, is_here = read_drafts(benchmark.target.url), urlsplit(benchmark.target.url).hostname in LOCAL
    meter = EnergyMeter() if is_here else None
    with progress("requests", len(requests), meter) as show:
        played = play(requests, benchmark.target, config.client_processes, show)
    joules = {} if meter is None else meter.joules()
    played.samples = counted(played.samples, config.warmup_requests)
    figures = _figures(benchmark, played) | {"request_rate": _rate(config.request_rate)}
    figures |= {f"{kind}_joules": used for kind, used in joules.items()}
    if benchmark.is_ours:
        figures["ttft_breakdown"] = read_breakdown(benchmark.target.url, played.samples)
        figures |= acceptance(drafts, read_drafts(benchmark.target.url)) or {}
    figures["warnings"] = _warnings(requests, played)
    print(report.as_text(figures, benchmark.metrics, benchmark.percentiles))
    if config.csv:
        report.write_csv(config.csv, played.samples, benchmark.objectives)
    if config.save_detailed:
        figures |= report.details(played.samples)
    load = config.dataset_name if math.isinf(config.request_rate) else f"{config.request_rate:g} requests/s"
    title, own = f"{figures['model_id']}: {load}", (benchmark.objectives, benchmark.metrics, benchmark.percentiles)
    return figures, partial(run_page, title, figures, played.samples, *own), figures["completed"] > 0


def measure_sweep(benchmark: Benchmark) -> tuple[dict[str, Any], Callable[[], str], bool]:
    """Search the highest rates that meet the SLO, several times, and print them with their confidence."""
    config = benchmark.config
    shares = _sweep_shares(config)
    start = config.request_rate if math.isfinite(config.request_rate) else 1.0
    rows, trials, stopped = list[dict[str, Any]](), list[Trial](), False
    found = {share: list[float | None]() for share in shares}
    bounds = set[float]()  # shares of which a rate is only a bound
    for repetition in range(config.sweep_repetitions):
        search = Search(start, shares, config.sweep_tolerance)
        while not stopped and (rate := search.next_rate()) is not None:
            row, trial, stopped = _try_rate(benchmark, rate, len(rows))
            if not stopped:
                search.add(trial)
                trials.append(trial)
                rows.append(row | {"repetition": repetition})
        if stopped:
            break
        for share in shares:
            found[share].append(search.highest(share))
            bounds |= {share} if search.is_open(share) else set()
        start = search.highest(min(shares)) or start
    base = _base(benchmark) | {"goodput": benchmark.objectives, "sweep": rows, "interrupted": stopped}
    highest = [_highest(share, rates) | {"at_least": share in bounds} for share, rates in found.items()]
    figures = base | {"highest_rates": highest}
    figures["warnings"] = _alike([row["client_bottleneck"] for row in rows if row["client_bottleneck"]])
    if bounds:
        figures["warnings"].insert(0, f"{config.num_prompts} requests are too few for such rates; raise --num-prompts")
    found_rates = [_sentence(one) for one in figures["highest_rates"]]
    print(f"{' Highest rate that meets the SLO ':=^50}", *found_rates, sep="\n")
    print(*(f"WARNING: {one}" for one in figures["warnings"]), sep="\n")
    title = f"{figures['model_id']}: rates that meet the SLO"
    return figures, partial(sweep_page, title, found_rates, trials, shares, figures["warnings"]), bool(trials)


def _try_rate(benchmark: Benchmark, rate: float, number: int) -> tuple[dict[str, Any], Trial, bool]:
    """Run at one rate, with prompts of its own. Returns its figures, the trial, and whether Ctrl-C ended it."""
    config = benchmark.config
    seed = config.seed + number
    target = replace(benchmark.target, run=f"{benchmark.target.run}-{number}", seed=seed)
    requests = requests_of(benchmark, rate, seed)
    with progress(f"{rate:.3g} requests/s", len(requests)) as show:
        played = play(requests, target, config.client_processes, show)
    saturated, short = is_saturated(played.samples, config.warmup_requests), is_short(played.samples)
    played.samples = counted(played.samples, config.warmup_requests)
    good = sum(is_good(sample, benchmark.objectives) for sample in played.samples)
    trial = Trial(rate, good, len(played.samples), saturated, short)
    low, high = wilson(trial.good, trial.total)
    row = _figures(benchmark, played) | asdict(trial) | {"attainment": trial.attainment, "attainment_95": [low, high]}
    if not played.stopped:
        ending = ", saturated" if trial.saturated else ""
        print(f"{rate:8.3g} requests/s: {trial.attainment:6.1%} good ({low:.1%} to {high:.1%}){ending}", flush=True)
    return row, trial, played.stopped


def _highest(share: float, rates: list[float | None]) -> dict[str, Any]:
    known = [rate for rate in rates if rate is not None]
    mean, half = mean_interval(known) if known and len(known) == len(rates) else (None, None)
    half = half if half is not None and math.isfinite(half) else None
    return {"attainment": share, "rates": rates, "mean_rate": mean, "half_interval_95": half}


def _sentence(row: dict[str, Any]) -> str:
    label = f"{row['attainment']:.0%} of requests good:"
    if row["mean_rate"] is None:
        return f"{label:<30} {'not measured' if not row['rates'] else 'not at any rate tried, in some repetition'}"
    spread = f" ± {row['half_interval_95']:.2g} (95 %)" if row["half_interval_95"] is not None else ""
    bound = "at least " if row["at_least"] else ""
    return f"{label:<30} {bound}{row['mean_rate']:.3g} requests/s{spread}, {len(row['rates'])} repetitions"


def _alike(warnings: list[str]) -> list[str]:
    """Return one of those that differ in numbers only, with how many there were."""
    kinds: dict[str, list[str]] = {}
    for one in warnings:
        kinds.setdefault(re.sub(r"[\d.]+", "", one), []).append(one)
    return [f"{of[0]}{f' (so in {len(of)} runs)' if len(of) > 1 else ''}" for of in kinds.values()]


def _base(benchmark: Benchmark) -> dict[str, Any]:
    config = benchmark.config
    names = (
        "backend",
        "label",
        "num_prompts",
        "warmup_requests",
        "dataset_name",
        "seed",
        "burstiness",
        "max_concurrency",
        "client_processes",
    )
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    own = {"date": date, "model_id": benchmark.target.model, "tokenizer_id": config.tokenizer or None}
    return own | {"endpoint_type": config.backend} | {name: getattr(config, name) for name in names}


def _figures(benchmark: Benchmark, played: Run) -> dict[str, Any]:
    arguments = (benchmark.objectives, benchmark.metrics, benchmark.percentiles, played.cpu_shares)
    figures = summarize(played.samples, *arguments)
    return _base(benchmark) | figures | {"interrupted": played.interrupted}


def _warnings(requests: list[Request], played: Run) -> list[str]:
    asked = {one.index: one.input_tokens for one in requests}
    done = [sample for sample in played.samples if sample.ok and asked[sample.index]]
    wanted, had = sum(asked[one.index] for one in done), sum(one.input_tokens for one in done)
    warnings = []
    if wanted and abs(had / wanted - 1) > PROMPT_TOLERANCE:
        warnings.append(f"the server counted {had / wanted:.2f} tokens per prompt token asked for; try --tokenizer")
    return warnings + failures(played.samples)[:5]


def _rate(rate: float) -> float | str:
    return rate if math.isfinite(rate) else "inf"


def _file_name(config: BenchServeConfig, model: str) -> str:
    concurrency = "" if config.max_concurrency is None else f"-concurrency{config.max_concurrency}"
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = model.rpartition("/")[2]
    return f"{config.label or config.backend}-{config.request_rate}qps{concurrency}-{name}-{now}.json"


@contextmanager
def progress(title: str, total: int, meter: EnergyMeter | None = None) -> Iterator[Any]:
    """Yield a function that shows how far a run is: on a terminal as it changes, otherwise a line every few seconds.

    Args:
        meter: updated on the way.
    """
    console, started, last = Console(stderr=True), time.monotonic(), time.monotonic()
    with console.status(title) as status:

        def show(run: Run) -> None:
            nonlocal last
            if meter is not None:
                meter.update()
            failed = sum(not sample.ok for sample in run.samples[-1000:])
            ended = f"{title}: {len(run.samples)} of {total} ended"
            text = f"{ended}, {failed} of the last 1000 failed, {time.monotonic() - started:.0f} s"
            status.update(f"{text}{', stopping' if run.stopped else ', Ctrl-C ends and reports'}")
            if not console.is_terminal and time.monotonic() - last > 5:
                last = time.monotonic()
                print(text, file=sys.stderr)

        yield show
