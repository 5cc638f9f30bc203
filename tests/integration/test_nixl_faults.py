"""Crashes, stops and lease ends in the middle of a nixl:// read: correct tokens, no block held beyond its lease, no hang."""

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

from tests.waiting import wait_until

LEASE_S = 2.0
TIMEOUT_S = 30.0  # per load operation; a stop lasts as long, and much happens within it while a read is held
TOKENS = 12
BLOCKS = 44  # of the long prompts
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]


@dataclass
class System:
    """A deployment of one prefill and two decode instances, whose reads the test can pause."""

    deployment: Any
    gate: Path
    model: Path
    generate: Generate
    threads: ThreadPoolExecutor
    read_metric: Callable[..., float]
    num_prompts: int = 0

    def long_prompt(self) -> list[int]:
        """Return a new prompt of BLOCKS blocks."""
        self.num_prompts += 1
        return [self.num_prompts, *((i * i + self.num_prompts * i) % 256 for i in range(16 * BLOCKS - 5))]

    def reference(self, prompt: list[int]) -> list[int]:
        return self.generate(self.model, [prompt], TOKENS)[0]

    def send(self, prompt: list[int], tokens: int = TOKENS) -> list[int]:
        body = {"model": self.deployment.config.name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True}
        reply = httpx.post(f"{self.deployment.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def pause_a_read(self) -> tuple[list[int], "Future[list[int]]", str]:
        """Send a request and pause the read of its KV; return the prompt, a future of the tokens, and the reader's name.

        On a busy machine, the lease of a request may expire before it is read: then another one is sent.
        """
        for mark in self.gate.glob("reading.*"):  # of a read in an earlier test
            mark.unlink()
        (self.gate / "shut").touch()
        future = None
        while not (marks := list(self.gate.glob("reading.*"))):
            if future is None or future.done():
                prompt = self.long_prompt()
                future = self.threads.submit(self.send, prompt)
            time.sleep(0.02)
        assert future is not None
        (mark,) = marks
        pid = int(mark.suffix[1:])
        mark.unlink()
        return prompt, future, next(child.name for child in self.deployment.children if child.pid == pid)

    def resume_reads(self) -> None:
        (self.gate / "shut").unlink(missing_ok=True)

    def signal(self, name: str, signum: signal.Signals) -> None:
        os.kill(self.deployment.child(name).pid, signum)

    def metric(self, name: str, **labels: str) -> float:
        return self.read_metric(self.deployment, name, **labels)

    def held(self, instance: str) -> float:
        return self.metric("kv_cache_blocks_held", instance=instance)

    def loaded(self, instance: str) -> float:
        return self.metric("kv_transfer_blocks_total", instance=instance, direction="load")

    def wait_for_failure(self, instance: str, kind: str) -> None:
        """Wait until the instance has counted a failed load of this kind; counters arrive with heartbeats."""
        failures = "kv_transfer_failures_total"
        wait_until(lambda: self.metric(failures, instance=instance, kind=kind) > 0, f"a block is counted as {kind}")

    def is_idle(self) -> bool:
        """Restart exited children, and return True if all instances are registered and no block is held."""
        num_instances = len(self.deployment.children) - 1
        self.deployment.check_children()
        registered = httpx.get(f"{self.deployment.url}/debug/instances").json()["instances"]
        return len(registered) == num_instances and self.metric("kv_cache_blocks_held") == 0

    def assert_recovered(self, reader: str) -> None:
        """Check that all instances are back, no block is held, and `reader` loads blocks again."""
        wait_until(self.is_idle, "all instances are registered and no block is held")
        before, deadline = self.loaded(reader), time.monotonic() + 600
        while self.loaded(reader) == before:
            assert time.monotonic() < deadline, f"{reader} loads nothing"
            prompts = [self.long_prompt() for _ in range(2)]
            assert list(self.threads.map(self.send, prompts)) == [self.reference(prompt) for prompt in prompts]
            time.sleep(0.5)
        wait_until(self.is_idle, "all blocks are freed")


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory,
    install_connectors: Callable[..., None],
    checkpoint: Callable[..., Path],
    generate: Generate,
    deploy: Callable[..., Any],
    metric: Callable[..., float],
) -> Iterator[System]:
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")
    site, gate, model = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("gate"), checkpoint("llama")
    install_connectors(site, "pdserve_gated", Path(__file__).parent / "gated.py", {"gated+nixl": "GatedNixl"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("UCX_TLS", "tcp,self")  # the owner's CPU takes part in each read, as between hosts
        with (
            deploy(
                model=str(model),
                connector=f"gated+nixl://?gate={gate}&timeout={TIMEOUT_S}&piece=24KiB",
                lease_seconds=LEASE_S,
                num_blocks=64,
                decode=2,
                policy="round_robin",
                flags={"router": ["--instance-timeout-seconds", "5"]},  # of an instance that is stopped
            ) as deployment,
            ThreadPoolExecutor(4) as threads,
        ):
            yield System(deployment, gate, model, generate, threads, metric)


@pytest.fixture(autouse=True)
def open_gate(system: System) -> Iterator[None]:
    wait_until(system.is_idle, "all instances are registered and no block is held")
    yield
    system.resume_reads()


def test_decode_is_killed_while_it_reads(system: System) -> None:
    prompt, future, reader = system.pause_a_read()
    system.signal(reader, signal.SIGKILL)
    system.resume_reads()
    assert future.result(600) == system.reference(prompt)
    assert system.metric("migrations_total", kind="instance_lost") >= 1
    wait_until(lambda: system.held("prefill-0") == 0, "the blocks leased to the dead instance are freed")
    system.assert_recovered(reader)


def test_prefill_is_killed_while_decode_reads(system: System) -> None:
    prompt, future, reader = system.pause_a_read()
    system.signal("prefill-0", signal.SIGKILL)
    system.resume_reads()
    assert future.result(600) == system.reference(prompt)
    system.wait_for_failure(reader, "unavailable")
    system.assert_recovered(reader)


def test_lease_ends_while_decode_reads(system: System) -> None:
    prompt, future, reader = system.pause_a_read()
    wait_until(lambda: system.held("prefill-0") == 0, "the lease ends although a read is running")
    for _ in range(2):
        system.send(system.long_prompt(), tokens=1)  # served by prefill alone; overwrites rows still to be read
    assert not future.done()
    system.resume_reads()
    assert future.result(600) == system.reference(prompt)
    system.wait_for_failure(reader, "corrupt")
    system.assert_recovered(reader)


@pytest.mark.slow
def test_prefill_is_stopped_and_continued_while_decode_reads(system: System) -> None:
    prompt, future, reader = system.pause_a_read()
    system.signal("prefill-0", signal.SIGSTOP)
    try:
        system.resume_reads()
        assert future.result(TIMEOUT_S + 60) == system.reference(prompt)
        system.wait_for_failure(reader, "unavailable")
    finally:
        system.signal("prefill-0", signal.SIGCONT)
    system.assert_recovered(reader)


def test_decode_is_stopped_and_continued_while_it_reads(system: System) -> None:
    prompt, future, reader = system.pause_a_read()
    system.signal(reader, signal.SIGSTOP)
    try:
        system.resume_reads()
        assert future.result(600) == system.reference(prompt)
        wait_until(lambda: system.held("prefill-0") == 0, "the blocks are freed when the lease ends")
    finally:
        system.signal(reader, signal.SIGCONT)
    system.assert_recovered(reader)
