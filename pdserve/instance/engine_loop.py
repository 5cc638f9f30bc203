"""One instance: a model, a pool, a connector, and the engine thread's loop around them.

Whatever happens elsewhere (frames from routers, finished transfers) reaches the engine thread as a callable in its inbox;
between two steps it runs them all. News for the routers leaves as one frame per step and router. Every instance can do
every phase; its role only tells routers what to ask of it.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from pdserve.config import InstanceConfig, parse_size
from pdserve.costs import Meter
from pdserve.counters import series
from pdserve.decode.decoder import Decoder
from pdserve.decode.layout_converter import LayoutConverter
from pdserve.engine.engine import Engine, StepResult
from pdserve.engine.warm_up import time_swaps, warm_up
from pdserve.errors import RequestError
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.staging import attach_pool
from pdserve.lifetime import RELEASED
from pdserve.prefill.prefiller import Prefiller
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.roles.fetcher import Fetcher
from pdserve.roles.job import Job
from pdserve.roles.transfers import Transfers

log = logging.getLogger(__name__)
T = TypeVar("T")
LOAD_INTERVAL_S = 0.1  # between two snapshots of the load while steps follow each other
COSTS_INTERVAL_S = 1.0  # between two fits of the cost models
CHECK_INTERVAL_S = 1.0  # between two looks at the whole pool
INFLIGHT_BYTES = 512 << 20
LOAD_FIELDS = tuple(pb.Load.DESCRIPTOR.fields_by_name)
Send = Callable[[str, pb.InstanceFrame], None]


class Instance:
    """`run` is the engine thread; `submit`, `hand_over`, `cancel` and `drop_link` may be called from any thread.

    Args:
        send: called on the engine thread with (link, frame); must not block.
        connector: instead of the one that `config.connector` names.
    """

    def __init__(self, config: InstanceConfig, send: Send, connector: Connector | None = None) -> None:
        self.engine = Engine(config)
        pool = self.engine.runner.pool_NL2GBD
        self.connector = attach_pool(connector or connect(config.connector), pool, self.engine.layout)
        self.transfers = Transfers(
            self.engine.pool, self.connector, self, _max_blocks(config, self.engine), self.engine.layout.block_bytes
        )
        self.fetcher = fetcher = Fetcher(self.engine, self.connector, self.transfers, self)
        self.prefiller = Prefiller(self.engine, self.transfers, fetcher, self, config.lease_seconds)
        self.layout_converter = LayoutConverter(
            pool, self.engine.layout, config.connector if config.convert_kv else None
        )
        self.decoder = Decoder(self.engine, self.connector, self.transfers, fetcher, self, config.store_generated)
        self.meter = Meter()
        for work, seconds in warm_up(self.engine):
            self.meter.knew(work, seconds)
        for blocks, seconds in time_swaps(self.engine):
            self.meter.knew_swap(blocks, seconds)
        self.engine.scheduler.fetches = not self.connector.in_place
        self._costs, self._costs_published = pb.Costs(), 0.0
        self.news = KVEventPublisher()
        self.engine.pool.on_change = self.news.changed
        self.load = pb.Heartbeat()
        self._left: dict[str, list[pb.Load]] = {}
        self._send = send
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.engine.when_ready = lambda: self._inbox.put(lambda: None)
        self._jobs: dict[tuple[str, str], Job] = {}
        self._by_sequence: dict[object, Job] = {}  # also those whose id was used again while their stores went on
        self._outgoing: dict[Job, None] = {}
        self._counts: dict[str, float] = {}
        self._stopping = False
        self._load_published = 0.0
        self._checked = 0.0
        self._publish_load()

    # ---- from other threads -----------------------------------------------------------------------------------

    def submit(self, link: str, message: pb.Submit) -> None:
        self._inbox.put(lambda: self._submit(link, message))

    def hand_over(self, link: str, message: pb.HandOver) -> None:
        self._inbox.put(lambda: self._with_job(link, message.request_id, lambda j: self.decoder.hand_over(j, message)))

    def cancel(self, link: str, request_id: str) -> None:
        self._inbox.put(lambda: self._with_job(link, request_id, self._cancel))

    def drop_link(self, link: str) -> None:
        """The router is gone: nobody wants the output of its requests any more."""
        self._inbox.put(lambda: self._cancel_all(link))

    def note(self, name: str) -> None:
        """Counts something that has happened outside of the engine thread."""
        self._inbox.put(lambda: self.count(name, 1))

    def others(self, link: str) -> pb.Load:
        """What is left to do for all routers but one."""
        others = [load for other, loads in self._left.items() if other != link for load in loads]
        return pb.Load(**{field: sum(getattr(load, field) for load in others) for field in LOAD_FIELDS})

    @property
    def num_jobs(self) -> int:
        """Requests of which something is left here or not told yet, and transfers that outlive theirs."""
        return max(len(self._by_sequence) + len(self._outgoing), self.transfers.num_holding)

    def caught_up(self) -> "Future[None]":
        """Done once the engine thread knows all that came before this call."""
        future: Future[None] = Future()
        self._inbox.put(lambda: future.set_result(None))
        return future

    def stop(self) -> None:
        """Makes `run` return after the current step, with every transfer finished."""
        self._inbox.put(lambda: setattr(self, "_stopping", True))

    # ---- the engine thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        idle = True
        while not self._stopping:
            idle = self.turn(wait=idle)
        for job in list(self._by_sequence.values()):
            self._cancel(job)
        self.layout_converter.close()
        self.connector.close()

    def turn(self, *, wait: bool) -> bool:
        """Everything in the inbox (waiting for something to be there if asked to), one step, and the news of both.

        Returns:
            Whether there was nothing to compute: then only what comes into the inbox can change that.
        """
        self._run_inbox(wait)
        self.decoder.reserve()
        started = self.now()
        result = self.engine.step(hold_back=self.transfers.stores_wait)
        stopped = self.now()
        for seq in result.returned:
            job = self._by_sequence[seq]
            self._role(job).returned(job)
        for seq in result.advanced:
            job = self._by_sequence[seq]
            if seq.constraint is not None and seq.constraint.failure is not None:
                self._refuse(job.link, seq.request_id, seq.constraint.failure)
                self._cancel(job)
                continue
            self._role(job).advanced(job, seq in result.sampled, started)
        if result.advanced:
            self.count("engine_steps", 1)
        if result.held_back:
            self.count("prefill_steps_held_back", 1)
        self._measured(result, stopped - started - result.swap_seconds, stopped)
        self._flush()
        if not self.num_jobs:
            self._check_idle(started)
        if result.idle or started - self._load_published > LOAD_INTERVAL_S:
            self._load_published = started
            self._publish_load()
        return result.idle

    def _role(self, job: Job) -> Prefiller | Decoder:
        return self.prefiller if job.phase == pb.PREFILL else self.decoder

    def _measured(self, result: StepResult, seconds: float, now: float) -> None:
        self.meter.stepped(result.work, bool(result.sampled), seconds, now)
        for direction, blocks in (("out", result.swapped_out), ("in", result.swapped_in)):
            if blocks:
                self.meter.swapped(blocks, result.swap_seconds, now)
                self.count("swapped_blocks", blocks, direction=direction)

    def _check_idle(self, now: float) -> None:
        """With nothing to do, every block must be back. A leak ends the instance rather than starving it slowly."""
        assert self.engine.pool.num_held == 0, f"{self.engine.pool.num_held} blocks are held by nobody"
        host = self.engine.scheduler.host
        assert host is None or host.num_held == 0, "places in host memory are held by nobody"
        if now - self._checked > CHECK_INTERVAL_S:
            self._checked = now
            self.engine.pool.check_integrity()
            self.count("integrity_checks", 1)

    def _run_inbox(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _submit(self, link: str, message: pb.Submit) -> None:
        sampling = SamplingParams(
            max_tokens=message.sampling.max_tokens,
            min_tokens=message.sampling.min_tokens,
            temperature=message.sampling.temperature,
            top_k=message.sampling.top_k,
            top_p=message.sampling.top_p,
            min_p=message.sampling.min_p,
            seed=message.sampling.seed,
            stop_token_ids=tuple(message.sampling.stop_token_ids),
            ignore_eos=message.sampling.ignore_eos,
            logprobs=message.sampling.logprobs if message.sampling.HasField("logprobs") else None,
            logit_bias=dict(message.sampling.logit_bias),
            grammar=message.sampling.grammar,
            frequency_penalty=message.sampling.frequency_penalty,
            presence_penalty=message.sampling.presence_penalty,
            repetition_penalty=message.sampling.repetition_penalty or 1.0,
        )
        try:
            seq = self.engine.new_sequence(
                message.request_id, list(message.prompt), sampling, message.salt, message.output, message.priority
            )
            converted = self.layout_converter.prompt(seq, message.writer) if message.HasField("writer") else None
        except ValueError as error:
            self._refuse(link, message.request_id, RequestError(str(error), kind="rejected"))
            return
        job = Job(link=link, seq=seq, phase=message.phase, multi_turn=message.multi_turn, whole=message.whole)
        self._jobs[link, message.request_id] = self._by_sequence[seq] = job
        if job.phase == pb.PREFILL:
            self.prefiller.submit(job)
        else:
            self.decoder.submit(job, converted)

    def _refuse(self, link: str, request_id: str, error: RequestError) -> None:
        refusal = pb.Output(request_id=request_id, error=pb.Error(kind=error.kind, message=str(error)))
        self._send(link, pb.InstanceFrame(step=pb.Step(outputs=[refusal])))

    def _with_job(self, link: str, request_id: str, then: Callable[[Job], None]) -> None:
        job = self._jobs.get((link, request_id))
        if job is not None:
            then(job)

    def _cancel(self, job: Job) -> None:
        job.output, job.cut_short = None, True
        self._role(job).cancel(job)
        self.transfers.drop(job)

    def _cancel_all(self, link: str) -> None:
        for job in list(self._by_sequence.values()):
            if job.link == link:
                self._cancel(job)

    def _flush(self) -> None:
        """Sends what happened since the last frame, one frame per router."""
        frames: dict[str, pb.InstanceFrame] = {}
        now = self.now()
        for job in [*self._by_sequence.values(), *self._outgoing]:
            if job.output is not None and job.urgent:
                for stamp in job.output.stamps:
                    stamp.seconds = now - stamp.seconds
                frames.setdefault(job.link, pb.InstanceFrame()).step.outputs.append(job.output)
                job.output, job.urgent = None, False
        for link, frame in frames.items():
            self._send(link, frame)
        self._outgoing.clear()

    def _publish_load(self) -> None:
        """Replaces the snapshots that heartbeats carry. Attribute assignment is atomic; nobody changes a snapshot."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        waiting = len(scheduler.waiting) + self.decoder.num_waiting
        load = pb.Heartbeat(
            waiting=waiting,
            running=len(self._by_sequence) - waiting,
            free_blocks=pool.num_free,
            counters=self._counts | self._measure(),
        )
        if self.now() - self._costs_published > COSTS_INTERVAL_S:
            self._costs_published, costs = self.now(), self.meter.costs(self.now())
            self.engine.scheduler.costs = costs
            self._costs = pb.Costs(prefill=costs.prefill, decode=costs.decode, transfer=costs.transfer)
        load.costs.CopyFrom(self._costs)
        load.counters["num_requests_waiting"] = load.waiting
        load.counters["num_requests_running"] = load.running
        self.load = load
        left: dict[str, list[pb.Load]] = {}
        for job in self._by_sequence.values():
            if not job.over:
                left.setdefault(job.link, []).append(job.left())
        self._left = left

    def _measure(self) -> dict[str, float]:
        scheduler, pool, stats = self.engine.scheduler, self.engine.pool, self.connector.stats()
        measured: dict[str, float] = {
            "prefix_cache_queries": scheduler.prefix_queries,
            "prefix_cache_hits": scheduler.prefix_hits,
            "num_preemptions": scheduler.num_preemptions,
            "kv_cache_blocks": pool.num_blocks,
            "kv_cache_blocks_held": pool.num_held,
            "kv_cache_usage_perc": pool.num_held / pool.num_blocks,
        }
        block_bytes = self.engine.layout.block_bytes
        measured["kv_transfer_bytes_in_flight"] = self.transfers.in_flight * block_bytes
        measured["kv_transfer_bytes_waiting"] = self.transfers.waiting * block_bytes
        scheme = self.connector.scheme
        parts = {scheme: stats, **stats.parts}
        if (converted := self.layout_converter.stats()) is not None:
            parts[f"{scheme}/converted"] = converted
        for name, one in parts.items():
            for direction in ("store", "load"):
                labels = {"connector": name, "direction": direction}
                measured[series("kv_transfer_bytes", **labels)] = one.bytes[direction]
                measured[series("kv_transfer_seconds", **labels)] = one.seconds[direction]
                measured[series("kv_transfer_blocks", **labels)] = one.blocks[direction]
            for (direction, outcome), blocks in one.failures.items():
                labels = {"connector": name, "direction": direction, "kind": outcome.value}
                measured[series("kv_transfer_failures", **labels)] = blocks
        return measured

    # ---- what the roles need (pdserve.roles.job.Desk) ---------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def when_done(self, future: Future[T], then: Callable[[T], None]) -> None:
        future.add_done_callback(lambda done: self._inbox.put(lambda: then(done.result())))

    def moved(self, blocks: int, seconds: float) -> None:
        if blocks:
            self.meter.moved(blocks * self.engine.layout.block_bytes, seconds, self.now())

    def close_job(self, job: Job) -> None:
        del self._by_sequence[job.seq]
        name = job.link, job.seq.request_id
        if self._jobs.get(name) is job:
            del self._jobs[name]
        if job.cut_short:
            job.pending_output().stamps.add(stage=RELEASED, seconds=self.now())
        self._outgoing[job] = None

    def count_sources(self, job: Job) -> None:
        for source, tokens in job.sources().items():
            self.count("prompt_tokens_by_source", tokens, source=source)

    def count(self, name: str, value: float, **labels: str) -> None:
        key = series(name, **labels)
        self._counts[key] = self._counts.get(key, 0) + value


def _max_blocks(config: InstanceConfig, engine: Engine) -> int:
    """Blocks that may be in flight: what was asked for, or enough that stores of one step go on during the next."""
    if config.max_inflight_bytes is not None:
        return max(1, parse_size(config.max_inflight_bytes) // engine.layout.block_bytes)
    two_steps = 2 * -(-config.max_num_batched_tokens // config.block_size)
    return max(1, min(engine.pool.num_blocks // 2, max(two_steps, INFLIGHT_BYTES // engine.layout.block_bytes)))
