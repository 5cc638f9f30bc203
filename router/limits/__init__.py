"""API keys, their rate limits, the memory of their bodies, and the admission queue.

In reading order: admission_queue, quota, shared_quota, key_file, body_budget.
"""
