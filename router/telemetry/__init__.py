"""Observability of the router: metrics, request timelines, traces, and recent fleet events.

In reading order: timeline, metrics, events, traffic, tracing, gen_ai.
"""
