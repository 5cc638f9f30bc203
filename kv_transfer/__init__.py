"""KV blocks on their way from one instance to another: the connector contract, base classes, and what instances put around.

In reading order: connector, blocks, header, codec, operation, fence, threaded, breaker, guarded, staging, registry, url,
rate_limited_log, connectors; the conformance kit: conformance, rules, pytest_plugin, check_command, bench, progress.
"""
