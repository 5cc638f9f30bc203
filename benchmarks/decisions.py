"""Duration of a router's decisions, measured in process without a network; `router.py` prints it."""

import statistics
import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import mock_instance

from pdserve.config import RouterConfig
from pdserve.keys import block_keys
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import Fleet
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import POLICIES, PlacementRequest, decide
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer

MODEL = "demo"
WORDS = ["the", "river", "runs", "past", "a", "small", "town", "where", "the", "baker", "meets", "the", "fisher"]
NOWHERE = SimpleNamespace(
    send=pb.RouterFrame.SerializeToString, close=lambda: None, abort=lambda: None
)  # stands in for a connection
LONG = 8192  # tokens of a prompt, about


def prompt_text(tokens: int) -> str:
    """Return a text of this many words; with the demo model's tokenizer, about as many tokens."""
    chosen = Random(tokens)
    return " ".join(chosen.choice(WORDS) for _ in range(tokens))


def decide_among(count: int, repeat: int) -> list[dict[str, Any]]:
    """Time each policy over this many candidates, and `open`: from a parsed request to instance frames.

    Half of the instances prefill and half decode; all are busy, with different costs, and each caches a prefix of the
    prompt of a different length. The prompt is hashed beforehand; hashing and tokenizing are separate rows.
    """
    fleet = Fleet("router", MODEL, 1.0, time.monotonic)
    dispatcher = Dispatcher(RouterConfig(model=MODEL), fleet, Metrics(fleet), seed=0)
    prompt = [Random(0).randrange(2048) for _ in range(LONG)]
    keys = block_keys(b"root", prompt, mock_instance.BLOCK_SIZE)
    chosen = Random(count)
    for i in range(count):
        role = "decode" if i % 2 else "prefill"
        instance = fleet.register(mock_instance.hello(f"{role}-{i}", role, MODEL), NOWHERE)
        others = pb.Load(requests=chosen.randrange(1, 9), prefills=1)
        others.prefill_tokens, others.output_tokens = chosen.randrange(4096), chosen.randrange(4096)
        others.attended_tokens, others.context_tokens = chosen.randrange(1 << 20), chosen.randrange(1 << 16)
        instance.update_other_load(others)
        slow = chosen.uniform(1, 1.5)  # relative to the fastest instance
        prefill, decode = (5e-3 * slow, 4e-5 * slow, 1e-8 * slow), (8e-3 * slow, 2e-4 * slow, 1e-8 * slow)
        instance.update_heartbeat(pb.Heartbeat(costs=pb.Costs(prefill=prefill, decode=decode, transfer=(1e-3, 2e-10))))
        fleet.index.add(instance.id, keys[: i * len(keys) // count])
    instances = list(fleet.instances.values())
    candidates = [instance.candidate for instance in instances]
    cached = {instance.id: fleet.index.num_blocks(instance.id) * mock_instance.BLOCK_SIZE for instance in instances}
    placement = PlacementRequest(LONG, session="session", cached=cached, output_tokens=64)

    def opened(turn: int) -> None:
        sampling = SamplingParams(max_tokens=64)
        request = RoutedRequest(
            request_id=f"r{turn}", prompt=prompt, sampling=sampling, keys={mock_instance.BLOCK_SIZE: keys}
        )
        dispatcher.open(request)

    def closed(turn: int) -> None:
        dispatcher.states[f"r{turn}"].cancel()

    def timed(policy: str, decode: bool) -> Callable[[int], object]:
        return lambda turn: decide(policy, candidates, placement._replace(turn=turn, decode=decode))

    kinds = {policy: _microseconds(timed(policy, decode=False), repeat) for policy in POLICIES}
    kinds["auto, to decode"] = _microseconds(timed("auto", decode=True), repeat)
    kinds["match the prompt's keys"] = _microseconds(lambda _: fleet.index.match(keys), repeat)
    kinds["open"] = _microseconds(opened, repeat, after=closed)
    if count == 8:  # independent of the number of candidates
        kinds["hash the prompt"] = _microseconds(lambda _: block_keys(b"root", prompt, 16), repeat)
        tokenizer, text = Tokenizer(MODEL), prompt_text(LONG)
        kinds["tokenize the prompt"] = _microseconds(lambda _: tokenizer.encode(text), repeat)
    return [{"instances": count, "what": what, "us_p50": round(us, 1)} for what, us in kinds.items()]


def _microseconds(work: Callable[[int], object], repeat: int, after: Callable[[int], object] | None = None) -> float:
    """Return the median CPU time of this thread in microseconds."""
    times = []
    for turn in range(repeat):
        started = time.thread_time_ns()
        work(turn)
        times.append((time.thread_time_ns() - started) / 1e3)
        if after is not None:
            after(turn)
    return statistics.median(times)
