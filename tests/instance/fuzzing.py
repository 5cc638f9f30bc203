"""Fuzzing two instances with random requests, over a store with faults, behind a small router.

All of an instance is real but its model (`hash_model.py`), its store and its clock. Every answer is compared with the right
one, every row of KV that a step reads with that of its tokens, and in the end nothing may be held.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from pdserve.config import InstanceConfig
from pdserve.engine.memory.groups import pages_for
from pdserve.engine.memory.kv_memory import pool_groups
from pdserve.instance.instance import Instance
from pdserve.keys import pack_tokens
from pdserve.kv_transfer.connector import (
    Capabilities,
    Connector,
    OperationFuture,
    Outcome,
    PoolMemory,
    Result,
    Stats,
)
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams, Tenant
from tests.instance.hash_model import VOCAB, HashRunner, answer, beam_answers, layout_of, spec_of
from tests.outputs import outputs_of

LINK = "router"
MAX_TURNS = 60_000
PATIENCE = 20_000  # turns after which every frame arrives at once


class Wrong(Exception):
    """An instance has done what it must never do."""


class Inbox(deque[Callable[[], None]]):
    """The queue of work for an engine thread, which is this one."""

    put = deque.append

    def get_nowait(self) -> Callable[[], None]:
        if not self:
            raise Empty
        return self.popleft()


@dataclass(eq=False)
class Operation:
    """An operation of a store that has not ended."""

    kind: str
    keys: list[bytes]
    blocks: list[int]
    future: "Future[Any]" = field(default_factory=Future)
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FaultyStore(Connector):
    """A store whose operations end in any order, and fail at random.

    Args:
        data: what is stored, by window and key; instances share it.
        faults: probability that an operation fails at a block.
    """

    scheme = "faulty"

    def __init__(
        self, data: "dict[Any, npt.NDArray[np.uint8]]", rng: random.Random, faults: float, **can: bool
    ) -> None:
        self._data, self._rng, self._faults, self._can = data, rng, faults, can
        self.active: list[Operation] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cancels=True, skips_hanging=True, **self._can)  # type: ignore[arg-type]

    def attach(self, memory: PoolMemory) -> None:
        self._memory = memory

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, lease_s: float) -> "Future[Result]":
        return self._begin("store", keys, block_ids)

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], *, tickets: Sequence[bytes] = ()
    ) -> "Future[Result]":
        return self._begin("load", keys, block_ids)

    def follow(self, keys: Sequence[bytes], block_ids: Sequence[int], *, patience_s: float) -> "Future[Result]":
        return self._begin("follow", keys, block_ids)

    def match(self, keys: Sequence[bytes]) -> "Future[int]":
        self.active.append(operation := Operation("match", [*keys], []))
        return operation.future

    def release(self, keys: Sequence[bytes], *, tickets: Sequence[bytes] = ()) -> None: ...

    def prolong(self, keys: Sequence[bytes], *, lease_s: float, tickets: Sequence[bytes] = ()) -> None: ...

    def stats(self) -> Stats:
        return Stats()

    def close(self) -> None: ...

    def end_one(self) -> None:
        """End some operation."""
        if not self.active:
            return
        operation = self.active.pop(self._rng.randrange(len(self.active)))
        if operation.kind == "match":
            keys = [] if self._rng.random() < self._faults else operation.keys
            found = (i for i, key in enumerate(keys) if self._name(key) not in self._data)
            operation.future.set_result(next(found, len(keys)))
            return
        outcomes, stopped = list[Outcome](), False
        for key, block in zip(operation.keys, operation.blocks, strict=True):
            stopped |= operation.cancelled and self._rng.random() < 0.5
            if stopped:
                outcomes.append(Outcome.CANCELLED if operation.cancelled else Outcome.UNAVAILABLE)
                continue
            outcomes.append(self._end_block(operation.kind, key, block))
            stopped = outcomes[-1] is Outcome.UNAVAILABLE and operation.kind != "store"
            if outcomes[-1] is Outcome.MISSING and operation.kind == "follow":
                outcomes += [Outcome.MISSING] * (len(operation.keys) - len(outcomes))
                break
        operation.future.set_result(Result(outcomes, 0.01))

    def _end_block(self, kind: str, key: bytes, block: int) -> Outcome:
        rows, fails = self._memory.rows, self._rng.random() < self._faults
        if kind == "store":
            if fails:
                return self._rng.choice([Outcome.FULL, Outcome.UNAVAILABLE])
            self._data.setdefault(self._name(key), rows[block].copy())
            return Outcome.OK
        if not fails and (name := self._name(key)) in self._data:
            rows[block] = self._data[name]
            return Outcome.OK
        rows[block] = np.frombuffer(self._rng.randbytes(rows.shape[1]), np.uint8)
        return self._rng.choice([Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE]) if fails else Outcome.MISSING

    def _name(self, key: bytes) -> tuple[int, bytes]:
        return self._memory.layout.window, key

    def _begin(self, kind: str, keys: Sequence[bytes], block_ids: Sequence[int]) -> "Future[Result]":
        operation = Operation(kind, [*keys], [*block_ids])
        operation.future = OperationFuture(operation.cancel)
        self.active.append(operation)
        return operation.future


@dataclass(eq=False)
class Ask:
    """What a client asks for, with the choices that answer it."""

    prompt: list[int]
    sampling: SamplingParams
    seeds: list[int]
    tenant: Tenant
    priority: int
    multi_turn: bool
    whole: bool
    prediction: list[int]


@dataclass(eq=False)
class Choice:
    """One answer, as the router sees it.

    Attributes:
        prefill, decode: the instances that have it, by index; no prefill if the other one does everything.
        is_final: decode was told that no more KV comes.
        answers: of a beam search that is over.
    """

    ask: Ask
    id: str
    seed: int
    prefill: int | None
    decode: int
    tokens: list[int] = field(default_factory=list)
    is_final: bool = False
    is_over: bool = False
    answers: list[list[int]] | None = None

    @property
    def holders(self) -> list[int]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class World:
    """Two instances, their store, and a small router: the settings and all that happens follow from a seed.

    Args:
        meddles: clients cancel, instances seem to fail, and streams move. What waits for another might go on only thereby.

    Attributes:
        counts: how often what has happened.
    """

    def __init__(self, seed: int, *, meddles: bool = True) -> None:
        self._rng = rng = random.Random(seed)
        self._meddles, self._now = meddles, 0.0
        self._block_size = rng.choice([1, 2, 3, 4, 16, 16])
        windows = rng.choice([(None,), (None,), (None,), (5,), (17,), (40,), (None, 7), (40, 10), (None, 20, 5)])
        self._spec = spec_of(windows, rng.choice([0, 0, 2, 50]))
        self._eos = frozenset(rng.choice([(), (0,), (0, 1, 2)]))
        self._max_len = rng.choice([30, 60, 120])
        self._faults = rng.choice([0.0, 0.0, 0.02, 0.15, 0.5])
        self._lag = rng.choice([0.0, 0.5, 0.9])  # probability that frames to the router wait
        self._itl_target = rng.choice([None, None, 20.0])
        self._can = {"follows": rng.random() < 0.6, "prolongs": rng.random() < 0.5}
        self._prefixes = [self._some_tokens(rng.randrange(1, 50)) for _ in range(3)]
        self._data: dict[Any, npt.NDArray[np.uint8]] = {}
        self._stores: list[FaultyStore] = []
        self._frames: deque[tuple[int, pb.InstanceFrame]] = deque()
        self._choices: dict[str, Choice] = {}
        self.counts: Counter[str] = Counter()
        self._runners: list[HashRunner] = []
        self.instances = [self._new_instance(at) for at in range(2)]

    def run(self) -> None:
        """Play until all requests have ended and nothing is under way.

        Raises:
            Wrong: an answer is wrong, or an instance holds something for ever.
        """
        rng, to_come = self._rng, self._rng.randrange(3, 25)
        for turn in range(MAX_TURNS):
            self._now += 0.01
            dice = rng.random()
            if to_come and dice < 0.15:
                self._ask()
                to_come -= 1
            elif dice < 0.3:
                if self._meddles:
                    self._meddle()
            elif dice < 0.33 and self._data and self._faults:
                self._data.pop(rng.choice([*self._data]))
            elif dice < 0.65:
                for store in self._stores:
                    for _ in range(rng.randrange(4)):
                        store.end_one()
            self.instances[rng.randrange(2)].run_once(wait=False)
            if rng.random() >= self._lag or turn > PATIENCE:
                while self._frames:
                    at, frame = self._frames.popleft()
                    for output in outputs_of(frame):
                        self._on_output(at, output)
            if not to_come and self._is_quiet():
                return self._check_end()
        raise Wrong(f"it does not end: {[choice for choice in self._choices.values() if not choice.is_over][:4]}")

    def _is_quiet(self) -> bool:
        is_over = all(choice.is_over for choice in self._choices.values())
        return is_over and not any(one.num_jobs for one in self.instances) and not any(s.active for s in self._stores)

    def _check_end(self) -> None:
        for instance, runner in zip(self.instances, self._runners, strict=True):
            instance.run_once(wait=False)
            assert instance.engine.pool.num_held == instance.engine.pool.num_promised == 0
            instance.engine.pool.check_integrity()
            scheduler = instance.engine.scheduler
            self.counts += Counter(preemptions=scheduler.num_preemptions, swaps=scheduler.swap_space.num_swaps)
            self.counts["drafts"] += runner.num_accepted

    def _new_instance(self, at: int) -> Instance:
        rng, size = self._rng, self._block_size
        groups, blocks = pool_groups(layout_of(self._spec, size), 1), -(-self._max_len // size)
        num_pages = pages_for(blocks, groups) + rng.choice([1, 3, 8, 40]) * len(groups)
        host = rng.choice([0, 0, 5, 200])
        config = InstanceConfig(
            model="hashes",
            block_size=size,
            num_blocks=num_pages,
            max_num_batched_tokens=rng.choice([1, 4, 16, 64]),
            max_num_seqs=rng.choice([2, 4, 16]),
            itl_target_ms=self._itl_target,
            store_generated=rng.choice(["auto", "on", "off"]),
            max_inflight_bytes=rng.choice([None, str(8 * size * 3)]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            speculate=rng.choice(["off", "ngram", "suffix"]),
            speculative_tokens=rng.choice([1, 4, 16]),
        )
        runner = HashRunner(self._spec, size, num_pages, host, self._eos, rng.choice([0.0005, 0.02]))
        self._runners.append(runner)

        def send(link: str, frame: pb.InstanceFrame) -> None:
            self._frames.append((at, frame))

        def connect(url: str) -> FaultyStore:
            self._stores.append(FaultyStore(self._data, rng, self._faults, **self._can))
            return self._stores[-1]

        with mock.patch("pdserve.instance.instance.connect", connect):
            inbox: Any = Inbox()
            instance = Instance(config, send, runner=cast("Any", runner), inbox=inbox, now=lambda: self._now)
        instance.engine.pool.message_ends = frozenset(rng.choice([(), (1,), (1, 2)]))
        runner.is_warm = True
        return instance

    def _some_tokens(self, count: int, kinds: int = VOCAB) -> list[int]:
        return [self._rng.randrange(kinds) for _ in range(count)]

    def _ask(self) -> None:
        """Have a client send a request."""
        rng, size = self._rng, self._block_size
        length = max(1, min(rng.choice([rng.randrange(1, self._max_len), size, 2 * size, size + 1]), self._max_len - 2))
        prompt = self._some_tokens(length, 3)
        if rng.random() < 0.7:
            prompt = ((rng.choice(self._prefixes) if rng.random() < 0.7 else []) + self._some_tokens(length))[:length]
        width, seeds = (
            rng.choice([0, 0, 0, 0, 2, 3]),
            [rng.randrange(2**63) for _ in range(rng.choice([1, 1, 1, 2, 3, 5]))],
        )
        fields: dict[str, Any] = {"beam_width": width, "num_answers": rng.randrange(1, width + 1)} if width else {}
        sampling = SamplingParams(
            max_tokens=min(rng.choice([1, 2, 3, 8, 20, 50]), self._max_len - len(prompt)),
            temperature=0.0 if width else 1.0,
            ignore_eos=rng.random() < 0.5,
            **fields,
        )
        if width:
            seeds, most = seeds[:1], len(prompt) + sampling.max_tokens
            if any(instance.engine.beams_fault(most, width) for instance in self.instances):
                return
        prediction = answer(prompt, sampling, seeds[0], self._eos) if rng.random() < 0.3 and not width else []
        for at in rng.sample(range(len(prediction)), len(prediction) // 4):
            prediction[at] = rng.randrange(VOCAB)
        ask = Ask(
            prompt,
            sampling,
            seeds,
            Tenant(rng.randrange(3), rng.choice([1.0, 3.0])),
            rng.randrange(-2, 3),
            rng.random() < 0.5,
            rng.random() < 0.3,
            prediction,
        )
        decode, prefill = rng.sample([0, 1], 2)
        is_split = rng.random() < 0.75 and (sampling.max_tokens > 1 or bool(width))
        self._submit(
            [
                Choice(ask, f"{len(self._choices) + i}", seed, prefill if is_split else None, decode)
                for i, seed in enumerate(seeds)
            ]
        )

    def _submit(self, choices: list[Choice]) -> None:
        """Send choices of one prompt to their instances, decode first."""
        first, *others = choices
        self._choices |= {choice.id: choice for choice in choices}
        ask = first.ask
        request = Request(
            prompt=ask.prompt,
            sampling=replace(ask.sampling, seed=first.seed),
            tenant=ask.tenant,
            priority=ask.priority,
            multi_turn=ask.multi_turn,
            whole=ask.whole,
        )
        message = pb.Submit(request_id=first.id, request=request.pack(), output=first.tokens)
        for one in others:
            message.members.add(request_id=one.id, seed=one.seed)

        def send(at: int, phase: "pb.Phase") -> None:
            sent = pb.Submit()
            sent.CopyFrom(message)
            sent.phase = phase
            if phase != pb.PREFILL and ask.prediction:
                sent.prediction = pack_tokens(ask.prediction)
            self.instances[at].submit(LINK, sent)

        if first.prefill is not None:
            send(first.decode, pb.DECODE)
            send(first.prefill, pb.PREFILL)
        else:
            needs_no_decode = ask.sampling.max_tokens == 1 and not ask.sampling.beam_width
            send(first.decode, pb.PREFILL if needs_no_decode and self._rng.random() < 0.5 else pb.BOTH)

    def _meddle(self) -> None:
        """Cancel a choice, declare its prefill failed, move it, or reset a pool's cache."""
        running = [choice for choice in self._choices.values() if not choice.is_over]
        if not running:
            return
        choice, dice = self._rng.choice(running), self._rng.random()
        if dice < 0.08:
            self._end(choice, "cancelled")
        elif dice < 0.14 and choice.prefill is not None and not choice.is_final:
            choice.is_final = True
            self.counts["fallbacks"] += 1
            self.instances[choice.decode].hand_over(LINK, pb.HandOver(request_id=choice.id, final=True))
            self.instances[choice.prefill].cancel(LINK, choice.id)
        elif dice < 0.2 and not choice.ask.sampling.beam_width:
            self._end(choice, "migrations")
            decode, prefill = self._rng.sample([0, 1], 2)
            left = choice.ask.sampling.max_tokens - len(choice.tokens)
            is_split = left > 1 and self._rng.random() < 0.6
            moved = Choice(choice.ask, choice.id + "#", choice.seed, prefill if is_split else None, decode)
            moved.tokens = [*choice.tokens]
            self._submit([moved])
        elif dice < 0.21:
            self.counts["resets"] += 1
            self.instances[choice.decode].reset_cache(self.counts["resets"])

    def _on_output(self, at: int, output: Output) -> None:
        choice = self._choices.get(output.request_id)
        if choice is None or choice.is_over:
            return
        if output.error is not None and output.error.kind != "too_few_answers":
            raise Wrong(f"{choice}: {output.error}")
        if at == choice.prefill:
            if choice.is_final:
                return
            self._hand_over(choice, output)
        elif output.hypotheses:
            choice.answers = [[*one.token_ids] for one in output.hypotheses]
        choice.tokens += output.token_ids
        if output.finish_reason or output.error is not None:
            self._end(choice, "answers")
            self._check(choice)

    def _hand_over(self, choice: Choice, output: Output) -> None:
        """Tell decode how far prefill is."""
        stored = output.stored
        if output.finish_reason or not (output.token_ids or stored):
            return
        message = pb.HandOver(request_id=choice.id)
        if stored is not None:
            message.num_blocks, message.coming, message.final = stored.num_blocks, stored.coming, stored.final
            choice.is_final = stored.final
        if output.token_ids:
            message.first_token = output.token_ids[0]
        self.instances[choice.decode].hand_over(LINK, message)

    def _end(self, choice: Choice, how: str) -> None:
        choice.is_over = True
        self.counts[how] += 1
        for at in choice.holders:
            self.instances[at].cancel(LINK, choice.id)  # without effect where it has ended

    def _check(self, choice: Choice) -> None:
        ask = choice.ask
        found: Any = choice.tokens
        right: Any = answer(ask.prompt, ask.sampling, choice.seed, self._eos) if not ask.sampling.beam_width else None
        if right is None:
            right, found = beam_answers(ask.prompt, ask.sampling, self._eos), choice.answers
            right = right if len(right) == ask.sampling.num_answers else None
        if found != right:
            raise Wrong(f"{choice}: it is {found} instead of {right}")


def run(seeds: Sequence[int], *, meddles: bool = True) -> "Counter[str]":
    """Play each seed, and return what has happened. An exception names the seed."""
    total = Counter[str]()
    for seed in seeds:
        world = World(seed, meddles=meddles)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        total += world.counts
    return total
