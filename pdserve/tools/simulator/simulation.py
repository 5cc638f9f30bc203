"""Simulation of a deployment: routers, prefill, decode and `both` instances, and clients that play a load."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.keys import KeyChain, Tokens, root_key, token_array
from pdserve.tools.bench.requests import Request as Load
from pdserve.tools.bench.requests import Sample
from pdserve.tools.load_config import ALL
from pdserve.tools.simulator.adapters import digest_of
from pdserve.tools.simulator.breakdown import Stamps
from pdserve.tools.simulator.cores import SharedCores
from pdserve.tools.simulator.drafts import Draws, draft_figures
from pdserve.tools.simulator.instance import SimulatedInstance
from pdserve.tools.simulator.model import InstanceModel
from pdserve.tools.simulator.router import SimulatedClient, SimulatedRouter
from pdserve.tools.simulator.store import SimulatedStore
from pdserve.tools.simulator.verdict import Limit, is_hopeless
from pdserve.tools.simulator.virtual_clock import VirtualClock

MODEL = "model"
COLLECTION_OBJECTS = 200_000
CHECK_S = 0.5  # between two looks at the limits of a run


@dataclass(frozen=True)
class Deployment:
    """A fleet and its settings.

    Attributes:
        prefill, decode, both: numbers of instances.
        routers: number of router processes; requests go to them in turn.
        store_bytes: capacity of the KV store.
        instance, router: settings, as on the command line.
    """

    prefill: int = 1
    decode: int = 1
    both: int = 0
    routers: int = 1
    store_bytes: int = 1 << 40
    instance: InstanceConfig = field(default_factory=lambda: InstanceConfig(model=MODEL))
    router: RouterConfig = field(default_factory=lambda: RouterConfig(model=MODEL))


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation.

    Attributes:
        samples: one per request, as `pdserve bench serve` measures them.
        seconds: simulated.
        busy: share of the time in which each instance was in a step; the time in which requests arrived, or that until the
            last answer, whichever gives the larger share.
        shared_busy: the same of what instances share, in the mean: the routers' threads ("router"), and the way to the KV
            store ("link"), which is the link itself or the streams of an instance, whichever are busier.
        preemptions: over all instances.
        stamps: of the timelines, by the index of the request.
        is_given_up: a limit was exceeded, and what followed was not simulated.
        drafts: see `draft_figures`.
    """

    samples: list[Sample]
    seconds: float
    busy: dict[str, float]
    shared_busy: dict[str, float]
    preemptions: int
    stamps: dict[int, Stamps] = field(default_factory=dict)
    is_given_up: bool = False
    drafts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Let simulated routers and instances log errors only: they are real ones, and say as much."""
    logger = logging.getLogger("pdserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Simulation:
    """One deployment on a virtual clock.

    Args:
        can_skip: skip plain decode steps, which changes no time but through the thread of a router (see `RouterThread`).
        cores: those that routers, instances and client share; None: each has its own.
        models: of the instances of a role, if another than `model`.
    """

    @_errors_only()
    def __init__(
        self,
        deployment: Deployment,
        model: InstanceModel,
        seed: int = 0,
        *,
        can_skip: bool = True,
        cores: SharedCores | None = None,
        models: Mapping[str, InstanceModel] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.store = SimulatedStore(model.link, deployment.store_bytes)
        self.routers = [
            SimulatedRouter(self.clock, f"router-{i}", deployment.router, model, seed + i, cores)
            for i in range(deployment.routers)
        ]
        self.instances: dict[str, SimulatedInstance] = {}
        self._names = {role: count() for role in ("prefill", "decode", "both")}
        self._model = model
        self._config = deployment.instance
        self._can_skip = can_skip
        self._cores = cores
        self._models = models or {}
        self._accepted = dict[str, float]()  # shares of right drafts, by request
        for role in self._names:
            for _ in range(getattr(deployment, role)):
                self.add(role)

    @_errors_only()
    def add(self, role: str) -> str:
        """Add an instance that is ready, and return its name."""
        name, model = f"{role}-{next(self._names[role])}", self._models.get(role, self._model)
        config = replace(
            self._config, instance_id=name, num_blocks=model.num_blocks, block_size=model.layout.block_size
        )
        instance = SimulatedInstance(
            self.clock,
            model,
            self.store,
            config,
            role,
            can_skip=self._can_skip,
            cores=self._cores,
            draws=Draws(self._accepted),
        )
        instance.on_drained = partial(self.kill, name)
        self.instances[name] = instance
        for router in self.routers:
            router.attach(instance)
        return name

    @property
    def start_up_s(self) -> float:
        return self._model.start_up_s

    def start(self, role: str) -> None:
        """Start an instance, which joins after the model's start-up time."""
        self.clock.after(self._model.start_up_s, partial(self.add, role))

    def drain(self, name: str, role: str = "") -> None:
        """Ask an instance through a router to drain, and then to serve in a role; if that is empty, to end.

        Raises:
            NotFound, Conflict: the router refuses.
        """
        router = self.routers[0]
        router.catch_up()
        router.dispatcher.drain(name, role)

    def freeze(self, name: str) -> None:
        """Stop an instance without a word; routers learn of it when its lease expires. It does not come back."""
        self.instances[name].stop()

    def kill(self, name: str) -> None:
        """End the process of an instance, and with it its connections."""
        self.freeze(name)
        for router in self.routers:
            router.lose(name)

    def play(
        self,
        loads: Sequence[Load],
        *,
        is_chat: bool = False,
        think_s: float = 0.0,
        warmup: int = 0,
        limits: Sequence[Limit] = (),
    ) -> Outcome:
        """Send all requests at their times and wait for the answers. A later turn waits for the previous one.

        Args:
            is_chat: the requests are chats, whose generated KV is stored for the next turn.
            think_s: between an answer and the next turn.
            warmup: first requests, during whose arrival busy shares do not count yet.
            limits: given up as soon as one of them is exceeded, whatever follows.
        """
        shares = self._model.acceptance
        self._accepted |= {name_of(load): shares.get(load.key, shares.get(ALL, 0.0)) for load in loads}
        longest = max(one.max_model_len for one in (self._model, *self._models.values()))
        player = _Player(self.clock, self.routers, self._model, loads, is_chat, think_s, longest)
        if limits:
            self.clock.every(CHECK_S, partial(player.check, limits, loads))
        with _rare_collections(), _errors_only():
            self.clock.run(until=lambda: player.num_begun >= min(warmup + 1, len(loads)) or player.is_hopeless)
            began_at, before = self.clock.time, self._busy_seconds()
            self.clock.run(until=lambda: player.num_begun == len(loads) or player.is_hopeless)
            arriving = self._busy_shares(began_at, before)
            self.clock.run(until=lambda: player.num_ended == len(loads) or player.is_hopeless)
        # An instance may have started since the last request.
        busy = {
            name: max(share, arriving.get(name, 0.0)) for name, share in self._busy_shares(began_at, before).items()
        }
        shared = {name: busy.pop(name) for name in ("router", "link")}
        preemptions = sum(one.thread.engine.scheduler.num_preemptions for one in self.instances.values())
        drafts = draft_figures({one.thread: one.busy_seconds for one in self.instances.values()})
        own = (player.stamps, player.is_hopeless, drafts)
        return Outcome(player.samples, self.clock.time, busy, shared, preemptions, *own)

    def _busy_seconds(self) -> dict[str, float]:
        """Return for how long each instance, the routers and the link have been busy."""
        seconds = {name: one.busy_seconds for name, one in self.instances.items()}
        seconds["router"] = fmean(one.thread.busy_seconds for one in self.routers)
        streams = [part.lanes.busy_seconds for one in self.instances.values() for part in one.connectors]
        seconds["link"] = max([self.store.lanes.busy_seconds, *streams])
        return seconds

    def _busy_shares(self, began_at: float, before: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the time since `began_at`, when the seconds were those of `before`."""
        passed = self.clock.time - began_at
        gained = {name: seconds - before.get(name, 0.0) for name, seconds in self._busy_seconds().items()}
        return {name: min(1.0, seconds / passed) if passed else 0.0 for name, seconds in gained.items()}


def name_of(load: Load) -> str:
    """Return the id of a request."""
    return f"r{load.index}"


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles rarely: there are few among the objects of a simulation, and looking takes a sixth of it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTION_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _Player:
    """Sends the requests of a load."""

    def __init__(
        self,
        clock: VirtualClock,
        routers: Sequence[SimulatedRouter],
        model: InstanceModel,
        loads: Sequence[Load],
        is_chat: bool,
        think_s: float,
        longest: int,
    ) -> None:
        self.samples: list[Sample] = []
        self.sent: list[Sample] = []  # those that run, too
        self.is_hopeless = False
        self.stamps: dict[int, Stamps] = {}
        self.num_begun = self.num_ended = 0
        self._clock = clock
        self._routers = routers
        self._is_chat = is_chat
        self._think_s = think_s
        self._block_size, self._longest = model.layout.block_size, longest
        self._roots = {
            name: root_key(model_digest=model.layout.model_digest, adapter=digest_of(name))
            for name in {load.adapter for load in loads}
        }
        self._ids: dict[str, int] = {}  # of the names of which prompts consist
        self._prompts: dict[int, Tokens] = {}  # prompt and answer of turns that have a successor
        self._next_turns: dict[int, list[Load]] = {}
        self._turn = count()
        previous = {load.after for load in loads}
        self._has_next = {load.index for load in loads if load.index in previous}
        for load in loads:
            if load.after is None:
                clock.at(load.at or 0.0, self._sender(load))
            else:
                self._next_turns.setdefault(load.after, []).append(load)

    def check(self, limits: Sequence[Limit], loads: Sequence[Load]) -> None:
        """See whether the limits can still be met."""
        self.is_hopeless = self.is_hopeless or is_hopeless(limits, loads, self.sent, self._clock.time)

    def _sender(self, load: Load) -> Callable[[], None]:
        return lambda: self._send(load)

    def _send(self, load: Load) -> None:
        prompt = token_array(self._prompts.get(load.after, ()) if load.continues and load.after is not None else ())
        blocks = [(self._ids.setdefault(name, len(self._ids)), size) for name, size in load.blocks]
        num_prompt = len(prompt) + sum(size for _, size in blocks)
        if num_prompt > self._longest:  # every router refuses it, and its tokens might fill the memory
            prompt, blocks = token_array(()), []
        for token, size in blocks:
            prompt += token_array([token]) * size
        request_id = name_of(load)
        chain = KeyChain(self._roots[load.adapter])
        keys = {self._block_size: chain.block_keys(prompt, self._block_size)}
        packed = chain.pack(prompt)
        router = self._routers[next(self._turn) % len(self._routers)]
        sample = Sample(load.index, self._clock.time, key=load.key)
        self.num_begun += 1
        self.sent.append(sample)
        prompts = (num_prompt, prompt, keys, packed)
        SimulatedClient(router, request_id, load, *prompts, sample, self._on_end, self._is_chat).send()

    def _on_end(self, client: SimulatedClient) -> None:
        self.samples.append(client.sample)
        self.num_ended += 1
        index = client.load.index
        if client.state is not None:
            self.stamps[index] = client.state.timeline.stamps
        if client.state is not None and index in self._has_next:
            self._prompts[index] = client.prompt + token_array(client.state.emitted)
        for load in self._next_turns.pop(index, ()):
            if client.sample.ok:
                self._clock.at(max(self._clock.time + self._think_s, load.at or 0.0), self._sender(load))
            else:
                self._fail(load)

    def _fail(self, load: Load) -> None:
        """Count a turn whose conversation has ended, and those after it, as failed."""
        now = self._clock.time
        self.samples.append(
            Sample(load.index, now, sent=now, ended=now, error="the previous turn failed", key=load.key)
        )
        self.num_begun += 1
        self.num_ended += 1
        for later in self._next_turns.pop(load.index, ()):
            self._fail(later)
