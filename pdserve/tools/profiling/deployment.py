"""Costs of a router and its instances outside of the engine, measured on a small deployment of real processes.

CPU time is read where it exists, because other processes do not prolong it.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from pdserve.errors import SetupError
from pdserve.lifetime import Stage
from pdserve.profile.fit import least_squares

REQUESTS = 24  # of each length of answer
ANSWERS = (2, 96)  # tokens
ROUNDS = 3
QUICK_REQUESTS, QUICK_ROUNDS = 12, 1
POLL_S = 0.02
FLIP_TIMEOUT_S = 600.0  # for a change of role, which takes seconds: an instance that has died makes none


Context = AbstractContextManager[Any]  # of a `pdserve.cli.deployment.Deployment`


def measure(start: Callable[[int], Context], model: str) -> tuple[float, float, dict[str, float]]:
    """Return the seconds until an instance serves, those of a change of role, and some of `Overheads`.

    Args:
        start: returns a deployment of a router and this number of instances with the role `both`.

    Raises:
        SetupError: they do not start, or an instance does not change its role.
    """
    started = time.perf_counter()
    with start(1) as deployment:
        deployment.wait_ready()
        start_up_s = time.perf_counter() - started
        overheads = measure_router(deployment, model)
    with start(2) as deployment:  # one keeps serving while the other changes its role
        deployment.wait_ready()
        with httpx.Client(base_url=deployment.url, timeout=60.0, trust_env=False) as http:
            role_flip_s = statistics.median([_flip(http, "both-0", role) for role in ("decode", "both", "decode")])
    return start_up_s, role_flip_s, overheads


def measure_router(deployment: Any, model: str, *, quick: bool = False) -> dict[str, float]:
    """Return some of `Overheads`, of a deployment that is ready."""
    router = next(one.pid for one in deployment.children if one.name == "router")
    numbers = (QUICK_REQUESTS, QUICK_ROUNDS) if quick else (REQUESTS, ROUNDS)
    with httpx.Client(base_url=deployment.url, timeout=60.0, trust_env=False) as http:
        return _router_seconds(http, model, router, *numbers)


def _router_seconds(http: httpx.Client, model: str, pid: int, requests: int, rounds: int) -> dict[str, float]:
    """Return the router's CPU seconds for each request and token, and the way of a frame to an idle instance."""
    _ask(http, model, "warm-up", ANSWERS[1])
    rows: list[list[float]] = []
    seconds, ways = [], []
    for _ in range(rounds):
        for tokens in ANSWERS:
            names = [f"profile-{len(rows)}-{i}" for i in range(requests)]
            before = _cpu_seconds(pid)
            for name in names:
                _ask(http, model, name, tokens)
            seconds.append(_cpu_seconds(pid) - before)
            rows.append([requests, requests * tokens])
            for name in names:
                stages = http.get(f"/debug/requests/{name}").raise_for_status().json()["stages_ms"]
                ways.append((stages[Stage.PREFILL_STARTED] - stages[Stage.ROUTED]) / 1e3)
    request_s, token_s = least_squares(rows, seconds, {0, 1})
    return {"router_request_s": request_s, "router_token_s": token_s, "frame_s": statistics.median(ways)}


def _ask(http: httpx.Client, model: str, name: str, tokens: int) -> None:
    """Stream one answer to its end."""
    body = {"model": model, "prompt": [7, 8, 9, len(name)], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    http.post("/v1/completions", json=body, headers={"x-request-id": name}).raise_for_status()


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
