"""Observations of the controller: the instances of a fleet, and the requests that routers received within a window."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.lines.json_lines import json_lines
from pdserve.lines.untrusted import read_json
from pdserve.tools.bench.requests import Request, Sample


@dataclass(frozen=True)
class Member:
    """One instance as the routers see it; `requests` run or wait on it."""

    name: str
    role: str
    is_draining: bool = False
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that a router received, with its latencies so far.

    Attributes:
        request: its times are those of the router's clock, in seconds; its answer is that until now if it still runs.
        ttft_s: None before the first token.
        itl_p99_s: None before the end.
        e2e_s: None before the end.
    """

    request: Request
    ttft_s: float | None
    itl_p99_s: float | None
    e2e_s: float | None
    finish_reason: str

    @property
    def at(self) -> float:
        assert self.request.at is not None
        return self.request.at

    @property
    def is_refused(self) -> bool:
        """True if the routers' SLO admission rejected it. It counts as demand, and as missing the SLO."""
        return self.finish_reason == "refused"

    @property
    def ended_at(self) -> float:
        """Time of its end on the routers' clock; infinite while it runs."""
        return math.inf if self.e2e_s is None else self.at + self.e2e_s

    def sample(self, now: float) -> Sample | None:
        """Return the latencies as a sample of one or two tokens; None if the client has cancelled the request.

        A request without a token counts with the time that it has waited.
        """
        if self.finish_reason == "cancelled":
            return None
        first = now if self.ttft_s is None else self.at + self.ttft_s
        times = [first] if self.itl_p99_s is None else [first, first + self.itl_p99_s]
        error = "failed" if self.finish_reason == "error" or self.is_refused else ""
        sample = Sample(
            self.request.index, self.at, sent=self.at, ended=now, token_times=times, status=200, error=error
        )
        sample.input_tokens = self.request.input_tokens
        return sample


@dataclass(frozen=True)
class Observation:
    """A fleet and its traffic.

    Attributes:
        at: time of the observation on the routers' clock, in seconds.
        requests: those that were received or ran within the window before it, in order of time.
    """

    at: float
    members: tuple[Member, ...]
    requests: tuple[Seen, ...]

    @property
    def counts(self) -> Counter[str]:
        """Instances by role; those that drain count, too."""
        return Counter(member.role for member in self.members)


def parse_traffic(text: str) -> list[Seen]:
    """Parse the lines of /debug/traffic."""
    return [_parse(index, read_json(line)) for index, (_, line) in enumerate(json_lines(text))]


def _parse(index: int, row: Mapping[str, Any]) -> Seen:
    length, size = row["input_length"], row["block_size"]
    blocks = [(str(one), size) for one in row["hash_ids"]]
    if rest := length - size * len(blocks):
        blocks.append((f"own-{row['request_id']}", rest))
    at = row["timestamp"] / 1e3
    request = Request(index, row["output_length"], tuple(blocks), input_tokens=length, at=at)
    ttft, itl, e2e = (None if row[name] is None else row[name] / 1e3 for name in ("ttft_ms", "itl_p99_ms", "e2e_ms"))
    return Seen(request, ttft, itl, e2e, row["finish_reason"])


def merge_traffic(parts: Iterable[Sequence[Seen]]) -> tuple[Seen, ...]:
    """Return the requests of several routers in order of time, numbered anew."""
    ordered = sorted((one for part in parts for one in part), key=lambda one: one.at)
    return tuple(replace(one, request=replace(one.request, index=index)) for index, one in enumerate(ordered))
