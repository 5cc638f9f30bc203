"""The rules of the conformance kit, by subject, and the helpers they share.

In reading order: context, blocks, operations, leases, evictions, behaviour, tampering, connections, outage, relay,
processes, writer.
"""
