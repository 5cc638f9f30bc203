"""The life of a request, as a drawing and as an enum: the metric schema, the timeline and the trace events.

    client ──► router                      prefill instance                      decode instance
               │ RECEIVED
               │ ADMITTED
               │ ROUTED ───────────────────► │ PREFILL_STARTED                    │ RESERVED
               │                             │ (chunks computed and stored) ────► │ (chunks loaded)
    token 1 ◄──│ ◄─────────────────────────── │ FIRST_TOKEN                        │
               │                             │ KV_STORED ───────────────────────► │ KV_READY
    token 2 ◄──│ ◄────────────────────────────┼────────────────────────────────── │ DECODE_STARTED
    token n ◄──│ ◄────────────────────────────┼────────────────────────────────── │ FINISHED

A request that one instance serves alone has no RESERVED, KV_STORED and KV_READY; its DECODE_STARTED equals FIRST_TOKEN.
"""

from enum import StrEnum


class Stage(StrEnum):
    """The stamps of one request, in the order in which they usually happen."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    ROUTED = "routed"
    RESERVED = "reserved"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    KV_STORED = "kv_stored"
    KV_READY = "kv_ready"
    DECODE_STARTED = "decode_started"
    FINISHED = "finished"


# Not a stage: an instance's stamp for when it held nothing any more of a request that was cut short.
RELEASED = "released"

# What each part of the system does for a request: name → (who, from, to). The bars of a waterfall, the spans of a trace.
PARTS: dict[str, tuple[str, Stage, Stage]] = {
    "admission": ("router", Stage.RECEIVED, Stage.ADMITTED),
    "routing": ("router", Stage.ADMITTED, Stage.ROUTED),
    "prefill queue": ("prefill", Stage.ROUTED, Stage.PREFILL_STARTED),
    "prefill": ("prefill", Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "store KV": ("connector", Stage.PREFILL_STARTED, Stage.KV_STORED),
    "reserve": ("decode", Stage.ROUTED, Stage.RESERVED),
    "load KV": ("connector", Stage.RESERVED, Stage.KV_READY),
    "decode queue": ("decode", Stage.KV_READY, Stage.DECODE_STARTED),
    "decode": ("decode", Stage.DECODE_STARTED, Stage.FINISHED),
}

# Name of the histogram (seconds) → the two stamps that it spans.
SPANS: dict[str, tuple[Stage, Stage]] = {
    "time_to_first_token": (Stage.RECEIVED, Stage.FIRST_TOKEN),
    "e2e_request_latency": (Stage.RECEIVED, Stage.FINISHED),
    "request_queue_time": (Stage.ROUTED, Stage.PREFILL_STARTED),
    "request_prefill_time": (Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "request_handover_time": (Stage.FIRST_TOKEN, Stage.KV_READY),
    "request_decode_time": (Stage.DECODE_STARTED, Stage.FINISHED),
}
