"""The experiments of the PagedAttention paper (SOSP 2023), in virtual time: `python benchmarks/paper.py [--parts rate]`.

The engine's scheduler and block pool serve Poisson arrivals. Steps take what a roofline of OPT-13B on one A100 says, and the
pool has the paper's 15,700 slots, so the differences are those of memory alone. Beside it stand the paper's baselines, with
the same steps and tokens per step: contiguous reservations of the longest request ("max"), of the next power of two, and of
the length that the request will have ("oracle"), and batches that end as one ("static").

rate      the highest rate at which normalized latency, of a request per output token, is at most `--limit` in the mean
blocks    the same by block size, with the share of held slots without KV
choices   the same for several answers to a prompt, which share its blocks, beside "oracle"
beams     the same for beams, which also share the blocks of their common histories, with the share of blocks that this saves
prefix    the same behind a shared prefix of one and of five examples, through 1P+1D and a store
chunks    TTFT and ITL by the tokens of a step
batches   throughput and ITL by the sequences of a batch

Lengths are drawn from log-normal distributions with the means that the paper names: the data sets are not in the tree.
Beams go on from another beam by chance, as often as makes them share about as much as the paper's. Its figures were compared
with the text of its sections 6 and 7.
"""

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

import report
from lengths import RESERVATIONS, Contiguous, Request, answer, sequence
from rich.console import Console

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.profile.profile import Profile, StepModel
from pdserve.tools.load_config import FleetConfig
from pdserve.tools.roofline.estimate import Estimate
from pdserve.tools.roofline.shape import load as load_shape
from pdserve.tools.simulator.fleet import Fleet, simulate

SLOTS, LONGEST = 15_700, 2048  # of OPT-13B on an A100 of 40 GB, in the paper's table 1
BLOCK, CHUNK = 16, 2048
LENGTHS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # means of prompts and answers, in the paper's 6.1
SPREAD = 1.0  # standard deviation of the logarithm
PREFIXES = {"one example": 80, "five examples": 341}  # tokens, in the paper's 6.4
PRECISION, HIGHEST = 0.06, 1024.0  # of rates; a rate at which all come at once
LOWEST = 1 / 64  # a rate at which each request is alone: a limit that it misses is missed at any rate
MORE = {"sharegpt": 1, "alpaca": 6}  # times as many requests, since they are short
FIRST = {"sharegpt": 2.0, "alpaca": 16.0}  # rates that are tried
SAMPLED = 16  # steps, of which one is looked at for the slots in use
SWITCH = 0.1  # of the steps of a beam, before which it goes on from another one
PUBLISHED = {
    "sharegpt": {"max": "2.7 to 8", "power of two": "", "oracle": "1.7 to 2.7", "static": "up to 22"},
}
STEP: StepModel = Estimate(load_shape("facebook/opt-13b"), "a100").step


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    parts: str = flag(
        "of rate, blocks, choices, beams, prefix, chunks and batches", "rate,blocks,choices,beams,prefix,chunks,batches"
    )
    requests: int = flag("of a run with ShareGPT's lengths", 300, least=20)
    limit: float = flag("seconds of normalized latency", 0.1, above=0)
    seed: int = flag("of lengths and arrivals", 0)


QUICK = {"requests": 20}


@dataclass
class Outcome:
    """Seconds per output token of each request, and sums over steps of held slots and of tokens in them."""

    latencies: list[float]
    held: int = 0
    used: int = 0


Serve = Callable[[list[Request]], Outcome]


def draw(data: str, rate: float, settings: Settings) -> list[Request]:
    """Return requests of a data set's lengths, the same for every rate but for their times."""
    random_ = random.Random(settings.seed)
    gaps = [random_.expovariate(1.0) for _ in range(settings.requests * MORE[data])]

    def length(mean: float) -> int:
        return max(1, min(LONGEST // 2, round(random_.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))

    lengths = [tuple(map(length, LENGTHS[data])) for _ in gaps]
    return [Request(prompt, output, at / rate) for at, (prompt, output) in zip(accumulate(gaps), lengths, strict=True)]


def paged(requests: list[Request], block: int = BLOCK, choices: int = 1, switch: float = 0.0) -> Outcome:
    """Run our scheduler and pool. Several choices share the blocks of their prompt, and it ends with the last of them.

    Of several choices, the outcome has the blocks that are held and those of all sequences.

    Args:
        switch: chance with which a choice goes on from another one of its request, as beams do.
    """
    pool = BlockPool(SLOTS // block, block)
    scheduler = Scheduler(pool, max_num_seqs=len(requests) * choices, max_num_batched_tokens=CHUNK)
    outcome, now, arriving = Outcome([]), 0.0, deque(enumerate(requests))
    origin = dict[Sequence, int]()
    left, steps = [choices] * len(requests), 0
    while arriving or scheduler.waiting or scheduler.running or scheduler.loaded:
        if not origin:
            now = max(now, arriving[0][1].at)
        while arriving and arriving[0][1].at <= now:
            index, request = arriving.popleft()
            seq = sequence(index, request.input, request.output, block)
            origin[seq] = index
            scheduler.add(seq)
        counts = scheduler.schedule().plan.counts
        now += STEP.seconds([(count, seq.kv.num_computed) for seq, count in counts.items()])
        for seq, count in counts.items():
            seq.kv.mark_computed(count)
        steps += 1
        if steps % SAMPLED == 0:
            outcome.held += pool.num_held * block
            outcome.used += sum(
                seq.kv.num_computed if choices == 1 else len(seq.kv.block_ids) * block for seq in origin
            )
        seqs = _reborn(scheduler, origin, list(counts), choices, switch)
        for seq in seqs if choices > 1 else ():
            if seq.kv.num_uncomputed == seq.output.num_generated == 0:
                for number in range(1, choices):
                    fork = scheduler.fork(seq, f"{origin[seq]}-{number}", seq.sampling)
                    fork.output.append(number)
                    origin[fork] = origin[seq]
        for seq in answer(scheduler, seqs):
            index = origin.pop(seq)
            left[index] -= 1
            if not left[index]:
                outcome.latencies.append((now - requests[index].at) / requests[index].output)
    return outcome


BEAMS = random.Random(0)


def _reborn(
    scheduler: Scheduler, origin: dict[Sequence, int], done: list[Sequence], choices: int, switch: float
) -> list[Sequence]:
    """Let some choices go on from others of their request, if all of it have a token. Returns the sequences of the step."""
    if not switch:
        return done
    groups = dict[int, list[Sequence]]()
    for seq in done:
        if not seq.kv.num_uncomputed and seq.output.num_generated:
            groups.setdefault(origin[seq], []).append(seq)
    replaced = dict[Sequence, Sequence]()
    for index, group in groups.items():
        for seq in group if len(group) == choices else ():
            parent = BEAMS.choice(group) if BEAMS.random() < switch else seq
            if parent is not seq:
                replaced[seq] = scheduler.fork(parent, seq.request_id, seq.sampling)
                origin[replaced[seq]] = index
    for seq in replaced:
        del origin[seq]
        scheduler.remove(seq)
    return [replaced.get(seq, seq) for seq in done]


def contiguous(requests: list[Request], reservation: str = "oracle", choices: int = 1) -> Outcome:
    """Serve with one contiguous run of slots for each request, of the size that a reservation says."""
    sizes = [choices * RESERVATIONS[reservation](request, LONGEST) for request in requests]
    server = Contiguous(requests, sizes, SLOTS, CHUNK, choices)
    outcome, now, arriving = Outcome([]), 0.0, deque(enumerate(requests))
    while arriving or server.waiting or server.computed:
        if not server.waiting and not server.computed:
            now = max(now, arriving[0][1].at)
        while arriving and arriving[0][1].at <= now:
            server.waiting.append(arriving.popleft()[0])
        now += STEP.seconds(server.step())
        outcome.held += server.reserved
        outcome.used += sum(server.computed.values())
        outcome.latencies += [(now - requests[i].at) / requests[i].output for i in server.end()]
    return outcome


def static(requests: list[Request]) -> Outcome:
    """Serve batches of as many requests as fit with the longest reservation; all of a batch end with its longest answer."""
    outcome, now, first = Outcome([]), 0.0, 0
    arrivals = [request.at for request in requests]
    while first < len(requests):
        now = max(now, requests[first].at)
        last = min(bisect_right(arrivals, now), first + SLOTS // LONGEST)
        batch = requests[first:last]
        longest = max(one.input for one in batch)
        now += STEP.seconds([(max(2, longest), 0)] * len(batch))
        for step in range(max(one.output for one in batch) - 1):
            now += STEP.decode_seconds(len(batch), len(batch) * (longest + step))
        outcome.latencies += [(now - one.at) / one.output for one in batch]
        first = last
    return outcome


SERVERS: dict[str, Serve] = {
    "paged": paged,
    **{name: partial(contiguous, reservation=name) for name in ("oracle", "power of two", "max")},
    "static": static,
}


def capacity(data: str, serve: Serve, settings: Settings) -> tuple[float, list[tuple[float, float]], Outcome]:
    """Return the highest rate whose normalized latency is within the limit, all (rate, latency), and the run at that rate.

    Raises:
        SetupError: there is none.
    """
    low, high, points, best = 0.0, math.inf, list[tuple[float, float]](), Outcome([])
    rate = FIRST[data]
    while high > low * (1 + PRECISION) and rate < HIGHEST:
        if rate < LOWEST:
            raise SetupError(f"--limit {settings.limit:g} is less than a request alone takes for each output token")
        outcome = serve(draw(data, rate, settings))
        points.append((rate, fmean(outcome.latencies)))
        if points[-1][1] <= settings.limit:
            low, best = rate, outcome
        else:
            high = rate
        rate = low * 2 if math.isinf(high) else math.sqrt(low * high) if low else high / 2
    return low, sorted(points), best


def rate_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for data in LENGTHS:
        found = {name: capacity(data, serve, settings) for name, serve in SERVERS.items()}
        for name, (rate, points, _) in found.items():
            own = {"lengths": data, "memory": name, "rate": rate, "paged_beside": found["paged"][0] / rate}
            yield own | {"published": PUBLISHED.get(data, {}).get(name, ""), "curve": points}


def block_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for data in LENGTHS:
        for block in (4, 16, 32, 64, 128, 256):
            rate, _, best = capacity(data, partial(paged, block=block), settings)
            yield {"lengths": data, "block": block, "rate": rate, "wasted": 1 - best.used / best.held}


def choice_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for count in (1, 2, 4, 6):
        ours = capacity("alpaca", partial(paged, choices=count), settings)[0]
        theirs = capacity("alpaca", partial(contiguous, choices=count), settings)[0]
        yield {"choices": count, "paged": ours, "oracle": theirs, "paged_beside": ours / theirs}


def beam_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for count in (2, 4, 6):
        ours, _, best = capacity("alpaca", partial(paged, choices=count, switch=SWITCH), settings)
        theirs = capacity("alpaca", partial(contiguous, choices=count), settings)[0]
        yield {"beams": count, "paged": ours, "oracle": theirs, "paged_beside": ours / theirs} | {
            "saved": 1 - best.held / best.used
        }


def prefix_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield rates of 1P+1D, of requests that share a prefix and of some that do not."""
    for name, tokens in PREFIXES.items():
        rates = []
        for shared in (True, False):
            lengths = (
                {"random_prefix_len": tokens, "random_input_len": 40} if shared else {"random_input_len": tokens + 40}
            )
            config = _config(settings, random_output_len=40, **lengths)
            rates.append(_saturation(config, Fleet(1, 1)))
        yield {"prefix": name, "shared": rates[0], "not_shared": rates[1], "ratio": rates[0] / rates[1]}


def chunk_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        config = _config(settings, random_input_len=800, random_output_len=60, max_num_batched_tokens=tokens)
        figures = simulate(config, _profile(), {}, Fleet(both=1), 2.0).figures
        yield {"tokens": tokens} | {name: figures[name] for name in ("p50_ttft_ms", "p50_itl_ms", "p99_itl_ms")}


def batch_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    for batch in (1, 2, 4, 8, 16, 32, 64):
        config = _config(settings, random_input_len=100, random_output_len=60, max_num_seqs=batch)
        figures = simulate(config, _profile(), {}, Fleet(both=1), 1e3).figures
        yield {"batch": batch, "tokens_per_s": figures["output_throughput"], "p50_itl_ms": figures["p50_itl_ms"]}


def _config(settings: Settings, **load: Any) -> FleetConfig:
    return FleetConfig(num_prompts=settings.requests, seed=settings.seed, random_range_ratio=0.5, jobs=1, **load)


def _profile() -> Profile:
    profile = Estimate(load_shape("facebook/opt-13b"), "a100").profile()
    return replace(profile, engine=replace(profile.engine, num_blocks=SLOTS // BLOCK))


def _saturation(config: FleetConfig, fleet: Fleet) -> float:
    """Return the requests per second of a fleet that is never idle."""
    rate: float = simulate(config, _profile(), {}, fleet, 1e3).figures["request_throughput"]
    return rate


PARTS: dict[str, Callable[[Settings], Iterator[dict[str, Any]]]] = {
    "rate": rate_rows,
    "blocks": block_rows,
    "choices": choice_rows,
    "beams": beam_rows,
    "prefix": prefix_rows,
    "chunks": chunk_rows,
    "batches": batch_rows,
}


def run(settings: Settings) -> None:
    """Run the parts, and print a table of each."""
    settings = settings.sized(QUICK)
    found = dict[str, list[dict[str, Any]]]()
    with Console(stderr=True).status("simulating") as status:
        for part in settings.parts.split(","):
            status.update(part)
            found[part] = list(PARTS[part](settings))
    for part, rows in found.items():
        shown = [{key: _text(value) for key, value in row.items() if key != "curve"} for row in rows]
        report.show(shown, part)
    print(report.write("paper", settings, found))


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
