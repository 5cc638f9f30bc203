"""Text and tokens: chat templates, tokenization, detokenization and tool-call parsing.

In reading order: tokenizer; detokenizer; parsers.
"""
