"""Metrics, request timelines, OpenTelemetry traces, fleet events."""
