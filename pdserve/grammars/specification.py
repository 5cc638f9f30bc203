"""Grammar specifications, and xgrammar's `Grammar` of one.

A specification is JSON with one of `json` (a schema), `regex`, `choice` (a list of strings) or `grammar` (EBNF), and
optionally literal text around it in `begin` and `end`.
"""

import json
from typing import Any

# Of a string of limited length in xgrammar: with control characters, which JSON forbids, and surrogates, which are no text.
CHARACTER = r"[^\"\\\r\n]"
JSON_CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff]"


def build_grammar(spec: dict[str, Any]) -> Any:
    """Return xgrammar's `Grammar` of a specification.

    Raises:
        RuntimeError: xgrammar cannot parse it.
    """
    from xgrammar import Grammar

    if "json" in spec:  # white space as json.dumps writes it: unbounded white space could go on until max_tokens
        grammar = Grammar.from_json_schema(json.dumps(spec["json"]), any_whitespace=False)
        if CHARACTER in (text := str(grammar)):
            grammar = Grammar.from_ebnf(text.replace(CHARACTER, JSON_CHARACTER))
    elif "regex" in spec:
        grammar = Grammar.from_regex(spec["regex"])
    elif "choice" in spec:
        grammar = Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, spec['choice']))}")
    else:
        grammar = Grammar.from_ebnf(spec["grammar"])
    begin, end = (
        Grammar.from_ebnf(f"root ::= {_literal(spec[side])}") if side in spec else None for side in ("begin", "end")
    )
    parts = [part for part in (begin, grammar, end) if part is not None]
    return Grammar.concat(*parts) if len(parts) > 1 else grammar


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
