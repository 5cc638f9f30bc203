"""Roles of an instance without its thread: a real engine, a fake store whose operations the test ends, and a fake clock."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.decode.decoder import Decoder
from pdserve.engine.engine import Engine
from pdserve.engine.step import Accepted
from pdserve.kv_transfer.connector import Capabilities, Connector, Outcome, PoolMemory, Result, Stats
from pdserve.kv_transfer.grouped import attach_groups
from pdserve.prefill.prefiller import Prefiller
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.roles.job import Job
from pdserve.roles.transfers import Fetcher, Transfers

BLOCK = 16
SECONDS = 0.5  # that every operation takes


@dataclass
class Operation:
    """A store or load that the test has not ended yet."""

    kind: str
    keys: list[bytes]
    blocks: list[int]
    lease_s: float = 0.0
    future: "Future[Result]" = field(default_factory=Future)


class FakeStore(Connector):
    """A store in a dictionary that instances share. Stores and loads take effect when the test ends them.

    Each group of a pool has one. The keys of those with a window of their own have that behind them in the dictionary.
    """

    scheme = "fake"

    def __init__(self, rows: dict[bytes, Any], follows: bool) -> None:
        self.rows = rows
        self._follows = follows
        self.active: list[Operation] = []
        self.leased: list[bytes] = []
        self.released: list[bytes] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(follows=self._follows)

    def attach(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._suffix = memory.layout.window.to_bytes(2, "big") if memory.layout.window else b""

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> "Future[Result]":
        return self._add(Operation("store", list(keys), list(block_ids), lease_s))

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()
    ) -> "Future[Result]":
        return self._add(Operation("load", list(keys), list(block_ids)))

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> "Future[Result]":
        return self._add(Operation("follow", list(keys), list(block_ids)))

    def match(self, keys: Sequence[bytes]) -> "Future[int]":
        future: Future[int] = Future()
        future.set_result(next((i for i, key in enumerate(keys) if key + self._suffix not in self.rows), len(keys)))
        return future

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None:
        self.released += keys

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None: ...

    def end(self, index: int = 0, good: int | None = None, then: Outcome = Outcome.UNAVAILABLE) -> Operation:
        """End an operation: its first `good` blocks (all, if None) as OK, and the others as `then`."""
        operation = self.active.pop(index)
        outcomes = []
        for i, (name, block) in enumerate(zip(operation.keys, operation.blocks, strict=True)):
            key = name + self._suffix
            if good is not None and i >= good:
                outcomes.append(then)
            elif operation.kind == "store":
                self.leased += [name] if operation.lease_s else []
                self.rows[key] = self._memory.rows[block].copy()
                outcomes.append(Outcome.OK)
            elif key in self.rows:
                self._memory.rows[block] = self.rows[key]
                outcomes.append(Outcome.OK)
            else:
                outcomes.append(Outcome.MISSING)
        operation.future.set_result(Result(outcomes, SECONDS))
        return operation

    def _add(self, operation: Operation) -> "Future[Result]":
        self.active.append(operation)
        return operation.future


class FakeContext:
    """Runs callbacks when the test says so, on its thread. The test sets the time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.inbox: deque[Callable[[], None]] = deque()
        self.post = self.inbox.append
        self.closed: list[Job] = []
        self.counts: dict[tuple[str, str], float] = {}

    def now(self) -> float:
        return self.time

    def send_outputs(self) -> None: ...

    def close_job(self, job: Job) -> None:
        self.closed.append(job)

    def count(self, name: str, value: float, **labels: str) -> None:
        key = name, ",".join(labels.values())
        self.counts[key] = self.counts.get(key, 0) + value

    def record_transfer(self, nbytes: int, seconds: float, now: float) -> None: ...


class RoleInstance:
    """Both roles of one instance, driven by the test."""

    def __init__(
        self,
        model: Path,
        rows: dict[bytes, Any],
        *,
        follows: bool = False,
        store_generated: str = "off",
        num_blocks: int = 64,
        block_size: int = BLOCK,
        runner: Any = None,
        checkpoint: Any = None,
    ) -> None:
        sizes: dict[str, int] = {"num_blocks": num_blocks, "block_size": block_size}
        config = EngineConfig(model=str(model), max_num_batched_tokens=2 * BLOCK, **sizes)  # type: ignore[arg-type]
        self.engine = Engine(config, checkpoint, runner=runner)
        layout, self.context = self.engine.layout, FakeContext()
        self.stores = [FakeStore(rows, follows) for _ in layout.groups]
        self.store, *others = self.stores
        connector = attach_groups(self.store, iter(others).__next__, self.engine.runner.kv, layout)
        self.transfers = Transfers(
            self.engine.pool, connector, self.context, 16, [group.block_bytes for group in layout.groups]
        )
        self.fetcher = Fetcher(self.engine, connector, self.transfers, self.context)
        self.prefiller = Prefiller(self.engine, self.transfers, self.fetcher, self.context, 30.0)
        self.decoder = Decoder(
            self.engine, connector, self.transfers, self.fetcher, self.context, store_generated, 30.0
        )
        self.jobs: dict[object, Job] = {}

    def submit(self, phase: "pb.Phase", prompt: list[int], max_tokens: int, *, multi_turn: bool = False) -> Job:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        seq = self.engine.new_sequence(str(len(self.jobs)), Request(prompt=prompt, sampling=sampling))
        job = self.jobs[seq] = Job("router", seq, phase, multi_turn=multi_turn)
        (self.prefiller if phase == pb.PREFILL else self.decoder).submit(job)
        self.run_callbacks()
        return job

    def submit_choices(self, phase: "pb.Phase", prompt: list[int], sampling: SamplingParams, n: int) -> list[Job]:
        """Submit a request for n choices, whose seeds are those after that of `sampling`."""
        name = f"{len(self.jobs)}-"
        first = self.engine.new_sequence(f"{name}0", Request(prompt=prompt, sampling=sampling))
        members = [(f"{name}{i}", sampling.seed + i) for i in range(1, n)]
        jobs = [Job("router", seq, phase) for seq in (first, *self.engine.new_siblings(first, members))]
        self.jobs.update({job.seq: job for job in jobs})
        if phase == pb.PREFILL:
            self.prefiller.submit(jobs[0], jobs[1:])
        else:
            self.decoder.submit(jobs[0], None, jobs[1:])
        self.run_callbacks()
        return jobs

    def run_callbacks(self) -> None:
        while self.context.inbox:
            self.context.inbox.popleft()()

    def step(self) -> bool:
        """Run one engine step as the engine thread does. Return whether it did anything."""
        self.run_callbacks()
        self.decoder.reserve()
        result = self.engine.step(pause_storing=self.transfers.has_waiting_stores)
        for seq in result.advanced:
            job = self.jobs[seq]
            role = self.prefiller if job.phase == pb.PREFILL else self.decoder
            role.on_step(job, result.outcome.get(seq) or Accepted(), self.context.now())
        self.run_callbacks()
        return not result.idle

    def run(self) -> None:
        while self.step():
            pass

    def end(self, index: int = 0, good: int | None = None, then: Outcome = Outcome.UNAVAILABLE) -> Operation:
        """End a store or load and run its callback. Arguments as of `FakeStore.end`. Those of further groups all end."""
        operation = self.store.end(index, good, then)
        for store in self.stores[1:]:
            while store.active:
                store.end()
        self.run_callbacks()
        return operation

    def end_all(self) -> None:
        while self.store.active:
            self.end()

    def check_nothing_is_held(self) -> None:
        assert self.engine.pool.num_held == 0 and set(self.context.closed) == set(self.jobs.values())
        self.engine.pool.check_integrity()


@pytest.fixture
def rows() -> dict[bytes, Any]:
    """Return the content of the store."""
    return {}


@pytest.fixture
def architecture(request: pytest.FixtureRequest) -> str:
    """Return the model's architecture: the parameter, if the test is parametrized indirectly."""
    return getattr(request, "param", "llama")


@pytest.fixture(scope="session")
def loaded() -> dict[Path, Any]:
    """Return the checkpoints of instances, by their path: each is loaded once."""
    return {}


@pytest.fixture
def instance(
    checkpoint: Callable[..., Path], architecture: str, rows: dict[bytes, Any], loaded: dict[Path, Any]
) -> Callable[..., RoleInstance]:
    """Return a function that makes an instance of the same tiny model over the same store."""
    path = checkpoint(architecture)

    def make(**options: Any) -> RoleInstance:
        if "runner" in options or "block_size" in options:
            return RoleInstance(path, rows, **options)
        one = RoleInstance(path, rows, checkpoint=loaded.get(path), **options)
        loaded[path] = one.engine.checkpoint
        return one

    return make


@pytest.fixture(scope="session")
def computed_alone() -> Callable[[Path, list[int], int], list[int]]:
    """Return a function that gives the output of a prompt that an engine computes alone, with a checkpoint of its own."""
    loaded, answers = dict[Path, Any](), dict[tuple[Path, tuple[int, ...], int], list[int]]()

    def run(path: Path, prompt: list[int], max_tokens: int) -> list[int]:
        key = path, tuple(prompt), max_tokens
        if key not in answers:
            alone = RoleInstance(path, {}, checkpoint=loaded.get(path))
            loaded[path] = alone.engine.checkpoint
            job = alone.submit(pb.BOTH, prompt, max_tokens)
            alone.run()
            answers[key] = job.seq.output.tokens[len(prompt) :].tolist()
        return answers[key]

    return run


@pytest.fixture
def expected(
    checkpoint: Callable[..., Path], architecture: str, computed_alone: Callable[[Path, list[int], int], list[int]]
) -> Callable[[list[int], int], list[int]]:
    """Return a function that gives the output of a prompt that one engine computes alone."""
    return partial(computed_alone, checkpoint(architecture))
