"""Observability of the router: metrics, request timelines, traces, and recent fleet events."""
