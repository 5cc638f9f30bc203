"""`nixl://`: decode reads prefill's pool directly, without a store in between.

In reading order: connector, tickets, leases, reader, agent, memory.
"""
