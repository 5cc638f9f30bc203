"""Status of an instance: counters, metrics, cost models, the heartbeat, and the work that its requests still need."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache

from pdserve.costs import CostMeter, Work
from pdserve.counters import series
from pdserve.decode.layout_converter import LayoutConverter
from pdserve.engine.engine import Engine, StepResult
from pdserve.engine.warm_up import measure_swaps, warm_up
from pdserve.kv_transfer.connector import Connector, Outcome
from pdserve.profile.drift import ProfileWatch
from pdserve.profile.profile import Profile
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles.job import Job
from pdserve.roles.transfers import Transfers

log = logging.getLogger(__name__)
MAX_KEYS = 256  # API keys of which a heartbeat tells the blocks: those that hold most
COSTS_UPDATE_S = 2.0  # between two fits of the cost models
# Shown from the start, so that the first of them is an increase.
FAILURES = {("store", Outcome.FULL), ("store", Outcome.UNAVAILABLE)} | {
    ("load", outcome) for outcome in (Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE)
}
LOAD_FIELDS = tuple(pb.Load.DESCRIPTOR.fields_by_name)


class Reporter:
    """Collects what an instance reports. Runs on the engine thread, except that any thread may call `other_load`.

    The cost models are calibrated by a warm-up of the engine before this is made.

    Args:
        now: monotonic clock in seconds.

    Attributes:
        heartbeat: the current one. `update` replaces it and never modifies it, so any thread may read it.
        costs_updated_at: when the cost models were fitted, on the clock.
        counts: counters of `pdserve.counters`, by series.
        meter: fits the cost models.
        cache_epoch: of the last reset of the prefix cache.
    """

    def __init__(
        self,
        engine: Engine,
        connector: Connector,
        transfers: Transfers,
        layout_converter: LayoutConverter,
        now: Callable[[], float],
    ) -> None:
        self.costs_updated_at = -math.inf
        self.counts: dict[str, float] = {}
        self.meter = CostMeter()
        self.cache_epoch = 0
        self._engine = engine
        self._connector = connector
        self._transfers = transfers
        self._layout_converter = layout_converter
        self._watch: ProfileWatch | None = None
        self._remaining_load: dict[str, list[pb.Load]] = {}  # by link, one for each request
        made_at = now()
        for work, seconds in warm_up(engine):
            self.meter.calibrate_step(work, seconds)
        for blocks, seconds in measure_swaps(engine):
            self.meter.calibrate_swap(blocks, seconds)
        self.update((), 0, made_at)

    def count(self, name: str, value: float, **labels: str) -> None:
        """Add `value` to a counter of `pdserve.counters`."""
        key = series(name, **labels)
        self.counts[key] = self.counts.get(key, 0) + value

    def watch(self, profile: Profile) -> None:
        """Compare steps with a profile from now on, in a metric and in the log."""
        watch = self._watch = ProfileWatch(profile.step)

        def compare(steps: Sequence[Work], seconds: float) -> None:
            if sentence := watch.observe(steps, seconds):
                log.warning("%s", sentence)

        self.meter.on_steps = compare

    def record_step(self, result: StepResult, seconds: float, now: float) -> None:
        """Add an engine step to the counters and cost models. `seconds` excludes the time for swapping."""
        if result.advanced:
            self.count("engine_steps", 1)
        if result.schedule.storing_paused:
            self.count("prefill_steps_held_back", 1)
        for drafted, accepted in result.drafted:
            self.count("spec_decode_num_drafts", 1)
            self.count("spec_decode_num_draft_tokens", drafted)
            self.count("spec_decode_num_accepted_tokens", accepted)
            for position in range(accepted):
                self.count("spec_decode_num_accepted_tokens_per_pos", 1, position=str(position))
        if result.work:
            seconds -= self._engine.drafter.seconds if self._engine.drafter is not None else 0.0
            # Without tokens, embeddings and candidates of beams are waited for, too.
            is_read = result.num_tokens > 0 or any(seq.features for seq in result.outcome)
            self.meter.record_step(result.work, is_read, seconds, now)
        for direction, pairs in (("out", result.schedule.swap_out), ("in", result.schedule.swap_in)):
            if pairs:
                self.meter.record_swap(len(pairs), result.swap_seconds, now)
                self.count("swapped_blocks", len(pairs), direction=direction)
                self.count("swap_seconds", result.swap_seconds)
        if result.recomputed:
            self.count("recomputed_tokens", result.recomputed)

    def other_load(self, link: str) -> pb.Load:
        """Return the remaining work of the requests of all routers except one."""
        total = dict.fromkeys(LOAD_FIELDS, 0)
        for other, loads in self._remaining_load.items():
            for load in loads if other != link else ():
                for field in LOAD_FIELDS:
                    total[field] += getattr(load, field)
        return pb.Load(**total)

    def update(self, jobs: Collection[Job], num_waiting: int, now: float) -> None:
        """Replace the heartbeat and the remaining load. Attribute assignment is atomic.

        Args:
            num_waiting: jobs that have no blocks yet.
        """
        if now - self.costs_updated_at > COSTS_UPDATE_S:
            self.costs_updated_at = now
            self._engine.scheduler.costs = costs = self.meter.costs(now)
            self._costs = pb.Costs(prefill=costs.prefill, decode=costs.decode, transfer=costs.transfer)
        num_running = len(jobs) - num_waiting
        counters = self.counts | self._metrics()
        counters |= {"num_requests_waiting": num_waiting, "num_requests_running": num_running}
        empty = behind = 0
        of_keys = Counter[int]()
        for job in jobs:
            kv = job.seq.kv
            if job.seq.tenant.id:  # else the router has no keys
                of_keys[job.seq.tenant.id] += len(kv.held_blocks)
            if kv.block_ids and kv.admitted:  # others hold blocks only for KV that is being loaded
                empty += len(kv.block_ids) - -(-kv.num_computed // kv.block_size)
                behind += -kv.num_computed % kv.block_size
        counters |= {"kv_cache_blocks_empty": empty, "kv_cache_slots_behind_kv": behind}
        for number, blocks in of_keys.most_common(MAX_KEYS):
            counters[series("kv_cache_blocks_of_key", key=f"{number:x}")] = blocks
        if self._watch is not None:
            counters |= {series("profile_ratio", phase=phase): ratio for phase, ratio in self._watch.ratios.items()}
        self.heartbeat = pb.Heartbeat(
            waiting=num_waiting,
            running=num_running,
            free_blocks=self._engine.pool.num_free * self._engine.runner.kv.num_blocks // self._engine.pool.num_blocks,
            costs=self._costs,
            counters=counters,
            cache_epoch=self.cache_epoch,
        )
        remaining: dict[str, list[pb.Load]] = {}
        for job in jobs:
            if not job.ended:
                remaining.setdefault(job.link, []).append(job.remaining_load())
        self._remaining_load = remaining

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of pool, scheduler, step pipeline, transfers and each store, by series."""
        scheduler, pool, pipeline = self._engine.scheduler, self._engine.pool, self._engine.runner.pipeline
        stats, block_bytes = self._connector.stats(), self._engine.layout.bytes_on_all_ranks
        metrics: dict[str, float] = {
            "prefix_cache_queries": scheduler.prefix_queries,
            "prefix_cache_hits": scheduler.prefix_hits,
            "num_preemptions": scheduler.num_preemptions,
            "num_pauses": scheduler.num_pauses,
            "grammar_mask_seconds": self._engine.grammars.masks.cpu_s,
            "grammar_masks_late": self._engine.num_late,
            "grammars_given_up": self._engine.grammars.masks.num_given_up,
            "grammar_workers_lost": self._engine.grammars.compiler.num_workers_lost,
            "kv_cache_blocks": pool.num_blocks,
            "kv_cache_blocks_held": pool.num_held,
            "kv_cache_blocks_promised": pool.num_promised,
            "kv_cache_blocks_shared": pool.num_shared,
            "kv_cache_blocks_pinned": len(pool.pinned),
            "kv_cache_usage_perc": pool.num_held / pool.num_blocks,
            "kv_transfer_bytes_in_flight": self._transfers.in_flight * block_bytes,
            "kv_transfer_bytes_waiting": self._transfers.waiting * block_bytes,
        }
        if pipeline is not None:
            metrics["steps_launched_ahead"] = pipeline.num_launched
            metrics["rows_launched_in_vain"] = pipeline.num_dropped_rows
        if self._engine.drafter is not None:
            metrics.update(self._engine.drafter.counters)
        scheme = self._connector.scheme
        parts = {scheme: stats, **stats.parts}
        if self._layout_converter.loaders:
            parts[f"{scheme}/converted"] = self._layout_converter.stats()
        for name, part in parts.items():
            metrics[series("kv_store_out", connector=name)] = float(part.is_out)
            for direction in ("store", "load"):
                amounts = part.bytes[direction], part.seconds[direction], part.blocks[direction]
                metrics.update(zip(_transfer_series(name, direction), amounts, strict=True))
            for direction, outcome in FAILURES | part.failures.keys():
                labels = {"connector": name, "direction": direction, "kind": outcome.value}
                metrics[series("kv_transfer_failures", **labels)] = part.failures.get((direction, outcome), 0)
        return metrics


@cache
def _transfer_series(connector: str, direction: str) -> list[str]:
    names = ("kv_transfer_bytes", "kv_transfer_seconds", "kv_transfer_blocks")
    return [series(name, connector=connector, direction=direction) for name in names]
