"""The traffic that a router has seen: recent requests as lines of a Mooncake trace, with the latencies that clients saw."""

import json
import math
from collections.abc import Iterable
from operator import itemgetter

from pdserve.lifetime import Stage
from pdserve.router.telemetry.timeline import BLOCK, ID_BYTES, Timeline

TIME_HEADER = "X-Time-Ms"  # of the answer with the lines: the router's clock, in milliseconds since 1970


def traffic_row(timeline: Timeline, epoch_offset: float) -> dict[str, object]:
    """Return a request as a line of a trace.

    Besides the fields of a Mooncake trace it has `block_size`, the tokens for which an id in `hash_ids` stands; `ttft_ms` and
    `itl_p99_ms`, of the gaps between tokens (null if there are none); `e2e_ms` and `finish_reason`, null and empty while the
    request runs.

    Args:
        epoch_offset: seconds from the stamps' clock to that of the system, which counts from 1970.
    """
    ttft = timeline.span(Stage.RECEIVED, Stage.FIRST_TOKEN)
    e2e = timeline.span(Stage.RECEIVED, Stage.FINISHED)
    ids = timeline.prompt_ids
    return {
        "request_id": timeline.request_id,
        "timestamp": round((timeline.stamps[Stage.RECEIVED] + epoch_offset) * 1e3, 1),
        "input_length": timeline.prompt_tokens,
        "output_length": timeline.output_tokens,
        "hash_ids": [int.from_bytes(ids[at : at + ID_BYTES]) for at in range(0, len(ids), ID_BYTES)],
        "block_size": timeline.prompt_block,
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "itl_p99_ms": None if timeline.itl_p99_s is None else round(timeline.itl_p99_s * 1e3, 3),
        "e2e_ms": None if e2e is None else round(e2e * 1e3, 3),
        "finish_reason": timeline.finish_reason if e2e is not None else "",
    }


def queued_row(number: int, at: float, prompt_tokens: int, epoch_offset: float) -> dict[str, object]:
    """Return a request of the admission queue as a line of a trace: its prompt is not known yet, and shares nothing."""
    row = {"request_id": f"queued-{number}", "timestamp": round((at + epoch_offset) * 1e3, 1)}
    row |= {"input_length": prompt_tokens, "output_length": 0, "hash_ids": [], "block_size": BLOCK}
    return row | {"ttft_ms": None, "itl_p99_ms": None, "e2e_ms": None, "finish_reason": ""}


def traffic_lines(
    timelines: Iterable[Timeline],
    epoch_offset: float,
    since: float = -math.inf,
    queued: Iterable[tuple[float, int]] = (),
) -> str:
    """Return the requests that were received, ran or ended at `since` or later, as JSON lines, the oldest first.

    Args:
        since: seconds on the stamps' clock.
        queued: when each request of the admission queue came, and its prompt tokens.
    """
    rows = [
        (timeline.stamps[Stage.RECEIVED], traffic_row(timeline, epoch_offset))
        for timeline in timelines
        if Stage.RECEIVED in timeline.stamps and timeline.stamps.get(Stage.FINISHED, math.inf) >= since
    ]
    rows += [(at, queued_row(number, at, tokens, epoch_offset)) for number, (at, tokens) in enumerate(queued)]
    return "".join(json.dumps(row) + "\n" for _, row in sorted(rows, key=itemgetter(0)))
