"""Compiling grammars of structured output within limits, in a process of its own. Shared by routers and instances.

In reading order: specification, formats, limits; schema, schema_keywords, json_rules, ebnf, ebnf_rules, regexes,
character_sets, runs; compiler, compile_server, vocabulary, cache; mask_client, mask_turns, mask_worker.
"""
