"""The OpenAI API: request and response schemas, parsing, generation and streaming."""
