"""What happened to one request and when, on the router's clock: served at /debug/requests/{id}, source of the metrics."""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pdserve.lifetime import PARTS, Stage
from pdserve.router.scheduling.placement import Placement
from pdserve.router.scheduling.policy import Decision

log = logging.getLogger(__name__)


@dataclass
class Moved:
    """KV that one side of the hand-over moved."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        return {"blocks": self.blocks, "bytes": self.bytes, "seconds": self.seconds, "gb_per_s": rate}


class Move(NamedTuple):
    """Other instances took a request over: when, from which instance, and why."""

    at: float
    instance: str
    why: str


@dataclass
class Timeline:
    """The stamps and counts of one request.

    Attributes:
        stamps: seconds on the router's monotonic clock, one per stage reached.
        computed_tokens, local_hit_tokens, loaded_tokens: where the prompt's KV came from: computed on the instance that
            prefilled, found in its pool, or loaded by it from the KV store.
        decisions: (role, how its instance was picked), in order; a request that moves has more.
        placement: who computes the prompt, and why.
        moves: to other instances, in order.
        released: instance → seconds from the end of a request that was cut short until it held nothing of it any more.
        stored, loaded: what prefill wrote to the KV store, and what decode read from it.
    """

    request_id: str
    traceparent: str = ""  # the client's span
    stamps: dict[Stage, float] = field(default_factory=dict)
    prefill_instance: str = ""
    decode_instance: str = ""
    decisions: list[tuple[str, Decision]] = field(default_factory=list)
    placement: Placement | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    moves: list[Move] = field(default_factory=list)
    computed_tokens: int = 0
    local_hit_tokens: int = 0
    loaded_tokens: int = 0
    stored: Moved = field(default_factory=Moved)
    loaded: Moved = field(default_factory=Moved)
    released: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""  # stop, length, cancelled, error
    error: str = ""

    @property
    def migrations(self) -> int:
        """How often other instances took over."""
        return len(self.moves)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill did not have to compute."""
        return self.local_hit_tokens + self.loaded_tokens

    def stamp(self, stage: Stage, at: float) -> None:
        """Keeps the first stamp of each stage. What decode has loaded had been stored, whoever was heard first."""
        self.stamps.setdefault(stage, min(at, self.stamps.get(Stage.KV_READY, at)) if stage is Stage.KV_STORED else at)

    def span(self, start: Stage, end: Stage) -> float | None:
        """Seconds between two stages, None unless both were reached."""
        if start not in self.stamps or end not in self.stamps:
            return None
        return max(0.0, self.stamps[end] - self.stamps[start])

    def parts(self) -> list[tuple[str, str, float, float]]:
        """What was done, by whom, from when to when, on the stamps' clock; without what has not ended."""
        found = []
        for name, (who, start, end) in PARTS.items():
            if start in self.stamps and end in self.stamps:
                found.append((name, who, self.stamps[start], max(self.stamps[start], self.stamps[end])))
        return found

    def as_dict(self) -> dict[str, object]:
        """For /debug/requests/{id}: stages in milliseconds since `received`, in order of time."""
        start = min(self.stamps.values(), default=0.0)
        ordered = sorted(self.stamps.items(), key=lambda item: item[1])

        def ms(at: float) -> float:
            return round((at - start) * 1e3, 3)

        return {
            "request_id": self.request_id,
            "traceparent": self.traceparent,
            "prefill_instance": self.prefill_instance,
            "decode_instance": self.decode_instance,
            "placement": vars(self.placement) if self.placement else None,
            "decisions": [{"role": role, **decision.as_dict()} for role, decision in self.decisions],
            "finish_reason": self.finish_reason,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "migrations": self.migrations,
            "moves": [{"ms": ms(move.at), "instance": move.instance, "why": move.why} for move in self.moves],
            "prompt_tokens_by_source": {
                "computed": self.computed_tokens,
                "local_hit": self.local_hit_tokens,
                "loaded": self.loaded_tokens,
            },
            "stored": self.stored.as_dict(),
            "loaded": self.loaded.as_dict(),
            "released_ms": {name: round(seconds * 1e3, 3) for name, seconds in self.released.items()},
            "stages_ms": {stage.value: ms(at) for stage, at in ordered},
            "parts": [
                {"name": name, "who": who, "start_ms": ms(begin), "end_ms": ms(end)}
                for name, who, begin, end in self.parts()
            ],
        }


def log_ended(timeline: Timeline) -> None:
    """One line for a request that has ended."""
    ttft = timeline.span(Stage.RECEIVED, Stage.FIRST_TOKEN)
    took = timeline.span(Stage.RECEIVED, Stage.FINISHED)
    request = {
        "finish_reason": timeline.finish_reason,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "e2e_ms": None if took is None else round(took * 1e3, 3),
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "migrations": timeline.migrations,
    }
    words = " ".join(f"{name}={value}" for name, value in request.items())
    log.info("%s ended: %s", timeline.request_id, words, extra={"request_id": timeline.request_id, "request": request})


class TimelineLog:
    """The latest timelines by request id; the oldest goes when there are more than `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    def latest(self, count: int) -> list[Timeline]:
        """The newest first."""
        return list(islice(reversed(self._timelines.values()), count))
