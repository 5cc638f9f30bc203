"""Herd effect: several routers over the same instances, in simulated time.

Each router sees the load of its own requests at once, and that of other routers with a delay. If all routers picked the
same instance whenever it looked best, waiting times would grow with the number of routers, up to those of a policy that
ignores the load (`round_robin`).
"""

import heapq
import statistics
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest

from pdserve.costs import Costs
from pdserve.router.scheduling.policy import NO_LOAD, Candidate, Load, PlacementRequest, decide

INSTANCES, SECONDS, SEEDS = 8, 15.0, 3
REPORT_DELAY_S = 0.2  # of other routers' load
TOKEN_S = 0.015
COSTS = Costs(prefill=(0.004, 1.2e-4, 6e-8), decode=(0.01, 5e-4, 1e-7))
UTILISATION = 0.8  # of prefill instances


@dataclass
class Instance:
    running: dict[int, tuple[int, Load]] = field(default_factory=dict)  # request → (its router, remaining load)

    def other_load(self, router: int) -> Load:
        loads = [load for one, load in self.running.values() if one != router]
        return Load(*map(sum, zip(*loads, strict=True))) if loads else NO_LOAD


@cache
def simulate(policy: str, num_routers: int, seed: int, decode: bool) -> float:
    """Return the mean seconds from a prompt's arrival to the end of its prefill; for decode, the imbalance: requests on the
    fullest instance divided by the mean."""
    random = Random(seed)
    names = [f"i{i}" for i in range(INSTANCES)]
    instances = {name: Instance() for name in names}
    seen = [{name: Candidate(name, costs=COSTS) for name in names} for _ in range(num_routers)]
    reported = [dict.fromkeys(names, NO_LOAD) for _ in range(num_routers)]
    turns = [random.getrandbits(32) for _ in range(num_routers)]
    prompts = [int(random.lognormvariate(5.5, 1)) + 1 for _ in range(1000)]
    seconds = [COSTS.total_prefill_seconds(1, tokens, tokens * tokens // 2) for tokens in prompts]
    rate = 80.0 if decode else UTILISATION * INSTANCES / statistics.mean(seconds)
    events: list[tuple[float, int, str, str, int]] = []
    sent: dict[int, float] = {}
    measured: list[float] = []
    now, count = 0.0, 0

    def later(after: float, kind: str, name: str = "", number: int = 0) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (now + after, count, kind, name, number))

    def arrive(request: int) -> None:
        router, prompt, output = (random.randrange(end) for end in (num_routers, len(prompts), 300))
        turns[router] += 1
        tokens = prompts[prompt]
        placement_request = PlacementRequest(tokens, turns[router], output_tokens=output + 1, decode=decode)
        name = decide(policy, list(seen[router].values()), placement_request).chosen
        if decode:
            load = Load(output_tokens=output, context_tokens=tokens)
            later((output + 1) * TOKEN_S, "ended", name, request)
        else:
            load = Load(prefill_tokens=tokens, prefills=1, attended_tokens=tokens * tokens // 2)
            if not instances[name].running:
                later(seconds[prompt], "ended", name, request)
        seen[router][name].replace_load(NO_LOAD, load)
        instances[name].running[request] = router, load
        sent[request] = now

    def ended(name: str, request: int) -> None:
        router, load = instances[name].running.pop(request)
        seen[router][name].replace_load(load, NO_LOAD)
        if not decode:
            measured.append(now - sent[request])
            if instances[name].running:
                after, (_, load) = next(iter(instances[name].running.items()))
                later(COSTS.total_prefill_seconds(1, load.prefill_tokens, load.attended_tokens), "ended", name, after)

    for name in names:
        for router in range(num_routers):
            later(random.random() * REPORT_DELAY_S, "report", name, router)
    later(0.0, "arrive")
    while now < SECONDS:
        now, number, kind, name, one = heapq.heappop(events)
        if kind == "arrive":
            later(random.expovariate(rate), "arrive")
            arrive(number)
        elif kind == "ended":
            ended(name, one)
        else:
            later(REPORT_DELAY_S, "report", name, one)
            before, reported[one][name] = reported[one][name], instances[name].other_load(one)
            seen[one][name].replace_load(before, reported[one][name])
        if decode and kind == "arrive" and now > 5.0:
            running = [len(instance.running) for instance in instances.values()]
            measured.append(max(running) / statistics.mean(running))
    return statistics.mean(measured)


def average(policy: str, num_routers: int, decode: bool) -> float:
    return statistics.mean(simulate(policy, num_routers, seed, decode) for seed in range(SEEDS))


@pytest.mark.parametrize("num_routers", [4, 16])
def test_prompts_wait_far_less_than_with_round_robin(num_routers: int) -> None:
    assert average("auto", 1, False) < average("auto", num_routers, False) < 0.6 * average("round_robin", 4, False)


@pytest.mark.parametrize(("num_routers", "factor"), [(4, 1.15), (16, 1.2)])
def test_streams_are_balanced_better_than_with_round_robin(num_routers: int, factor: float) -> None:
    assert average("auto", num_routers, True) < min(factor, average("round_robin", num_routers, True))


if __name__ == "__main__":
    for decode in (False, True):
        for policy in ("auto", "least_loaded", "power_of_two", "round_robin"):
            print(decode, policy, [round(average(policy, routers, decode), 3) for routers in (1, 2, 4, 16)])
