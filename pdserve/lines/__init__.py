"""Texts of others: JSON and TOML, lines of JSON, and server-sent events. Lines end at line feeds only.

`str.splitlines`, and with it `iter_lines` of httpx, also end a line at U+2028, U+0085 and others, which strings in JSON may
hold.

In reading order: untrusted, json_lines, event_stream.
"""
