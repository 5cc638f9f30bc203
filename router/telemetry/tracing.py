"""OpenTelemetry: the timeline of a request, once it has ended, as a trace. Imported only where somebody asks for it.

A request is one span of the router, a child of the client's if it sent a `traceparent`, with its stages as events; below it
is one span for each of `lifetime.PARTS`. Their times are those of the stamps. Each of those who act is a service of its own.
"""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.errors import SetupError
from pdserve.router.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context

HEADER = "traceparent"
FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # https://www.w3.org/TR/trace-context
SERVICES = ("router", "prefill", "connector", "decode")
EXPORT_S = 2.0  # for one try; the end of the process may have to wait for it


def traceparent(headers: Mapping[str, str]) -> str:
    """What the client calls its span; empty if it does not, or in no form that we know, which is as good as none."""
    given = headers.get(HEADER, "")
    return given if FORM.fullmatch(given) else ""


class Tracer:
    """Sends traces from a thread of its own; where the collector is slow or away, 2,048 spans wait and others are dropped,
    which is logged. The sampler is the environment's (OTEL_TRACES_SAMPLER), by default what the client says, or all."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is a collector's for OTLP over HTTP, such as http://collector:4318.

        Raises:
            SetupError: the packages are not there, or it is no URL.
        """
        if not re.match(r"https?://[^/]", endpoint):
            raise SetupError(f"--otlp-endpoint {endpoint} is no URL such as http://collector:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SetupError("--otlp-endpoint needs OpenTelemetry: pip install 'pdserve[otel]'") from error
        url = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S))
        self._tracers = {}
        for name in SERVICES:
            provider = TracerProvider(
                resource=Resource.create({"service.name": f"pdserve-{name}"}), shutdown_on_exit=False
            )
            provider.add_span_processor(self._processor)
            self._tracers[name] = provider.get_tracer("pdserve")

    def finished(self, timeline: Timeline) -> None:
        """Takes a complete timeline."""
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
            "pdserve.migrations": timeline.migrations,
        }
        parent = _context_of(timeline.traceparent)
        root = self._tracers["router"].start_span("request", parent, SpanKind.SERVER, attributes, start_time=ns(start))
        if root.is_recording():
            for stage, at in timeline.stamps.items():
                root.add_event(stage.value, timestamp=ns(at))
            for move in timeline.moves:
                root.add_event("moved", {"pdserve.instance": move.instance, "pdserve.why": move.why}, ns(move.at))
            if timeline.error:
                root.set_status(StatusCode.ERROR, timeline.error)
            inside = set_span_in_context(root)
            for name, who, begun, ended in timeline.parts():
                about = _about(timeline, name, who)
                span = self._tracers[who].start_span(name, inside, attributes=about, start_time=ns(begun))
                span.end(ns(ended))
        root.end(ns(end))

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._processor.shutdown()


def _context_of(traceparent: str) -> "Context | None":
    """The client's span as a parent; None for no client's."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = FORM.fullmatch(traceparent)
    if found is None:
        return None
    trace, span, flags = (int(digits, 16) for digits in found.groups())
    return set_span_in_context(
        NonRecordingSpan(SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags)))
    )


def _about(timeline: Timeline, name: str, who: str) -> dict[str, str | float]:
    if who == "connector":
        moved = timeline.stored if name == "store KV" else timeline.loaded
        return {"pdserve.blocks": moved.blocks, "pdserve.bytes": moved.bytes}
    instances = {"prefill": timeline.prefill_instance, "decode": timeline.decode_instance}
    return {"pdserve.instance": instances[who]} if who in instances else {}
