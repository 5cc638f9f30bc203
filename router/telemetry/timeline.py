"""Timelines: the stamps and counts of single requests, served at /debug/requests/{id} and the source of the metrics."""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import asdict

from pdserve.lifetime import TRACE_SPANS, Stage
from pdserve.output import Moved, Predicted
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import Decision, Placement

log = logging.getLogger(__name__)
NOTHING_MOVED = Moved()
NOTHING_DRAFTED = Predicted()
BLOCK = 64  # tokens for which an id in `prompt_ids` stands, unless the pools' blocks are larger
ID_BYTES = 4  # of an id; two ids that are equal by chance do no harm, because prompts are compared from their beginning


@dataclass
class Migration:
    """A move of the request to other instances: its time, the instance that it left, and the reason.

    Attributes:
        pause_s: how long the client waited for the next token, since the one before it or, without one, since the move; None
            until it arrives.
    """

    at: float
    instance: str
    reason: str
    pause_s: float | None = None


@dataclass
class Wait:
    """A wait for an instance, while none was eligible: when it began and, once it has ended, how long it took in seconds."""

    at: float
    seconds: float | None = None


@dataclass
class Timeline:
    """Stamps and counts of one request.

    Attributes:
        traceparent: the client's span; empty if it sent none.
        operation: `chat` or `text_completion`, OpenTelemetry's names.
        max_tokens: the most tokens that the answer may have.
        adapter: its name; empty: there is none.
        stamps: stage → seconds on the router's monotonic clock.
        decisions: (role, decision of its policy), in order; a request that migrates has more than two.
        placement: the instance that computes the prompt, and why.
        migrations: moves to other instances, in order.
        waits: waits for an instance, in order; only the last may be unfinished.
        computed_tokens, local_hit_tokens, loaded_tokens: sources of the prompt's KV on the instance that prefilled it:
            computed, found in its pool, or loaded from the KV store.
        stored, loaded: KV that prefill wrote to the KV store, and KV that decode read from it.
        attempt: number of earlier submissions with this request id, by migrations and by earlier requests with the same id.
        drafted: drafts of the answer, and `predicted` those of them that the client has predicted.
        release_seconds: for a cancelled request: instance id → seconds from its end until the instance had freed all of its
            blocks.
        finish_reason: `stop`, `length`, `cancelled`, `error`, or `refused` (by the SLO admission); empty while it runs.
        prompt_block, prompt_ids: tokens per id, and the ids of the prompt's blocks, as `prompt_ids` packs them.
        itl_p99_s: the gap that 99 % of the gaps between its tokens do not exceed; None before the end, or without gaps.
    """

    request_id: str
    traceparent: str = ""
    operation: str = "text_completion"
    max_tokens: int = 0
    adapter: str = ""
    attempt: int = 0
    stamps: dict[Stage, float] = field(default_factory=dict)
    prefill_instance: str = ""
    decode_instance: str = ""
    decisions: list[tuple[str, Decision]] = field(default_factory=list)
    placement: Placement | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    migrations: list[Migration] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    computed_tokens: int = 0
    local_hit_tokens: int = 0
    loaded_tokens: int = 0
    stored: Moved = NOTHING_MOVED
    loaded: Moved = NOTHING_MOVED
    drafted: Predicted = NOTHING_DRAFTED
    predicted: Predicted = NOTHING_DRAFTED
    release_seconds: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    error: str = ""
    prompt_block: int = 0
    prompt_ids: bytes = b""
    itl_p99_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that did not have to be computed."""
        return self.local_hit_tokens + self.loaded_tokens

    @property
    def submission_id(self) -> str:
        """Request id on the instances. It is new for each attempt: an instance may still run an earlier one."""
        return f"{self.request_id}#{self.attempt}" if self.attempt else self.request_id

    def stamp(self, stage: Stage, at: float) -> None:
        """Record the first stamp of a stage. A `KV_STORED` that is reported late is set back to `KV_READY` at the latest."""
        self.stamps.setdefault(stage, min(at, self.stamps.get(Stage.KV_READY, at)) if stage is Stage.KV_STORED else at)

    def refuse(self, reason: str, at: float) -> None:
        """Record that the request is not admitted."""
        self.stamp(Stage.FINISHED, at)
        self.finish_reason, self.error = "refused", reason

    def span(self, start: Stage, end: Stage) -> float | None:
        """Return the seconds between two stages; None unless both were reached."""
        if start not in self.stamps or end not in self.stamps:
            return None
        return max(0.0, self.stamps[end] - self.stamps[start])

    def parts(self) -> list[tuple[str, str, float, float]]:
        """Return the completed parts of `TRACE_SPANS` as (name, actor, start, end), on the stamps' clock."""
        parts = []
        for name, (actor, start, end) in TRACE_SPANS.items():
            if start in self.stamps and end in self.stamps:
                parts.append((name, actor, self.stamps[start], max(self.stamps[start], self.stamps[end])))
        return parts

    def as_dict(self) -> dict[str, object]:
        """Return the body of /debug/requests/{id}; times are in milliseconds since `received`, stages in order of time."""
        start = min(self.stamps.values(), default=0.0)
        ordered = sorted(self.stamps.items(), key=lambda item: item[1])

        def ms(at: float) -> float:
            return round((at - start) * 1e3, 3)

        return {
            "request_id": self.request_id,
            "traceparent": self.traceparent,
            "adapter": self.adapter,
            "prefill_instance": self.prefill_instance,
            "decode_instance": self.decode_instance,
            "placement": vars(self.placement) if self.placement else None,
            "decisions": [{"role": role, **decision.as_dict()} for role, decision in self.decisions],
            "finish_reason": self.finish_reason,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "migrations": len(self.migrations),
            "moves": [
                {"ms": ms(one.at), "instance": one.instance, "why": one.reason, "pause_s": one.pause_s}
                for one in self.migrations
            ],
            "waits": [{"ms": ms(one.at), "seconds": one.seconds} for one in self.waits],
            "prompt_tokens_by_source": {
                "computed": self.computed_tokens,
                "local_hit": self.local_hit_tokens,
                "loaded": self.loaded_tokens,
            },
            "drafts": asdict(self.drafted),
            "stored": _with_rate(self.stored),
            "loaded": _with_rate(self.loaded),
            "released_ms": {name: round(seconds * 1e3, 3) for name, seconds in self.release_seconds.items()},
            "stages_ms": {stage.value: ms(at) for stage, at in ordered},
            "parts": [
                {"name": name, "who": actor, "start_ms": ms(begin), "end_ms": ms(end)}
                for name, actor, begin, end in self.parts()
            ],
        }


def _with_rate(moved: Moved) -> dict[str, float]:
    rate = moved.bytes / moved.seconds / 1e9 if moved.seconds else 0.0
    return {**asdict(moved), "gb_per_s": rate}


def prompt_ids(keys: dict[int, list[bytes]]) -> tuple[int, bytes]:
    """Return what a timeline keeps of a prompt's keys by block size: the tokens per id, and the joined ids."""
    if not keys:
        return BLOCK, b""
    size = min(keys)
    stride = max(1, BLOCK // size)
    return size * stride, b"".join([key[:ID_BYTES] for key in keys[size][stride - 1 :: stride]])


def log_finished(timeline: Timeline) -> None:
    """Log one line for a finished request, also as the structured field `request`."""
    ttft = timeline.span(Stage.RECEIVED, Stage.FIRST_TOKEN)
    e2e = timeline.span(Stage.RECEIVED, Stage.FINISHED)
    summary = {
        "finish_reason": timeline.finish_reason,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "e2e_ms": None if e2e is None else round(e2e * 1e3, 3),
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "migrations": len(timeline.migrations),
    }
    text = " ".join(f"{name}={value}" for name, value in summary.items())
    log.info("%s ended: %s", timeline.request_id, text, extra={"request_id": timeline.request_id, "request": summary})


class TimelineLog:
    """The latest `capacity` timelines, by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()
        self._first_attempt = 0  # no request of which nothing is known any more had this one

    def new(self, request: RoutedRequest, now: float) -> Timeline:
        """Return the timeline of a new request, which is not in the log yet."""
        earlier = self._timelines.get(request.request_id)
        block, ids = prompt_ids(request.keys)
        timeline = Timeline(
            request.request_id,
            request.traceparent,
            "chat" if request.multi_turn else "text_completion",
            request.sampling.max_tokens,
            request.adapter_name,
            # Outputs of an earlier request may still arrive.
            attempt=self._first_attempt if earlier is None else earlier.attempt + 1,
            prompt_tokens=len(request.prompt),
            prompt_block=block,
            prompt_ids=ids,
        )
        timeline.stamp(Stage.RECEIVED, request.received or now)
        return timeline

    def add(self, timeline: Timeline) -> None:
        """Add a timeline, and drop the oldest one if there are too many."""
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._capacity:
            _, dropped = self._timelines.popitem(last=False)
            self._first_attempt = max(self._first_attempt, dropped.attempt + 1)

    def get(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    def latest(self, count: int) -> list[Timeline]:
        """Return up to `count` timelines, the newest first."""
        return list(islice(reversed(self._timelines.values()), count))
