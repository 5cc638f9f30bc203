"""Deaths, stops and leases in the middle of a read over nixl://: right tokens, no block kept beyond its lease, no hang."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

LEASE_S = 2.0
TIMEOUT_S = 12.0  # of one load
TOKENS = 12
BLOCKS = 44  # of the long prompts
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]


@dataclass
class System:
    """A prefill and two decodes whose reads can be held."""

    deployment: Any
    gate: Path
    model: Path
    generate: Generate
    threads: ThreadPoolExecutor
    read_metric: Callable[..., float]
    prompts: int = 0

    def long_prompt(self) -> list[int]:
        """One that nobody has seen."""
        self.prompts += 1
        return [self.prompts, *((i * i + self.prompts * i) % 256 for i in range(16 * BLOCKS - 5))]

    def right(self, prompt: list[int]) -> list[int]:
        return self.generate(self.model, [prompt], TOKENS)[0]

    def send(self, prompt: list[int], tokens: int = TOKENS) -> list[int]:
        body = {"model": self.deployment.config.name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True}
        reply = httpx.post(f"{self.deployment.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def hold_a_read(self) -> tuple[list[int], "Future[list[int]]", str]:
        """A request whose KV is being read: its prompt, its tokens to come, and the reader's name."""
        prompt = self.long_prompt()
        (self.gate / "shut").touch()
        future = self.threads.submit(self.send, prompt)
        wait_until(lambda: any(self.gate.glob("reading.*")), 600, "a decode is reading")
        (mark,) = self.gate.glob("reading.*")
        pid = int(mark.suffix[1:])
        mark.unlink()
        return prompt, future, next(child.name for child in self.deployment.children if child.pid == pid)

    def let_read(self) -> None:
        (self.gate / "shut").unlink(missing_ok=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.deployment.child(name).pid, number)

    def metric(self, name: str, **labels: str) -> float:
        return self.read_metric(self.deployment, name, **labels)

    def held(self, instance: str) -> float:
        return self.metric("kv_cache_blocks_held", instance=instance)

    def loaded(self, instance: str) -> float:
        return self.metric("kv_transfer_blocks_total", instance=instance, direction="load")

    def noticed(self, instance: str, kind: str) -> None:
        """A block was counted as not loaded; counts come with heartbeats."""
        failures = "kv_transfer_failures_total"
        wait_until(
            lambda: self.metric(failures, instance=instance, kind=kind) > 0, 600, f"a block is counted as {kind}"
        )

    def is_whole(self) -> bool:
        """Tends the children; whether all are there and no block is held."""
        everybody = len(self.deployment.children) - 1
        self.deployment.tend()
        there = httpx.get(f"{self.deployment.url}/debug/instances").json()["instances"]
        return len(there) == everybody and self.metric("kv_cache_blocks_held") == 0

    def check_that_it_works(self, reader: str) -> None:
        """Everybody is there, nothing is held, and this instance loads again what it is handed over."""
        wait_until(self.is_whole, 600, "all are back, and all blocks")
        before, give_up = self.loaded(reader), time.monotonic() + 600
        while self.loaded(reader) == before:
            assert time.monotonic() < give_up, f"{reader} loads nothing"
            prompts = [self.long_prompt() for _ in range(2)]
            assert list(self.threads.map(self.send, prompts)) == [self.right(prompt) for prompt in prompts]
            time.sleep(0.5)
        wait_until(self.is_whole, 600, "all blocks are back")


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory,
    install_connectors: Callable[..., None],
    checkpoint: Callable[..., Path],
    generate: Generate,
    deploy: Callable[..., Any],
    metric: Callable[..., float],
) -> Iterator[System]:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
    site, gate, model = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("gate"), checkpoint("llama")
    install_connectors(site, "pdserve_gated", Path(__file__).parent / "gated.py", {"gated+nixl": "GatedNixl"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("UCX_TLS", "tcp,self")  # the owner takes part in each read, as between hosts
        with (
            deploy(
                model=str(model),
                connector=f"gated+nixl://?gate={gate}&timeout={TIMEOUT_S}&piece=24KiB",
                lease_seconds=LEASE_S,
                num_blocks=64,
                decode=2,
                policy="round_robin",
            ) as deployment,
            ThreadPoolExecutor(4) as threads,
        ):
            yield System(deployment, gate, model, generate, threads, metric)


@pytest.fixture(autouse=True)
def open_gate(system: System) -> Iterator[None]:
    wait_until(system.is_whole, 600, "all are there")
    yield
    system.let_read()


def test_a_decode_killed_while_it_reads(system: System) -> None:
    prompt, future, reader = system.hold_a_read()
    system.signal(reader, signal.SIGKILL)
    system.let_read()
    assert future.result(600) == system.right(prompt)
    assert system.metric("migrations_total", kind="instance_lost") >= 1
    wait_until(lambda: system.held("prefill-0") == 0, 600, "what the dead one had not read is back")
    system.check_that_it_works(reader)


def test_a_prefill_killed_while_it_is_read(system: System) -> None:
    prompt, future, reader = system.hold_a_read()
    system.signal("prefill-0", signal.SIGKILL)
    system.let_read()
    assert future.result(600) == system.right(prompt)
    system.noticed(reader, "unavailable")
    system.check_that_it_works(reader)


def test_a_lease_that_ends_while_it_is_read(system: System) -> None:
    prompt, future, reader = system.hold_a_read()
    wait_until(lambda: system.held("prefill-0") == 0, 600, "the lease does not wait for its reader")
    for _ in range(2):
        system.send(system.long_prompt(), tokens=1)  # by prefill alone, in the rows that are still to be read
    assert not future.done()
    system.let_read()
    assert future.result(600) == system.right(prompt)
    system.noticed(reader, "corrupt")
    system.check_that_it_works(reader)


def test_a_prefill_stopped_while_it_is_read_and_continued(system: System) -> None:
    prompt, future, reader = system.hold_a_read()
    system.signal("prefill-0", signal.SIGSTOP)
    try:
        system.let_read()
        assert future.result(TIMEOUT_S + 60) == system.right(prompt)
        system.noticed(reader, "unavailable")
    finally:
        system.signal("prefill-0", signal.SIGCONT)
    system.check_that_it_works(reader)


def test_a_decode_stopped_while_it_reads_and_continued(system: System) -> None:
    prompt, future, reader = system.hold_a_read()
    system.signal(reader, signal.SIGSTOP)
    try:
        system.let_read()
        assert future.result(600) == system.right(prompt)
        wait_until(lambda: system.held("prefill-0") == 0, 600, "its blocks are back at the lease's end")
    finally:
        system.signal(reader, signal.SIGCONT)
    system.check_that_it_works(reader)
