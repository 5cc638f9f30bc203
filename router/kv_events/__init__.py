"""Contents of the KV store, followed through publishers of KV events in vLLM's format.

In reading order: sources, subscriber, stored_blocks.
"""
