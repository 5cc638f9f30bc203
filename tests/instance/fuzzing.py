"""Fuzzing two instances with random requests, over a store with faults, behind a small router.

All of an instance is real but its model (`hash_model.py`), its store and its clock. Every answer is compared with the right
one, every row of KV that a step reads with that of its tokens, and in the end nothing may be held.
"""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from pdserve.adapters.slot_table import SlotTable
from pdserve.config import InstanceConfig
from pdserve.engine.memory.groups import pages_for
from pdserve.engine.memory.kv_memory import pool_groups
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import StepPlan
from pdserve.errors import RequestError
from pdserve.instance.instance import Instance
from pdserve.keys import Tokens, pack_tokens
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams, Tenant
from tests.instance.faulty_store import FaultyStore, Lease
from tests.instance.hash_drafts import HashDraftModel
from tests.instance.hash_model import BASE, VOCAB, HashRunner, Variant, answer, beam_answers, layout_of, spec_of
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
    variant: Variant = BASE
    pin: bool = False


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


@dataclass(frozen=True)
class SomeAdapter:
    digest: bytes


class SlottedAdapters:
    """Adapters, of which some have slots; see `pdserve.engine.adapters`."""

    def __init__(self, num_slots: int) -> None:
        self._slots = SlotTable(num_slots, lambda slot, adapter: None)

    def find(self, digest: bytes) -> SomeAdapter:
        return SomeAdapter(digest)

    def acquire(self, seq: EngineSequence, *siblings: EngineSequence) -> bool:
        return self._slots.acquire(seq, *siblings)

    def release(self, seq: EngineSequence) -> None:
        self._slots.release(seq)

    def begin_step(self, plan: StepPlan) -> None:
        slots: dict[int, EngineSequence] = {}
        for seq in plan.counts:
            if seq.adapter is not None:
                other = slots.setdefault(self._slots.slot_of(seq), seq)
                assert seq.adapter == other.adapter, "two adapters have one slot"

    def check_end(self) -> None:
        assert not self._slots.is_used, "a slot is held"


class LateMasks:
    """A grammar that allows everything, whose masks come late, and which fails at random; see `GrammarConstraint`."""

    follower = None

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._is_late, self._num_tokens = rng, True, -1
        self.failure: RequestError | None = None

    def sibling(self) -> "LateMasks":
        return LateMasks(self._rng)

    @property
    def is_late(self) -> bool:
        self._is_late &= self.failure is None and self._rng.random() < 0.8
        return self._is_late

    def follow(self, output: Tokens) -> None:
        if len(output) != self._num_tokens:
            self._num_tokens, self._is_late = len(output), True
            if self._rng.random() < 0.01:
                self.failure = RequestError("too late", kind="invalid_grammar")

    def try_out(self, drafts: list[int]) -> None: ...

    def end(self) -> None: ...


class World:
    """Two instances, their store, and a small router: the settings and all that happens follow from a seed.

    Args:
        meddles: clients cancel, instances seem to fail, and streams move. What waits for another might go on only thereby.

    Attributes:
        counts: how often what has happened.
    """

    def __init__(self, seed: int, *, meddles: bool = True) -> None:
        self._rng = rng = random.Random(seed)
        # Drawn without that: what other seeds once found stays as it was.
        self._drafts = random.Random(seed) if seed % 5 == 0 else None
        self._meddles, self._now = meddles, 0.0
        self._block_size = rng.choice([1, 2, 3, 4, 16, 16])
        windows = rng.choice(
            [
                (None,),
                (None, None),
                (None, None),
                (5,),
                (17, 17),
                (40, 40),
                (None, 7),
                (40, 10),
                (None, 20, 5),
                (None, 9, None),
            ]
        )
        self._spec = spec_of(windows, rng.choice([0, 0, 2, 50]))
        self._eos = frozenset(rng.choice([(), (0,), (0, 1, 2)]))
        self._max_len = rng.choice([30, 60, 120])
        self._faults = rng.choice([0.0, 0.0, 0.02, 0.15, 0.5])
        self._lag = rng.choice([0.0, 0.5, 0.9])  # probability that frames to the router wait
        self._itl_target = rng.choice([None, None, 20.0])
        self._can = {"follows": rng.random() < 0.6, "prolongs": rng.random() < 0.5}
        if (how := rng.random()) < 0.2:
            self._can |= {"in_place": True, "follows": False}
        elif how < 0.6:
            self._can["stores_growing"] = True
        self._undecided = None
        if not self._spec.states:
            self._undecided = rng.choice([None, None, 0.0, 0.1])
        self._has_adapters, self._has_grammars = self._undecided is None and rng.random() < 0.4, rng.random() < 0.3
        self._prefixes = [self._some_tokens(rng.randrange(1, 50)) for _ in range(3)]
        self._data: dict[Any, npt.NDArray[np.uint8]] = {}
        self._leased: dict[bytes, Lease] = {}
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
                for instance in self.instances:  # what has come meanwhile
                    instance.run_once(wait=False)
                if self._is_quiet():
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
            if self._has_adapters:
                cast("Any", instance.engine.adapters).check_end()
            scheduler = instance.engine.scheduler
            self.counts += Counter(preemptions=scheduler.num_preemptions, swaps=scheduler.swap_space.num_swaps)
            drafter = instance.engine.drafter
            if isinstance(drafter, HashDraftModel):
                assert not drafter.followed and not drafter.pool.num_held
                drafter.pool.check_integrity()
                self.counts["model_drafts"] += runner.num_accepted
            self.counts["drafts"] += runner.num_accepted
            self.counts["launched"] += runner.pipeline.num_launched if runner.pipeline else 0

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
        runner = HashRunner(self._spec, size, num_pages, host, self._eos, rng.choice([0.0005, 0.02]), self._undecided)
        self._runners.append(runner)

        def send(link: str, frame: pb.InstanceFrame) -> None:
            self._frames.append((at, frame))

        def connect(url: str) -> FaultyStore:
            self._stores.append(
                FaultyStore(self._data, self._leased, rng, self._faults, lambda: self._now, **self._can)
            )
            return self._stores[-1]

        runner.variant_of = lambda request_id: self._choices[request_id].ask.variant
        small = mock.patch("pdserve.roles.transfers.MIN_RANGE_BYTES", 4)
        with mock.patch("pdserve.instance.instance.connect", connect), small:
            inbox: Any = Inbox()
            instance = Instance(config, send, runner=cast("Any", runner), inbox=inbox, now=lambda: self._now)
        instance.engine.pool.message_ends = frozenset(rng.choice([(), (1,), (1, 2)]))
        runner.is_warm = True
        if self._has_adapters:
            instance.engine.adapters = cast("Any", SlottedAdapters(rng.randrange(1, 4)))
        if self._drafts is not None:
            most = self._drafts.choice([None, 1, 4, 16])
            own = dataclasses.replace(config, speculate="draft", speculative_model="hashes", speculative_tokens=most)
            instance.engine.drafter = HashDraftModel(own, instance.engine.scheduler, runner, self._drafts)
        instance.engine._constraint = lambda sampling, tenant: cast("Any", LateMasks(rng))  # type: ignore[method-assign]
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
            grammar="anything" if self._has_grammars and not width and rng.random() < 0.5 else "",
            **fields,
        )
        if width:
            seeds, most = seeds[:1], len(prompt) + sampling.max_tokens
            if any(instance.engine.beams_fault(most, width) for instance in self.instances):
                return
        variant = self._some_variant(prompt)
        prediction = answer(prompt, sampling, seeds[0], self._eos, variant) if rng.random() < 0.3 and not width else []
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
            variant,
            rng.random() < 0.05,
        )
        decode, prefill = self._some_instances()
        is_split = rng.random() < 0.75 and (sampling.max_tokens > 1 or bool(width))
        self._submit(
            [
                Choice(ask, f"{len(self._choices) + i}", seed, prefill if is_split else None, decode)
                for i, seed in enumerate(seeds)
            ]
        )

    def _some_instances(self) -> list[int]:
        """Return one to decode and one to prefill. Where KV is read in place, no pool waits for one that waits for it."""
        return [1, 0] if self._can.get("in_place") else self._rng.sample([0, 1], 2)

    def _some_variant(self, prompt: list[int]) -> Variant:
        rng = self._rng
        if not self._has_adapters or rng.random() < 0.4:
            return Variant(rng.choice(["", "", "salt"]))
        start = rng.choice([0, 16, self._block_size, rng.randrange(len(prompt))])
        return Variant("", bytes([rng.randrange(4)]) * 16, start if start < len(prompt) else 0)

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
            salt=ask.variant.salt,
            adapter=ask.variant.adapter,
            adapter_start=ask.variant.start,
            pin=ask.pin,
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
            decode, prefill = self._some_instances()
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
        has_failed = output.error is not None and output.error.kind == "invalid_grammar"
        if output.error is not None and output.error.kind != "too_few_answers" and not has_failed:
            raise Wrong(f"{choice}: {output.error}")
        if at == choice.prefill:
            if choice.is_final:
                return
            self._hand_over(choice, output)
        elif output.hypotheses:
            choice.answers = [[*one.token_ids] for one in output.hypotheses]
        choice.tokens += output.token_ids
        if output.finish_reason or output.error is not None:
            self._end(choice, "failures" if has_failed else "answers")
            self._check(choice, len(choice.tokens) if has_failed else None)

    def _hand_over(self, choice: Choice, output: Output) -> None:
        """Tell decode how far prefill is."""
        stored = output.stored
        if output.finish_reason or not (output.token_ids or stored):
            return
        message = pb.HandOver(request_id=choice.id)
        if stored is not None:
            message.num_blocks, message.coming, message.final = stored.num_blocks, stored.coming, stored.final
            message.tickets.extend(stored.tickets)
            choice.is_final = stored.final
        if output.token_ids:
            message.first_token = output.token_ids[0]
        self.instances[choice.decode].hand_over(LINK, message)

    def _end(self, choice: Choice, how: str) -> None:
        choice.is_over = True
        self.counts[how] += 1
        for at in choice.holders:
            self.instances[at].cancel(LINK, choice.id)  # without effect where it has ended

    def _check(self, choice: Choice, num_tokens: int | None) -> None:
        """Raise Wrong if an answer is not the right one, or its first `num_tokens`."""
        ask = choice.ask
        found: Any = choice.tokens
        right: Any
        of = ask.variant
        if not ask.sampling.beam_width:
            right = answer(ask.prompt, ask.sampling, choice.seed, self._eos, of)[:num_tokens]
        else:
            right, found = beam_answers(ask.prompt, ask.sampling, self._eos, of), choice.answers
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
