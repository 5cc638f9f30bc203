"""`LLM` and `AsyncLLM`: a deployment that a Python program starts and calls.

In reading order: llm, arguments, params, outputs.
"""
