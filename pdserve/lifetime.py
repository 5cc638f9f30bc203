"""Lifetime of a request: the stages that it passes, from which latency metrics, timelines and trace spans are derived.

    client ──► router                      prefill instance                      decode instance
               │ RECEIVED
               │ ADMITTED
               │ ROUTED ───────────────────► │ PREFILL_STARTED                    │
               │                             │ (chunks computed and stored) ────► │ RESERVED (chunks loaded)
    token 1 ◄──│ FIRST_TOKEN ◄────────────── │                                    │
               │                             │ KV_STORED ───────────────────────► │ KV_READY
    token 2 ◄──│ ◄────────────────────────────┼────────────────────────────────── │ DECODE_STARTED
    token n ◄──│ ◄────────────────────────────┼────────────────────────────────── │ FINISHED

A request served by a single instance has no RESERVED, KV_STORED and KV_READY; its DECODE_STARTED is when it samples
the first token.
"""

from enum import StrEnum


class Stage(StrEnum):
    """Stages of a request, in their usual order. Each is stamped once."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    ROUTED = "routed"
    PREFILL_STARTED = "prefill_started"
    RESERVED = "reserved"
    FIRST_TOKEN = "first_token"
    KV_STORED = "kv_stored"
    KV_READY = "kv_ready"
    DECODE_STARTED = "decode_started"
    FINISHED = "finished"


# Not a stage: an instance's stamp for the moment when it had freed all resources of a cancelled request.
RELEASED = "released"

# Spans of a trace, and bars of the waterfall view: name → (component, first stage, last stage).
TRACE_SPANS: dict[str, tuple[str, Stage, Stage]] = {
    "admission": ("router", Stage.RECEIVED, Stage.ADMITTED),
    "routing": ("router", Stage.ADMITTED, Stage.ROUTED),
    "prefill queue": ("prefill", Stage.ROUTED, Stage.PREFILL_STARTED),
    "prefill": ("prefill", Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "store KV": ("connector", Stage.PREFILL_STARTED, Stage.KV_STORED),
    "reserve": ("decode", Stage.PREFILL_STARTED, Stage.RESERVED),
    "load KV": ("connector", Stage.RESERVED, Stage.KV_READY),
    "decode queue": ("decode", Stage.KV_READY, Stage.DECODE_STARTED),
    "decode": ("decode", Stage.DECODE_STARTED, Stage.FINISHED),
}

# Latency histograms (seconds): name → (first stage, last stage).
LATENCY_METRICS: dict[str, tuple[Stage, Stage]] = {
    "time_to_first_token": (Stage.RECEIVED, Stage.FIRST_TOKEN),
    "e2e_request_latency": (Stage.RECEIVED, Stage.FINISHED),
    "request_queue_time": (Stage.ROUTED, Stage.PREFILL_STARTED),
    "request_prefill_time": (Stage.PREFILL_STARTED, Stage.FIRST_TOKEN),
    "request_handover_time": (Stage.FIRST_TOKEN, Stage.KV_READY),
    "request_decode_time": (Stage.DECODE_STARTED, Stage.FINISHED),
}
