"""Dialects besides OpenAI's completions, found by entry point: each makes its routes, its errors, and what it stores.

In reading order: embeddings, messages, responses, batches, adapters.
"""
