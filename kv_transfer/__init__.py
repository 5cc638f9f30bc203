"""KV blocks on their way from one instance to another: the connector contract, base classes, and what instances put around.

In reading order: connector, blocks, header, codec, codec_choice, batched, threaded, breaker, connectors, registry, url,
rate_limited_log, forwarding, guarded, staging, tickets, grouped, cancellation, fence; the conformance kit: conformance,
rules, pytest_plugin, check_command, bench, progress.
"""
