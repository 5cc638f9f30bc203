"""OpenAI's API: request and response schemas, parsing, generation, streaming."""
