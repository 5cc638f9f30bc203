"""Parsers of model output: reasoning and tool calls, separated from the text as it arrives, one file per family."""
