"""What publishing KV events costs an engine: `python benchmarks/kv_events.py`.

One instance in this process serves the same kind of requests with KV events and without, in turns; a subscriber in another
process reads them. The demo model is the worst case: its steps take a millisecond or two, and events cost the same beside
any model.
"""

import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import stores
import torch
from rich.console import Console
from rich.table import Table

from pdserve.cli.flags import command_from_config
from pdserve.config import InstanceConfig, flag, parse_size
from pdserve.instance.instance import Instance
from pdserve.instance.kv_events_config import KVEventsConfig
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams

SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
print("ready", flush=True)
while True:
    socket.recv_multipart()
"""


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("in a turn, all at once", 48)
    concurrency: int = flag("of them that run at a time", 8)
    prompt_tokens: int = flag("length of each prompt", 128)
    output_tokens: int = flag("tokens generated for each", 32)
    rounds: int = flag("of one turn with events and one without", 100)


QUICK = {"requests": 4, "rounds": 3, "prompt_tokens": 40, "output_tokens": 4}
STORE_SIZE = "64MiB"


def benchmark(settings: Settings) -> None:
    """Measure throughput and CPU time with KV events beside those without."""
    settings = settings.sized(QUICK)
    torch.set_num_threads(1)
    turns: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with _instance(settings) as (instance, switch), Console(stderr=True).status("warming up") as status:
        for number in range(-1, settings.rounds):
            status.update(f"round {number + 1} of {settings.rounds}")
            for on in (number % 2 == 0, number % 2 != 0):
                switch(on)
                gc.collect()
                turn = _turn(instance, settings)
                if number >= 0:
                    turns[on].append(turn)
    tokens = settings.requests * settings.output_tokens
    pairs = list(zip(turns[True], turns[False], strict=True))
    rows = [
        _row("throughput", [tokens / with_[0] for with_, _ in pairs], [tokens / without[0] for _, without in pairs]),
        _row("CPU ms of a request", *([1e3 * one[1] / settings.requests for one in turns[on]] for on in (True, False))),
    ]
    _print(rows)
    print(report.write("kv_events", settings, {"rows": rows}))


@contextmanager
def _instance(settings: Settings) -> Iterator[tuple[Instance, Callable[[bool], None]]]:
    """Yield an instance, and a function that turns its events on and off."""
    with tempfile.TemporaryDirectory() as folder, stores.shm(parse_size(STORE_SIZE)) as url:
        endpoint = f"ipc://{Path(folder) / 'events'}"
        config = InstanceConfig(
            model="demo",
            dtype="float32",
            connector=url,
            threads=1,
            kv_cache_memory=STORE_SIZE,
            max_num_seqs=settings.concurrency,
        )
        instance = Instance(config, lambda link, frame: None)
        instance.publish_events(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
        publisher = instance._event_publisher

        def switch(on: bool) -> None:
            listener = publisher if on else None
            instance.engine.pool.listener = instance.transfers.listener = instance._event_publisher = listener

        with subprocess.Popen([sys.executable, "-c", SUBSCRIBER, endpoint], stdout=subprocess.PIPE) as subscriber:
            assert subscriber.stdout is not None
            subscriber.stdout.readline()
            try:
                yield instance, switch
            finally:
                switch(True)
                subscriber.kill()
                instance.close()


def _turn(instance: Instance, settings: Settings) -> tuple[float, float]:
    """Return wall and CPU seconds for all requests. Their prompts are new."""
    sampling = SamplingParams(temperature=0, max_tokens=settings.output_tokens, ignore_eos=True)
    for i in range(settings.requests):
        prompt = [random.randrange(3, 400) for _ in range(settings.prompt_tokens)]
        request = Request(prompt=prompt, sampling=sampling).pack()
        instance.submit("", pb.Submit(request_id=str(i), phase=pb.BOTH, request=request))
    wall, cpu = time.perf_counter(), time.process_time()
    idle = False
    while not idle or instance.num_jobs:
        idle = instance.run_once(wait=idle)
    return time.perf_counter() - wall, time.process_time() - cpu


def _row(name: str, with_events: list[float], without: list[float]) -> dict[str, Any]:
    """Return the medians and the ratio, whose quartiles and 95 % interval are those of the rounds' ratios."""
    ratios = [one / other for one, other in zip(with_events, without, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "figure": name,
        "with_events": report.rounded(statistics.median(with_events), 4),
        "without": report.rounded(statistics.median(without), 4),
        "ratio": round(median, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "interval": [round(medians[50], 4), round(medians[-50], 4)],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, row.values()))
    report.show(table)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
