"""The OpenAI API: request and response schemas, parsing, generation and streaming.

In reading order: schemas, answers, parsing; requests, chat, tools, grammars, reasoning, beams; generation, streaming,
logprobs; http_responses, field_texts, openapi.
"""
