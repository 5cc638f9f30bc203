"""Export of finished timelines as OpenTelemetry traces. Imported only if `--otlp-endpoint` is set.

A request is one span of the router, a child of the client's span if it sent a `traceparent`, with its stages as events.
Below it is one span for each of `lifetime.TRACE_SPANS`, with the times of the stamps. Each actor (router, prefill,
connector, decode) is a service of its own.
"""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.errors import SetupError
from pdserve.router.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context

TRACEPARENT_HEADER = "traceparent"
TRACEPARENT_FORMAT = re.compile(
    r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
)  # https://www.w3.org/TR/trace-context
SERVICES = ("router", "prefill", "connector", "decode")
EXPORT_TIMEOUT_S = 2.0  # of one attempt; the end of the process may have to wait for it


def traceparent(headers: Mapping[str, str]) -> str:
    """Return the client's `traceparent` header; empty if it is absent or malformed."""
    value = headers.get(TRACEPARENT_HEADER, "")
    return value if TRACEPARENT_FORMAT.fullmatch(value) else ""


class Tracer:
    """Exports traces over OTLP from a thread of its own.

    If the collector is slow or unreachable, up to 2,048 spans are queued; further ones are dropped, which is logged. The
    sampler is set by OTEL_TRACES_SAMPLER; by default the client's sampling flag decides, and requests without one are
    sampled.
    """

    def __init__(self, endpoint: str) -> None:
        """Connect to a collector's endpoint for OTLP over HTTP, such as http://collector:4318.

        Raises:
            SetupError: OpenTelemetry is not installed, or `endpoint` is not a URL.
        """
        if not re.match(r"https?://[^/]", endpoint):
            raise SetupError(f"--otlp-endpoint {endpoint} is not a URL such as http://collector:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SetupError("--otlp-endpoint needs OpenTelemetry: pip install 'pdserve[otel]'") from error
        url = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S))
        self._tracers = {}
        for name in SERVICES:
            provider = TracerProvider(
                resource=Resource.create({"service.name": f"pdserve-{name}"}), shutdown_on_exit=False
            )
            provider.add_span_processor(self._processor)
            self._tracers[name] = provider.get_tracer("pdserve")

    def export(self, timeline: Timeline) -> None:
        """Queue the trace of a finished request."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        since_1970 = time.time() - time.monotonic()

        def ns(at: float) -> int:
            return int((since_1970 + at) * 1e9)

        start, end = min(timeline.stamps.values()), max(timeline.stamps.values())
        attributes: dict[str, str | int | tuple[str, ...]] = {
            "pdserve.request_id": timeline.request_id,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            "gen_ai.response.finish_reasons": (timeline.finish_reason,),
            "pdserve.cached_tokens": timeline.cached_tokens,
            "pdserve.migrations": len(timeline.migrations),
        }
        parent = _parent_context(timeline.traceparent)
        root = self._tracers["router"].start_span("request", parent, SpanKind.SERVER, attributes, start_time=ns(start))
        if root.is_recording():
            for stage, at in timeline.stamps.items():
                root.add_event(stage.value, timestamp=ns(at))
            for at, instance, reason in timeline.migrations:
                root.add_event("moved", {"pdserve.instance": instance, "pdserve.why": reason}, ns(at))
            if timeline.error:
                root.set_status(StatusCode.ERROR, timeline.error)
            context = set_span_in_context(root)
            for name, actor, begin, end_of_part in timeline.parts():
                part_attributes = _part_attributes(timeline, name, actor)
                span = self._tracers[actor].start_span(name, context, attributes=part_attributes, start_time=ns(begin))
                span.end(ns(end_of_part))
        root.end(ns(end))

    def close(self) -> None:
        """Send the queued spans; takes a few seconds at most."""
        self._processor.shutdown()


def _parent_context(traceparent: str) -> "Context | None":
    """Return the client's span as a parent context; None if `traceparent` is empty."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    match = TRACEPARENT_FORMAT.fullmatch(traceparent)
    if match is None:
        return None
    trace, span, flags = (int(digits, 16) for digits in match.groups())
    return set_span_in_context(
        NonRecordingSpan(SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags)))
    )


def _part_attributes(timeline: Timeline, name: str, actor: str) -> dict[str, str | float]:
    if actor == "connector":
        transfer = timeline.stored if name == "store KV" else timeline.loaded
        return {"pdserve.blocks": transfer.blocks, "pdserve.bytes": transfer.bytes}
    instances = {"prefill": timeline.prefill_instance, "decode": timeline.decode_instance}
    return {"pdserve.instance": instances[actor]} if actor in instances else {}
