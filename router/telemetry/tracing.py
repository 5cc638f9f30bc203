"""Export of finished timelines as OpenTelemetry traces and metrics. Imported only if `--otlp-endpoint` is set.

A request is one span of the router, a child of the client's span if it sent a `traceparent`, with its stages as events.
Below it is one span for each of `lifetime.TRACE_SPANS`, with the times of the stamps. Each actor (router, prefill,
connector, decode) is a service of its own. Attributes and metrics follow the conventions for generative AI (`gen_ai.py`).
"""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.errors import SetupError, not_imported
from pdserve.router.telemetry.gen_ai import GenAiMetrics, operation_attributes
from pdserve.router.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context

TRACEPARENT_HEADER = "traceparent"
TRACEPARENT_FORMAT = re.compile(
    r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
)  # https://www.w3.org/TR/trace-context
SERVICES = ("router", "prefill", "connector", "decode")
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 2.0  # of one attempt; the end of the process may have to wait for it


def traceparent(headers: Mapping[str, str]) -> str:
    """Return the client's `traceparent` header; empty if it is absent or malformed."""
    value = headers.get(TRACEPARENT_HEADER, "")
    return value if value and TRACEPARENT_FORMAT.fullmatch(value) else ""


class Tracer:
    """Exports traces over OTLP from a thread of its own.

    If the collector is slow or unreachable, up to 2,048 spans are queued; further ones are dropped, which is logged. The
    sampler is set by OTEL_TRACES_SAMPLER; by default the client's sampling flag decides, and requests without one are
    sampled.
    """

    def __init__(self, endpoint: str, model: str = "") -> None:
        """Connect to a collector's endpoint for OTLP over HTTP, such as http://collector:4318.

        An endpoint that ends in /v1/traces gets no metrics.

        Args:
            model: the served model's name.

        Raises:
            SetupError: OpenTelemetry is not installed, or `endpoint` is not a URL.
        """
        if not re.match(r"https?://[^/]", endpoint):
            raise SetupError(f"--otlp-endpoint {endpoint} is not a URL such as http://collector:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise not_imported("opentelemetry", error) from error
        self._model = model
        base = endpoint.rstrip("/").removesuffix(TRACES_PATH)
        exporter = OTLPSpanExporter(endpoint=base + TRACES_PATH, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter)
        self._meters = self._metrics = None
        if base == endpoint.rstrip("/"):
            metric_exporter = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=EXPORT_TIMEOUT_S)
            self._meters = MeterProvider(
                [PeriodicExportingMetricReader(metric_exporter)],
                Resource.create({"service.name": "pdserve-router"}),
                shutdown_on_exit=False,
            )
            self._metrics = GenAiMetrics(self._meters.get_meter("pdserve"), model)
        self._tracers = {}
        for name in SERVICES:
            provider = TracerProvider(
                resource=Resource.create({"service.name": f"pdserve-{name}"}), shutdown_on_exit=False
            )
            provider.add_span_processor(self._processor)
            self._tracers[name] = provider.get_tracer("pdserve")

    def export(self, timeline: Timeline) -> None:
        """Queue the trace of a finished request, and add it to the metrics."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        since_1970 = time.time() - time.monotonic()

        def ns(at: float) -> int:
            return int((since_1970 + at) * 1e9)

        start, end = min(timeline.stamps.values()), max(timeline.stamps.values())
        if self._metrics is not None:
            self._metrics.record(timeline)
        attributes: dict[str, str | int | tuple[str, ...]] = {
            **operation_attributes(timeline, self._model),
            "gen_ai.response.id": timeline.request_id,
            "gen_ai.request.max_tokens": timeline.max_tokens,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
            "gen_ai.response.finish_reasons": (timeline.finish_reason,),
            "pdserve.request_id": timeline.request_id,
            "pdserve.cached_tokens": timeline.cached_tokens,
            "pdserve.migrations": len(timeline.migrations),
        }
        parent, name = _parent_context(timeline.traceparent), f"{timeline.operation} {self._model}".strip()
        root = self._tracers["router"].start_span(name, parent, SpanKind.SERVER, attributes, start_time=ns(start))
        if root.is_recording():
            for stage, at in timeline.stamps.items():
                root.add_event(stage.value, timestamp=ns(at))
            for move in timeline.migrations:
                root.add_event("moved", {"pdserve.instance": move.instance, "pdserve.why": move.reason}, ns(move.at))
            if timeline.error:
                root.set_status(StatusCode.ERROR, timeline.error)
            context = set_span_in_context(root)
            for name, actor, begin, end_of_part in timeline.parts():
                part_attributes = _part_attributes(timeline, name, actor)
                span = self._tracers[actor].start_span(name, context, attributes=part_attributes, start_time=ns(begin))
                span.end(ns(end_of_part))
        root.end(ns(end))

    def close(self) -> None:
        """Send the queued spans and the metrics; takes a few seconds at most."""
        self._processor.shutdown()
        if self._meters is not None:
            self._meters.shutdown(EXPORT_TIMEOUT_S * 1e3)


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
