"""Parsers of model output: reasoning and tool calls, separated from the text as it arrives, one file per family.

In reading order: registry, output, output_parser, reader; reasoning, tool_parser, arguments, json_object; json_calls,
named_calls, xml_calls, pythonic, harmony.
"""
