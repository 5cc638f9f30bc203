"""A store that loses, delays, truncates and corrupts one block in ten: same tokens, each fault counted, no block leaked.

`PDSERVE_FAULTY_REQUESTS` sets the number of requests (default 100).
"""

import json
import operator
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.kv_transfer.connectors.shm.connector import unlink

REQUESTS = int(os.environ.get("PDSERVE_FAULTY_REQUESTS", "100"))
CONCURRENCY = 24
THREADS = 32  # of each connector: more than concurrent operations, so that none waits behind a delayed one
LENGTHS = (4, 15, 16, 17, 33, 64, 80, 100, 160, 350)
SAMPLING = (
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0},
    {"temperature": 1.2, "top_k": 30},
)
MAX_TOKENS = 16
EXPECTED_KIND = {"lost": "missing", "truncated": "corrupt", "flipped": "corrupt", "late": "unavailable"}
Counts = Counter[tuple[str, str]]  # blocks by direction and kind


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    tokens: int
    sampling: dict[str, Any]
    stream: bool

    def send(self, url: str, model: str, **more: Any) -> list[int]:
        """Send the request and return the token ids of the answer."""
        body = {"model": model, "prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True, **self.sampling}
        body |= {"return_token_ids": True, "stream": self.stream, **more}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            text = reply.read().decode()
        assert reply.status_code == 200, text
        events = re.findall(r"^data: (\{.*)$", text, re.M) if self.stream else [text]
        answers = [json.loads(event) for event in events]
        assert not [answer for answer in answers if "error" in answer], text
        return [token for answer in answers for token in answer["choices"][0].get("token_ids") or []]


def make_requests(count: int, num_prefixes: int) -> list[Request]:
    """Return requests of mixed lengths, greedy and sampled, streaming and not, over `num_prefixes` different prefixes."""
    requests = []
    for i in range(count):
        first = i % num_prefixes
        length = LENGTHS[i % len(LENGTHS)]
        prompt = [first & 255, first >> 8, *((first * 31 + j * j + 7 * j) % 256 for j in range(length - 2))]
        sampling = SAMPLING[i % len(SAMPLING)] | {"seed": i}
        requests.append(Request(prompt, 4 + i % (MAX_TOKENS - 3), sampling, stream=i % 2 == 0))
    return requests


def send_all(deployment: Any, requests: list[Request], **more: Any) -> list[list[int]]:
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        return list(threads.map(lambda request: request.send(deployment.url, deployment.config.name, **more), requests))


@pytest.fixture
def faulty(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_connectors: Callable[..., None],
) -> Iterator[tuple[str, Path]]:
    """URL of a fault-injecting store and the folder of its journal; `redis` or a variant over shm://, parametrised."""
    site, journal = tmp_path / "site", tmp_path / "journal"
    site.mkdir()
    journal.mkdir()
    classes = {"faulty+shm": "FaultyShm", "following+shm": "FollowingShm", "faulty+redis": "FaultyRedis"}
    install_connectors(site, "pdserve_faulty", Path(__file__).parent / "faulty.py", classes)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    parameters = f"seed=7&journal={journal}&threads={THREADS}&timeout=600"
    if request.param == "redis":
        yield f"faulty+{request.getfixturevalue('redis_url')}?{parameters}", journal
    else:
        name = f"shm://test-{uuid.uuid4().hex}"
        yield f"{request.param}+{name}?size=128MiB&{parameters}", journal
        unlink(name)


def injected_faults(journal: Path) -> tuple[Counts, float]:
    """Return the injected faults by the failure kind that each must be counted as, and the total delay in seconds."""
    counts, seconds = Counts(), 0.0
    for file in journal.glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            seconds += line["seconds"]
            if line["hit"] != "slow":
                counts[line["direction"], EXPECTED_KIND[line["hit"]]] += 1
    return counts, seconds


def counted_failures(deployment: Any) -> tuple[Counts, float]:
    """Return the failures counted in /metrics, and the total seconds of all transfers."""
    counts, seconds = Counts(), 0.0
    for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
        labels, value = dict(re.findall(r'(\w+)="(\w+)"', line)), line.rpartition(" ")[2]
        if line.startswith("pdserve_kv_transfer_failures_total{"):
            blocks = int(float(value))  # 0 before the first
            if blocks and labels["kind"] != "cancelled":  # the request ended before its last store: not a fault
                counts[labels["direction"], labels["kind"]] += blocks
        elif line.startswith("pdserve_kv_transfer_seconds_total{"):
            seconds += float(value)
    return counts, seconds


@pytest.fixture
def run(
    faulty: tuple[str, Path],
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    blocks_held: Callable[[Any], dict[str, float]],
    wait_until: Callable[..., None],
) -> Callable[..., tuple[Counts, Counts]]:
    """run(requests, agree) sends the requests without and with faults, and checks that the tokens are the same.

    Returns the injected and the counted failures, as soon as `agree(injected, counted)` is true.
    """

    def compare(
        requests: list[Request], agree: Callable[[Counts, Counts], bool], **settings: Any
    ) -> tuple[Counts, Counts]:
        (url, journal), path = faulty, checkpoint("llama")
        greedy = [i for i, request in enumerate(requests) if not request.sampling["temperature"]]
        expected = generate(path, [requests[i].prompt for i in greedy], MAX_TOKENS)
        with deploy(model=str(path), connector=url, **settings) as deployment:
            reference = send_all(deployment, requests, cache_salt="before")
            expected = [tokens[: requests[i].tokens] for i, tokens in zip(greedy, expected, strict=True)]
            assert [reference[i] for i in greedy] == expected
            wait_until(lambda: not any(blocks_held(deployment).values()), "no block is held")
            assert not counted_failures(deployment)[0]
            (journal / "armed").touch()
            assert send_all(deployment, requests, cache_salt="after") == reference
            wait_until(lambda: not any(blocks_held(deployment).values()), "no block is held")
            counts: list[Counts] = []  # injected and counted

            def is_settled() -> bool:
                # Both lag: a late operation ends before its fault is written to the journal, and counters come with a report.
                (injected, delay_s), (counted, transfer_s) = injected_faults(journal), counted_failures(deployment)
                counts[:] = injected, counted
                return agree(injected, counted) and transfer_s >= delay_s

            wait_until(is_settled, counts)
            return counts[0], counts[1]

    return compare


@pytest.mark.parametrize("faulty", ["faulty"], indirect=True)
def test_every_fault_is_counted_once_and_changes_no_token(run: Callable[..., tuple[Counts, Counts]]) -> None:
    """The prompts share no block, so each stored block is loaded once, and each fault detected once."""
    requests = make_requests(REQUESTS, REQUESTS)
    injected, counted = run(requests, operator.eq, num_blocks=1024, max_num_batched_tokens=256)
    assert counted == injected
    loads = {("load", kind) for kind in ("missing", "corrupt", "unavailable")}
    assert set(injected) == loads | {("store", "unavailable")}, "each kind of fault occurred"
    assert injected.total() > REQUESTS / 3


@pytest.mark.parametrize("faulty", ["redis", "following"], indirect=True)
def test_faults_in_blocks_shared_by_several_instances_change_no_token(
    run: Callable[..., tuple[Counts, Counts]],
) -> None:
    """Several instances may detect the same fault, or find that another has already removed or repaired the block."""
    injected, counted = run(
        make_requests(REQUESTS // 2, 6),
        lambda injected, counted: {kind for _, kind in injected} == {kind for _, kind in counted},
        store_generated="on",
        prefill=2,
        decode=2,
        num_blocks=256,
        max_num_batched_tokens=128,
    )
    assert {kind for _, kind in injected} == {kind for _, kind in counted} == {"missing", "corrupt", "unavailable"}
    assert injected.total() / 2 < counted.total() < 2 * injected.total()
