"""Names and metrics of OpenTelemetry's semantic conventions for generative AI. Imported only if `--otlp-endpoint` is set.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (in development, as of 2026-11).
"""

from typing import TYPE_CHECKING

from pdserve.lifetime import Stage
from pdserve.router.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
SECONDS_TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
SECONDS_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(4**exponent for exponent in range(14))


def operation_attributes(timeline: Timeline, model: str) -> dict[str, str]:
    """Return what spans and metrics of a request have in common."""
    attributes = {
        "gen_ai.operation.name": timeline.operation,
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": timeline.adapter or model,
        "gen_ai.response.model": timeline.adapter or model,
    }
    if timeline.error:
        attributes["error.type"] = timeline.finish_reason or "error"
    return attributes


class GenAiMetrics:
    """The conventions' histograms of a server, and of the tokens used."""

    def __init__(self, meter: "Meter", model: str) -> None:
        self._model = model
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "of requests", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "from the request to the first token",
            explicit_bucket_boundaries_advisory=SECONDS_TO_FIRST_TOKEN,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "between two tokens after the first, in the mean of a request",
            explicit_bucket_boundaries_advisory=SECONDS_PER_TOKEN,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "of requests", explicit_bucket_boundaries_advisory=TOKENS
        )

    def record(self, timeline: Timeline) -> None:
        """Add a finished request."""
        attributes = operation_attributes(timeline, self._model)
        for histogram, begin, end in (
            (self._duration, Stage.RECEIVED, Stage.FINISHED),
            (self._first_token, Stage.RECEIVED, Stage.FIRST_TOKEN),
        ):
            if (seconds := timeline.span(begin, end)) is not None:
                histogram.record(seconds, attributes)
        decoding = timeline.span(Stage.FIRST_TOKEN, Stage.FINISHED)
        if decoding is not None and timeline.output_tokens > 1:
            self._per_token.record(decoding / (timeline.output_tokens - 1), attributes)
        for kind, count in (("input", timeline.prompt_tokens), ("output", timeline.output_tokens)):
            self._tokens.record(count, {**attributes, "gen_ai.token.type": kind})
