"""Grammar specifications, and xgrammar's `Grammar` of one.

A specification is JSON with one of

    json     a JSON schema
    regex    a regular expression
    choice   a list of strings
    grammar  EBNF
    calls    calls of functions, each as `{"begin": …, "json": …, "end": …}`: the schema of the arguments, and what surrounds
             them, in which INDEX stands for any number. With it, `single` allows one call only, and `may_be_text` other
             outputs: those of the specification `text`, or, without one, any text among the calls, which begin where one of
             the strings `triggers` ends.
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

    if "calls" in spec:
        return Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": _calls_format(spec)}))
    if "json" in spec:  # white space as json.dumps writes it: unbounded white space could go on until max_tokens
        grammar = Grammar.from_json_schema(json.dumps(spec["json"]), any_whitespace=False)
        if CHARACTER in (text := str(grammar)):
            grammar = Grammar.from_ebnf(text.replace(CHARACTER, JSON_CHARACTER))
        return grammar
    if "regex" in spec:
        return Grammar.from_regex(spec["regex"])
    if "choice" in spec:
        return Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, spec['choice']))}")
    return Grammar.from_ebnf(spec["grammar"])


def _calls_format(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the format of xgrammar's structural tags for calls, and for text where that is allowed."""
    tags = [_tag(call) for call in spec["calls"]]
    if spec["may_be_text"] and "text" not in spec:
        found_by = {"triggers": spec["triggers"], "stop_after_first": spec["single"]}
        return {"type": "triggered_tags", "tags": tags, **found_by}
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    calls["stop_after_first"] = spec["single"]
    return {"type": "or", "elements": [calls, _embedded(spec["text"])]} if spec["may_be_text"] else calls


def _tag(call: dict[str, Any]) -> dict[str, Any]:
    begin, index, rest = call["begin"].partition("INDEX")
    content = _embedded({"json": call["json"]})
    if index:
        head = [{"type": "regex", "pattern": "[0-9]+"}, {"type": "const_string", "value": rest}]
        content = {"type": "sequence", "elements": [*head, content]}
    return {"type": "tag", "begin": begin, "content": content, "end": call["end"]}


def _embedded(spec: dict[str, Any]) -> dict[str, Any]:
    return {"type": "grammar", "grammar": str(build_grammar(spec))}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
