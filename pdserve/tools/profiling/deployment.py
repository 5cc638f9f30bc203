"""Costs of a router and its instances outside of the engine, measured on a small deployment of real processes.

CPU time is read where it exists, because other processes do not prolong it.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from pdserve.errors import SetupError
from pdserve.lifetime import Stage
from pdserve.profile.fit import least_squares
from pdserve.profile.profile import Profile

REQUESTS = 24  # of each length of answer
ANSWERS = (2, 96)  # tokens
PROMPT_SHARES = (1 / 8, 1 / 3, 2 / 3)  # of the longest prompt that one step computes
SERVED = 6  # requests of each share, with answers of
PAUSE_S = 0.05  # before each: caches are cold where an instance is not always busy
SERVED_ANSWER = 96  # tokens, of which the first few take longer after a prompt
LETTERS = "abcdefghijklmnopqrstuvwxyz    "
ROUNDS = 3
QUICK_REQUESTS, QUICK_ROUNDS = 12, 1
POLL_S = 0.02
FLIP_TIMEOUT_S = 600.0  # for a change of role, which takes seconds: an instance that has died makes none


Context = AbstractContextManager[Any]  # of a `pdserve.cli.deployment.Deployment`


def measure(start: Callable[[int], Context], profile: Profile) -> Profile:
    """Return the profile with start-up, changes of role, the router's overheads, and steps as long as where they serve.

    There, caches are cold after pauses, and the interpreter has other threads.

    Args:
        start: returns a deployment of a router and this number of instances with the role `both`.
        profile: of what such an instance computes.

    Raises:
        SetupError: they do not start, or an instance does not change its role.
    """
    started = time.perf_counter()
    with start(1) as deployment:
        deployment.wait_ready()
        start_up_s = time.perf_counter() - started
        profile = measure_router(deployment, profile)
        profile = _as_served(deployment, profile)
    with start(2) as deployment:  # one keeps serving while the other changes its role
        deployment.wait_ready()
        with httpx.Client(base_url=deployment.url, timeout=60.0, trust_env=False) as http:
            role_flip_s = statistics.median([_flip(http, "both-0", role) for role in ("decode", "both", "decode")])
    return replace(profile, start_up_s=start_up_s, role_flip_s=role_flip_s)


def measure_router(deployment: Any, profile: Profile, *, quick: bool = False) -> Profile:
    """Return the profile with the router's overheads, of a deployment that is ready."""
    router = next(one.pid for one in deployment.children if one.name == "router")
    numbers = (QUICK_REQUESTS, QUICK_ROUNDS) if quick else (REQUESTS, ROUNDS)
    with httpx.Client(base_url=deployment.url, timeout=60.0, trust_env=False) as http:
        around = _router_seconds(http, profile, router, *numbers)
    return replace(profile, overheads=replace(profile.overheads, **around))


def _router_seconds(http: httpx.Client, profile: Profile, pid: int, requests: int, rounds: int) -> dict[str, float]:
    """Return the router's CPU seconds for each request and token, and the way of a frame to an idle instance."""
    model, prompt = profile.model, _Prompts(http, profile)
    _ask(http, model, "warm-up", "Hello", ANSWERS[1])
    rows: list[list[float]] = []
    seconds, ways = [], []
    for _ in range(rounds):
        for tokens, length in ((ANSWERS[0], 4), (ANSWERS[1], 4), (ANSWERS[0], prompt.longest // 3)):
            before = _cpu_seconds(pid)
            for i in range(requests):
                _ask(http, model, f"profile-{len(rows)}-{i}", prompt.make(length), tokens)
            seconds.append(_cpu_seconds(pid) - before)
            timelines = [_timeline(http, f"profile-{len(rows)}-{i}") for i in range(requests)]
            rows.append([requests, sum(one["prompt_tokens"] for one in timelines), requests * tokens])
            ways += [_between(one, Stage.ROUTED, Stage.PREFILL_STARTED) for one in timelines]
    names = ("router_request_s", "router_prompt_token_s", "router_token_s")
    found = dict(zip(names, least_squares(rows, seconds, {0, 1, 2}), strict=True))
    return found | {"frame_s": statistics.median(ways)}


def _as_served(deployment: Any, profile: Profile) -> Profile:
    """Return the profile with the steps of an instance that serves single requests, one after the other, and with the way
    between client and router.

    Each answer tells the time of one prompt, computed in one step, and that of decode steps of one sequence.
    """
    step, overheads = profile.step, profile.overheads
    around_s = overheads.engine_step_s + overheads.engine_sequence_s
    factors: tuple[list[float], list[float]] = [], []
    outside = list[float]()
    with httpx.Client(base_url=deployment.url, timeout=600.0, trust_env=False) as http:
        prompts = _Prompts(http, profile)
        for turn in range(SERVED):
            for share in PROMPT_SHARES:
                name = f"served-{turn}-{share:.2f}"
                time.sleep(PAUSE_S)
                times = _ask(http, profile.model, name, prompts.make(int(share * prompts.longest)), SERVED_ANSWER)
                one = _timeline(http, name)
                outside.append(times[0] - _between(one, Stage.RECEIVED, Stage.FIRST_TOKEN))
                length = one["prompt_tokens"]
                prefill_s = _between(one, Stage.PREFILL_STARTED, Stage.FIRST_TOKEN) - overheads.frame_s
                decode_s = statistics.median(after - before for before, after in pairwise(times))
                factors[0].append((prefill_s - around_s) / step.seconds([(max(2, length), 0)]))
                factors[1].append((decode_s - around_s) / step.seconds([(1, length + SERVED_ANSWER // 2)]))
    prefill, decode = (max(1.0, statistics.median(one)) for one in factors)
    overheads = replace(overheads, client_s=max(0.0, statistics.median(outside)))
    return replace(profile, overheads=overheads).scaled(prefill, decode)


class _Prompts:
    """Makes prompts of random text, each another one, which no prefix cache knows.

    Attributes:
        longest: tokens of a prompt that one step computes, and that leaves room for an answer.
    """

    def __init__(self, http: httpx.Client, profile: Profile) -> None:
        self._random = random.Random(0)
        sample, engine = self._text(1000), profile.engine
        self.longest = max(4, min(engine.max_num_batched_tokens, engine.max_model_len - max(ANSWERS)) - 1)
        answer = http.post("/tokenize", json={"model": profile.model, "prompt": sample}).raise_for_status()
        self._characters = len(sample) / answer.json()["count"]  # of a token

    def make(self, tokens: int) -> str:
        """Return a text of about this many tokens."""
        return self._text(max(1, int(tokens * self._characters)))

    def _text(self, characters: int) -> str:
        return "".join(self._random.choices(LETTERS, k=characters))


def _between(timeline: dict[str, Any], start: Stage, end: Stage) -> float:
    """Return the seconds between two stages of a request."""
    stages = timeline["stages_ms"]
    return float(stages[end] - stages[start]) / 1e3


def _timeline(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/debug/requests/{name}").raise_for_status().json()
    return found


def _ask(http: httpx.Client, model: str, name: str, prompt: str, tokens: int) -> list[float]:
    """Stream one answer to its end, and return the seconds until each piece of it."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as answer:
        answer.raise_for_status()
        return [time.perf_counter() - started for _ in answer.iter_bytes()]


def _flip(http: httpx.Client, name: str, role: str) -> float:
    """Return the seconds until an instance serves in another role. Raises SetupError if it never does."""
    started = time.perf_counter()
    http.post(f"/admin/instances/{name}/role", json={"role": role}).raise_for_status()
    while time.perf_counter() - started <= FLIP_TIMEOUT_S:
        instances = http.get("/debug/instances").raise_for_status().json()["instances"]
        if any(one["instance_id"] == name and one["role"] == role and not one["draining"] for one in instances):
            return time.perf_counter() - started
        time.sleep(POLL_S)
    raise SetupError(f"{name} does not serve as {role} within {FLIP_TIMEOUT_S:g} s")


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, from Linux's scheduler."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
