"""OpenAI's /v1/responses for text and function calls; the parser is that of /v1/chat/completions.

In reading order: endpoints, schemas, conversion, output, response_store.
"""
