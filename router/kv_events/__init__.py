"""What the KV store has, by publishers of KV events in vLLM's format.

In reading order: sources, subscriber, stored_blocks.
"""
