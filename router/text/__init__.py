"""Text and tokens: chat templates, tokenization, detokenization, tool calls."""
