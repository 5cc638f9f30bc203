"""A store that loses, delays, truncates and changes one block in ten: the same tokens, each incident counted, no block kept.

`PDSERVE_FAULTY_REQUESTS=300`, or 5000, makes it as long as one likes.
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

from pdserve.kv_transfer.connectors.shm import unlink

REQUESTS = int(os.environ.get("PDSERVE_FAULTY_REQUESTS", "100"))
AT_ONCE = 24
THREADS = 32  # of each connector: more than operations at once, or those behind a late one would be late too
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
LONGEST = 16
COUNTED_AS = {"lost": "missing", "truncated": "corrupt", "flipped": "corrupt", "late": "unavailable"}
Counts = Counter[tuple[str, str]]  # blocks by direction and kind


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    tokens: int
    sampling: dict[str, Any]
    stream: bool

    def send(self, url: str, model: str, **more: Any) -> list[int]:
        """The tokens that the client gets."""
        body = {"model": model, "prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True, **self.sampling}
        body |= {"return_token_ids": True, "stream": self.stream, **more}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            text = reply.read().decode()
        assert reply.status_code == 200, text
        events = re.findall(r"^data: (\{.*)$", text, re.M) if self.stream else [text]
        answers = [json.loads(event) for event in events]
        assert not [answer for answer in answers if "error" in answer], text
        return [token for answer in answers for token in answer["choices"][0].get("token_ids") or []]


def requests(count: int, beginnings: int) -> list[Request]:
    """Of mixed lengths, greedy and sampled, streaming and not, over so many different beginnings."""
    made = []
    for i in range(count):
        first = i % beginnings
        length = LENGTHS[i % len(LENGTHS)]
        prompt = [first & 255, first >> 8, *((first * 31 + j * j + 7 * j) % 256 for j in range(length - 2))]
        sampling = SAMPLING[i % len(SAMPLING)] | {"seed": i}
        made.append(Request(prompt, 4 + i % (LONGEST - 3), sampling, stream=i % 2 == 0))
    return made


def send_all(deployment: Any, some: list[Request], **more: Any) -> list[list[int]]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda one: one.send(deployment.url, deployment.config.name, **more), some))


@pytest.fixture
def faulty(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_connectors: Callable[..., None],
) -> Iterator[tuple[str, Path]]:
    """The URL of a store with faults, `redis` or how over shm://, by indirect parametrisation; and their journal."""
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


def injected(journal: Path) -> tuple[Counts, float]:
    """What was done to the store, by what it must be counted as; and for how many seconds it slept."""
    counts, seconds = Counts(), 0.0
    for file in journal.glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            seconds += line["seconds"]
            if line["hit"] != "slow":
                counts[line["direction"], COUNTED_AS[line["hit"]]] += 1
    return counts, seconds


def counted(deployment: Any) -> tuple[Counts, float]:
    """What the metrics say of failures, and the seconds that transfers took."""
    counts, seconds = Counts(), 0.0
    for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
        labels, value = dict(re.findall(r'(\w+)="(\w+)"', line)), line.rpartition(" ")[2]
        if line.startswith("pdserve_kv_transfer_failures_total{"):
            if labels["kind"] != "cancelled":  # of a request that ended before its last store: no fault
                counts[labels["direction"], labels["kind"]] += int(float(value))
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
    until: Callable[..., None],
) -> Callable[..., tuple[Counts, Counts]]:
    """Sends requests before and after the faults begin, with the same tokens. What was done to the store, by what it must be
    counted as, and what was counted, as soon as they agree."""

    def compare(some: list[Request], agree: Callable[[Counts, Counts], bool], **settings: Any) -> tuple[Counts, Counts]:
        (url, journal), path = faulty, checkpoint("llama")
        greedy = [i for i, one in enumerate(some) if not one.sampling["temperature"]]
        expected = generate(path, [some[i].prompt for i in greedy], LONGEST)
        with deploy(model=str(path), connector=url, **settings) as deployment:
            right = send_all(deployment, some, cache_salt="before")
            assert [right[i] for i in greedy] == [e[: some[i].tokens] for i, e in zip(greedy, expected, strict=True)]
            until(lambda: not any(blocks_held(deployment).values()), "no block is held")
            assert not counted(deployment)[0]
            (journal / "armed").touch()
            assert send_all(deployment, some, cache_salt="after") == right
            until(lambda: not any(blocks_held(deployment).values()), "no block is held")
            was_done, slept = injected(journal)
            until(lambda: agree(was_done, counted(deployment)[0]), f"{was_done} is counted")
            until(lambda: counted(deployment)[1] >= slept, f"{slept} s are counted")
            return was_done, counted(deployment)[0]

    return compare


@pytest.mark.parametrize("faulty", ["faulty"], indirect=True)
def test_every_fault_is_counted_once_and_none_is_seen(run: Callable[..., tuple[Counts, Counts]]) -> None:
    """No two prompts have a block in common, so each stored block is loaded once, and found out once."""
    was_done, was_counted = run(requests(REQUESTS, REQUESTS), operator.eq, num_blocks=1024, max_num_batched_tokens=256)
    assert was_counted == was_done
    loads = {("load", kind) for kind in ("missing", "corrupt", "unavailable")}
    assert set(was_done) == loads | {("store", "unavailable")}, "each kind of fault occurred"
    assert was_done.total() > REQUESTS / 3


@pytest.mark.parametrize("faulty", ["redis", "following"], indirect=True)
def test_blocks_that_several_instances_share(run: Callable[..., tuple[Counts, Counts]]) -> None:
    """A hit may be found out by several, and one who comes second finds what the first has removed or put right."""
    was_done, was_counted = run(
        requests(REQUESTS // 2, 6),
        lambda done, counted: {kind for _, kind in done} == {kind for _, kind in counted},
        store_generated="on",
        prefill=2,
        decode=2,
        num_blocks=256,
        max_num_batched_tokens=128,
    )
    assert {kind for _, kind in was_done} == {kind for _, kind in was_counted} == {"missing", "corrupt", "unavailable"}
    assert was_done.total() / 2 < was_counted.total() < 2 * was_done.total()
