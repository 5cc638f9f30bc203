"""Engine thread of an instance: owns the engine, the pool, the connector and both roles, and runs the step loop.

Other threads (router links, finished transfers) pass work to the engine thread as callables in its inbox, which it runs
between two steps. Outputs leave as one frame per step and router. Every instance can execute every phase; its role only
tells routers which requests to send.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from msgspec import Raw

from pdserve import plugins
from pdserve.config import InstanceConfig, parse_size
from pdserve.control.frame_connection import MAX_FRAME_BYTES
from pdserve.decode.decoder import Decoder
from pdserve.decode.layout_converter import LayoutConverter
from pdserve.engine.engine import Engine
from pdserve.engine.paced_runner import PacedRunner
from pdserve.engine.step import Accepted
from pdserve.errors import RequestError
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.kv_events_config import KVEventsConfig
from pdserve.instance.reporter import Reporter
from pdserve.keys import root_key, unpack_tokens
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.grouped import attach_groups
from pdserve.kv_transfer.guarded import guard
from pdserve.kv_transfer.registry import connect
from pdserve.lifetime import RELEASED
from pdserve.output import Output, pack
from pdserve.prefill.prefiller import Prefiller
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request
from pdserve.roles.job import Job, failure
from pdserve.roles.transfers import Fetcher, Transfers

if TYPE_CHECKING:
    from pdserve.engine.model_runner import ModelRunner
    from pdserve.interop.zmq_publisher import ZmqPublisher
    from pdserve.ranks.leader import Ranks

log = logging.getLogger(__name__)
HEARTBEAT_UPDATE_S = 0.1  # between two updates of the heartbeat while the engine is busy
IDLE_HEARTBEAT_UPDATE_S = 1.0  # the same while it waits: stores work in the background, hang, and come back
PROBE_S = 5.0  # between two probes of KV stores that are out
INTEGRITY_CHECK_S = 1.0  # between two checks of the whole pool while idle
DEFAULT_INFLIGHT_BYTES = 512 << 20
LARGE_FRAME_BYTES = 1 << 20  # to which outputs with log probabilities are collected
Send = Callable[[str, pb.InstanceFrame], None]


class Instance:
    """One instance. `run` is the body of the engine thread.

    The methods of the first section may be called from any thread, all others only on the engine thread. A `link` is the
    name of the connection over which a router sent a request; its outputs go back over the same connection.

    Args:
        send: called on the engine thread with (link, frame); must not block.
        connector: replaces the connector that `config.connector` names.
        runner: of the model that `config` names, or in its stead.
        ranks: the other ranks of `runner`, if it has any.
        inbox: replaces the queue of work for the engine thread.
        now: monotonic clock in seconds.

    Attributes:
        kv_events: changes of the pool's block keys, which the router links send on.
        reporter: counters, heartbeat and costs.
        on_adapters_changed: called on the engine thread with the adapters that are here from now on.
    """

    on_adapters_changed: "Callable[[list[pb.Adapter]], object]" = staticmethod(lambda adapters: None)

    def __init__(
        self,
        config: InstanceConfig,
        send: Send,
        connector: Connector | None = None,
        *,
        runner: "PacedRunner | ModelRunner | None" = None,
        ranks: "Ranks | None" = None,
        inbox: "SimpleQueue[Callable[[], None]] | None" = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox or SimpleQueue[Callable[[], None]]()
        self.post = self._inbox.put
        self._send = send
        self.now = now
        self.kv_events = KVEventPublisher()
        connector = connector or connect(config.connector)
        self.engine = Engine(
            config,
            runner=runner,
            refetch_preempted=not connector.in_place,
            on_grammar_ready=lambda: self._inbox.put(lambda: None),
        )
        self.engine.pool.listeners.append(self.kv_events)  # before the warm-up, which changes keys too
        kv = self.engine.runner.kv
        self._ranks = ranks
        self.connector = self._attach(connector, config.connector)
        group_bytes = [group.block_bytes for group in self.engine.layout.groups]
        most = _max_blocks(config, self.engine)
        self.transfers = Transfers(self.engine.pool, self.connector, self, most, group_bytes)
        self.fetcher = fetcher = Fetcher(self.engine, self.connector, self.transfers, self)
        self.prefiller = Prefiller(self.engine, self.transfers, fetcher, self, config.lease_seconds)
        converts = config.convert_kv or config.allow_inexact
        on_all_ranks = None if ranks is None else ranks.loader
        self.layout_converter = LayoutConverter(
            kv.pool_NX,
            self.engine.layout,
            config.connector if converts else None,
            on_all_ranks,
            kv.copies if kv.pool_NX.device.type == "cuda" else None,
        )
        self.decoder = Decoder(
            self.engine, self.connector, self.transfers, fetcher, self, config.store_generated, config.lease_seconds
        )
        self.reporter = Reporter(self.engine, self.connector, self.transfers, self.layout_converter, now)
        # With `now` and `close_job`, what the roles call: `InstanceContext`.
        self.count, self.record_transfer = self.reporter.count, self.reporter.meter.record_transfer
        self._roles: dict[int, Prefiller | Decoder] = {
            pb.PREFILL: self.prefiller,
            pb.DECODE: self.decoder,
            pb.BOTH: self.decoder,
        }
        self._jobs: dict[tuple[str, str], Job] = {}
        # Also holds jobs with unfinished stores whose request id has been used again since.
        self._by_sequence: dict[object, Job] = {}
        self._closed_jobs: dict[Job, None] = {}  # whose last output has not been sent
        # Those that wait for the slots of their adapters before their roles get them, each with the other choices.
        self._slotless: dict[Job, list[Job]] = {}
        self._has_unsent = False
        self._event_publisher: ZmqPublisher | None = None
        self._should_stop = False
        self._turn_began_at = now()
        self._heartbeat_updated_at = 0.0
        self._integrity_checked_at = 0.0
        self._stores_probed_at = 0.0

    @classmethod
    def start(cls, config: InstanceConfig, send: Send) -> "Instance":
        """Return an instance with the runner that its settings ask for: paced, on one device, or on several.

        Raises:
            SetupError: the model, its devices or the connector are unavailable.
        """
        if config.paced:
            return cls(config, send, runner=PacedRunner.load(config))
        if config.tensor_parallel_size == 1:
            return cls(config, send)
        runner, ranks = plugins.extension("ranks")(config)
        return cls(config, send, runner=runner, ranks=ranks)

    def publish_events(self, config: KVEventsConfig) -> None:
        """Publish KV events over ZMQ from now on. To be called before the engine thread starts.

        Raises:
            SetupError: an endpoint is invalid or in use.
        """
        pool = self.engine.pool
        publisher: ZmqPublisher = plugins.extension("instance-kv-events")(
            config,
            pool.block_size,
            root_key(model_digest=self.engine.layout.model_digest),
            lambda: self.count("kv_event_batches_dropped", 1),
            [group.window for group in pool.groups],
        )
        self.transfers.listener = self._event_publisher = publisher
        pool.listeners.append(publisher)

    def close(self) -> None:
        """Close what has sockets or threads. The engine must not run any more."""
        if self._event_publisher is not None:
            self._event_publisher.close()
        self.layout_converter.close()
        self.connector.close()
        if self._ranks is not None:
            self._ranks.close()

    # ---- thread-safe ------------------------------------------------------------------------------------------

    def submit(self, link: str, message: pb.Submit) -> None:
        """Start a request. An invalid one is answered with an error output."""
        self._inbox.put(partial(self._submit, link, message))

    def hand_over(self, link: str, message: pb.HandOver) -> None:
        """Pass the progress of prefill to the decode role. Ignored if the request has ended."""
        self._inbox.put(partial(self._hand_over, link, message))

    def cancel(self, link: str, request_id: str) -> None:
        """Cancel a request. If it has ended, nothing but its leases can."""
        self._inbox.put(partial(self._cancel_by_id, link, request_id))

    def reset_cache(self, epoch: int) -> None:
        """Forget the KV that is cached, unless that was done for this epoch or a later one. Running requests go on."""
        self._inbox.put(lambda: self._reset_cache(epoch))

    def change_adapter(self, link: str, order: pb.ChangeAdapter) -> None:
        """Load or unload an adapter, and answer with the outcome."""
        self._inbox.put(partial(self._change_adapter, link, order))

    def drop_link(self, link: str) -> None:
        """Cancel all requests of a router that has disconnected."""
        self._inbox.put(lambda: self._cancel_all(link))

    def count_threadsafe(self, name: str) -> None:
        """Increment a counter from another thread."""
        self._inbox.put(lambda: self.count(name, 1))

    @property
    def seconds_in_turn(self) -> float:
        """Seconds since the engine thread began its current turn, which is a step, or up to a second of waiting."""
        return self.now() - self._turn_began_at

    @property
    def num_jobs(self) -> int:
        """Requests with resources or unsent outputs here, or transfers that still hold blocks, if these are more."""
        return max(len(self._by_sequence) + len(self._closed_jobs), self.transfers.num_holding)

    def drain_inbox(self) -> "Future[None]":
        """Return a future that resolves once the engine thread has handled everything queued before this call."""
        future: Future[None] = Future()
        self._inbox.put(lambda: future.set_result(None))
        return future

    def announce_failure(self) -> None:
        """Tell all routers with requests here that the engine has failed. Only to be called once `run` has raised."""
        for link in {job.link for job in self._by_sequence.values()}:
            self._send(link, pb.InstanceFrame(failed=pb.Failed()))

    def stop(self) -> None:
        """Make `run` return after the current step, once every transfer has finished."""
        self._inbox.put(lambda: setattr(self, "_should_stop", True))

    # ---- the engine thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps until stopped, then cancel all requests and close the connectors. Blocks while the engine is idle."""
        idle = True
        while not self._should_stop:
            idle = self.run_once(wait=idle)
        for job in list(self._by_sequence.values()):
            self._cancel(job)
        self.close()

    def run_once(self, *, wait: bool) -> bool:
        """Handle the inbox, reserve blocks, run one engine step, pass its results to the roles, and send all outputs.

        Args:
            wait: block until the inbox has an entry, or the heartbeat needs an update.

        Returns:
            Whether the engine was idle and all outputs are sent. Then only a new inbox entry can give it work.
        """
        try:
            if wait:
                self._inbox.get(timeout=IDLE_HEARTBEAT_UPDATE_S)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass
        if self.decoder.unreserved or self.decoder.cramped:
            self.decoder.reserve()
            self.decoder.prolong_leases()
        if self._slotless:
            self._start_slotless()
        started = self._turn_began_at = self.now()
        result = self.engine.step(pause_storing=self.transfers.has_waiting_stores)
        stopped, generated = self.now(), 0
        for seq in result.schedule.resumed:
            job = self._by_sequence[seq]
            self._roles[job.phase].on_resumed(job)
        for seq in result.advanced:
            job = self._by_sequence[seq]
            accepted = result.outcome.get(seq) or Accepted()
            if fault := seq.output.fault:
                self._fail(job, accepted, fault, started)
                continue
            self._roles[job.phase].on_step(job, accepted, started)
            generated += len(accepted.tokens)
        if generated:
            self.count("generation_tokens", generated)
        if self.engine.constrained:
            self.engine.ask_for_masks()  # they are computed while outputs are sent
        if self._event_publisher is not None:
            self._event_publisher.flush()
        self.send_outputs()
        if not self.num_jobs:
            self._check_idle(started)
        self.reporter.record_step(result, stopped - started - result.swap_seconds, stopped)
        if result.idle or started - self._heartbeat_updated_at > HEARTBEAT_UPDATE_S:
            self._heartbeat_updated_at = started
            now = self.now()
            if now - self._stores_probed_at > PROBE_S:
                self._stores_probed_at = now
                self.transfers.probe()
                self.layout_converter.probe()
            queued = {seq.group.root if seq.group else seq for seq in self.engine.scheduler.waiting}  # all beams, once
            waiting = len(queued) + len(self.decoder.waiting) + len(self._slotless)
            self.reporter.update(self._by_sequence.values(), waiting, now)
        return result.idle and not self._has_unsent

    def _check_idle(self, now: float) -> None:
        """Assert that an idle instance holds no block. A leak ends the process instead of slowly starving it."""
        pool = self.engine.pool
        assert pool.num_held == 0, f"{pool.num_held} blocks are leaked"
        assert pool.num_promised == 0, f"{pool.num_promised} blocks are still promised, and no sequence is left"
        host = self.engine.scheduler.swap_space.pool
        assert host is None or host.num_held == 0, f"{host.num_held} blocks of host memory are leaked"
        if now - self._integrity_checked_at > INTEGRITY_CHECK_S:
            self._integrity_checked_at = now
            pool.check_integrity()
            self.count("integrity_checks", 1)

    def _submit(self, link: str, message: pb.Submit) -> None:
        try:
            request = Request.unpack(message.request)
            sampling = request.sampling
            if message.phase not in self._roles:
                raise ValueError(f"there is no phase {message.phase}")
            if sampling.beam_width and message.phase != pb.PREFILL:
                length = len(request.prompt) + sampling.max_tokens
                if reason := self.engine.beams_fault(length, sampling.beam_width):
                    raise RequestError(reason, kind="beams_do_not_fit")
            seq = self.engine.new_sequence(
                message.request_id,
                request,
                message.output,
                prediction=unpack_tokens(message.prediction) if message.prediction else None,
                leaves_nothing=message.leaves_nothing,
            )
            converted = self.layout_converter.open_prompt(seq, message.writer) if message.HasField("writer") else None
        except (ValueError, RequestError) as error:
            refusal = error if isinstance(error, RequestError) else RequestError(str(error), kind="rejected")
            for request_id in (message.request_id, *(member.request_id for member in message.members)):
                self._reject(link, request_id, refusal)
            return
        new_job = partial(Job, link=link, phase=message.phase, multi_turn=request.multi_turn, whole=request.whole)
        job, others = new_job(seq=seq, pin=request.pin), []
        if message.members:
            siblings = self.engine.new_siblings(seq, [(member.request_id, member.seed) for member in message.members])
            others = [new_job(seq=one, leader=job) for one in siblings]
        for one in (job, *others):
            self._jobs[link, one.seq.request_id] = self._by_sequence[one.seq] = one
        if seq.adapter is not None and job.phase != pb.DECODE:  # decode asks for the slot when there is KV to load
            self._slotless[job] = others
            self._start_slotless()
        elif job.phase == pb.PREFILL:
            self.prefiller.submit(job, others)
        else:
            self.decoder.submit(job, converted, others)

    def _start_slotless(self) -> None:
        """Give the jobs whose adapters have got slots to their roles."""
        adapters = self.engine.adapters
        assert adapters is not None
        for job, others in [*self._slotless.items()]:
            if adapters.acquire(job.seq, *(other.seq for other in others)):
                del self._slotless[job]
                self._roles[job.phase].submit(job, others=others)

    def _cancel_slotless(self, job: Job) -> bool:
        """End a job that waits for the slot of its adapter; return False if it does not. Others of its prompt wait on."""
        for first, others in self._slotless.items():
            if job is first or job in others:
                del self._slotless[first]
                if rest := [one for one in (first, *others) if one is not job]:
                    self._slotless[rest[0]] = rest[1:]
                self.close_job(job)
                return True
        return False

    def _fail(self, job: Job, accepted: Accepted, fault: RequestError, started: float) -> None:
        """End a request that a step could not continue, behind the tokens before that: the last one counts for nothing."""
        del accepted.tokens[-1:], accepted.logprobs[-1:]
        accepted.finish_reason = None
        if accepted.tokens:
            self._roles[job.phase].on_step(job, accepted, started)
            self.send_outputs()
        self._reject(job.link, job.seq.request_id, fault)
        self._cancel(job)

    def _reject(self, link: str, request_id: str, error: RequestError) -> None:
        self._send(link, pb.InstanceFrame(outputs=pack([Output(request_id=request_id, error=failure(error))])))

    def _hand_over(self, link: str, message: pb.HandOver) -> None:
        if (job := self._jobs.get((link, message.request_id))) is None:
            self.decoder.hand_over_late(link, message)
        elif message.first_token >= (vocab_size := self.engine.checkpoint.vocab_size):
            error = RequestError(f"token ids go from 0 to {vocab_size - 1}", kind="rejected")
            self._reject(link, message.request_id, error)
            self._cancel(job)
        else:
            self.decoder.hand_over(job, message)

    def _reset_cache(self, epoch: int) -> None:
        if epoch > self.reporter.cache_epoch:
            self.reporter.cache_epoch = epoch
            self.engine.pool.reset()
            for job in self._by_sequence.values():
                job.pin = False

    def _change_adapter(self, link: str, order: pb.ChangeAdapter) -> None:
        def answer(error: str) -> None:
            if not error and not order.offers and adapters is not None:
                self.on_adapters_changed(adapters.listing())
            changed = pb.AdapterChanged(number=order.number, error=error)
            self._send(link, pb.InstanceFrame(adapter_changed=changed))

        adapters = self.engine.adapters
        if adapters is None:
            answer("this instance loads no adapters at run time; start it with --lora-folder")
        else:
            adapters.change(order, self, answer)

    def _cancel_by_id(self, link: str, request_id: str) -> None:
        if (job := self._jobs.get((link, request_id))) is None:
            self.prefiller.cancel_late(link, request_id)
        else:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        job.mark_cancelled()
        if not (self._slotless and self._cancel_slotless(job)):
            self._roles[job.phase].cancel(job)

    def _cancel_all(self, link: str) -> None:
        for job in list(self._by_sequence.values()):
            if job.link == link:
                self._cancel(job)

    def send_outputs(self) -> None:
        """Send all urgent outputs, one frame per router, or several if they are large."""
        frames: dict[str, list[Output | Raw]] = {}
        sizes: dict[str, int] = {}
        now = self.now()
        for job in [*self._by_sequence.values(), *self._closed_jobs]:
            if (output := job.take_output()) is None:
                continue
            for stage, at in output.stamps.items():
                output.stamps[stage] = now - at
            packed: Output | Raw = output
            if job.seq.features:  # else it has tokens only
                packed = Raw(pack(output))
                size = len(packed)
                if size > MAX_FRAME_BYTES // 2:
                    packed = self._refuse_output(job, size)
                sizes[job.link] = sizes.get(job.link, 0) + size
                if sizes[job.link] > LARGE_FRAME_BYTES and job.link in frames:
                    self._send(job.link, pb.InstanceFrame(outputs=pack(frames.pop(job.link))))
                    sizes[job.link] = size
            frames.setdefault(job.link, []).append(packed)
        for link, outputs in frames.items():
            self._send(link, pb.InstanceFrame(outputs=pack(outputs)))
        self._has_unsent = False
        for job in [*self._by_sequence.values(), *self._closed_jobs]:
            if job.urgent and job.output is not None:  # it waits for pieces of a prompt's log probabilities
                self._has_unsent = True
            else:
                self._closed_jobs.pop(job, None)

    def _refuse_output(self, job: Job, size: int) -> Output:
        """End a request whose output no frame can hold, and return the error in its place."""
        if not job.ended:
            self._cancel(job)
        error = RequestError(f"the answer takes {size} bytes at once, more than a frame holds", kind="answer_too_large")
        return Output(request_id=job.seq.request_id, error=failure(error))

    def _attach(self, connector: Connector, url: str) -> Connector:
        own = attach_groups(connector, partial(connect, url), self.engine.runner.kv, self.engine.layout)
        attached = own
        if self._ranks is not None:
            attached = self._ranks.connector(own)
        attached.has_started_out = own.has_started_out
        return guard(attached, self._inbox.put, self.now)

    def close_job(self, job: Job) -> None:
        del self._by_sequence[job.seq]
        if job.seq.adapter is not None and self.engine.adapters is not None:
            self.engine.adapters.release(job.seq)
        if job.pin:
            pool, kv = self.engine.pool, job.seq.kv
            pool.pin(kv.full_keys()[: kv.num_initial // kv.block_size])
            log.info("%d blocks are pinned for warm prompts, of at most %d", len(pool.pinned), pool.max_pinned)
        key = job.link, job.seq.request_id
        if self._jobs.get(key) is job:
            del self._jobs[key]
        if job.cancelled:
            job.pending_output().stamps[RELEASED] = self.now()
        self._closed_jobs[job] = None


def _max_blocks(config: InstanceConfig, engine: Engine) -> int:
    """Return the limit of blocks in flight: the configured one, or enough for the stores of two steps to overlap."""
    if config.max_inflight_bytes is not None:
        return max(1, parse_size(config.max_inflight_bytes) // engine.layout.block_bytes)
    two_steps = 2 * -(-config.max_num_batched_tokens // config.block_size)
    return max(1, min(engine.pool.num_blocks // 2, max(two_steps, DEFAULT_INFLIGHT_BYTES // engine.layout.block_bytes)))
