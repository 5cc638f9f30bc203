"""Grammar specifications, and xgrammar's `Grammar` of one.

A specification is JSON with one of

    json     a JSON schema. `place` may say what surrounds the JSON: `python`, whose strings have fewer escapes, or `xml`,
             where strings write `<` as an escape
    text     the JSON schema of a string that is written without quotes, and without `<`
    regex    a regular expression
    choice   a list of strings
    grammar  EBNF
    format   a format of `formats.py`
"""

import json
import re
from typing import Any

# Parts of xgrammar's grammar of a JSON schema, and what stands in their place.
CHARACTER = r"[^\0-\x1f\"\\\r\n]"
LIMITED = r"[^\"\\\r\n]"  # in strings of limited length
HEX = "[A-Fa-f0-9]"
ESCAPES, UNICODE = r"[\"\\/bfnrt]", f'("u" {HEX} {HEX} {HEX} {HEX})'
BASIC = f'("u" [A-CE-Fa-ce-f0-9] {HEX} {HEX} {HEX}) | ("u" [Dd] [0-7] {HEX} {HEX})'
PAIR = rf'("u" [Dd] [89ABab] {HEX} {HEX} "\\u" [Dd] [C-Fc-f] {HEX} {HEX})'
MENDED = {  # halves of surrogate pairs, control characters in limited strings, and any in JSON pointers
    UNICODE: f"{BASIC} | {PAIR}",
    LIMITED: r"[^\0-\x1f\"\\\ud800-\udfff]",
    r"([\0-.]) | ([0-}]) | ([\x7f-\U0010ffff])": r"([ !#-.0-;=-[\]-}\x7f-\ud7ff\ue000-\U0010ffff])",
}
QUOTED_ADDRESS = re.compile(r' \| \("\\\\" "\\"" \w+ "\\\\" "\\""\)')  # in which any character is escaped
LITERALS = {f'("{ours}")': f'("{ours}") | ("{python}")' for ours, python in (("true", "True"), ("null", "None"))}
PLACES: dict[str, dict[str, str]] = {
    "": {},
    "xml": {CHARACTER: r"[^\0-\x1f\"\\<]", LIMITED: r"[^\0-\x1f\"\\<\ud800-\udfff]"},
    "python": {UNICODE: BASIC, ESCAPES: r"[\"\\bfnrt]", '("false")': '("false") | ("False")', **LITERALS},
    "text": {LIMITED: r"[^\0-\x08\x0b\x0c\x0e-\x1f<\ud800-\udfff]"},
}
# A number with a larger exponent is infinite to most readers.
EXPONENT = re.compile(r"(?<=\[eE\] )(\w+ )(basic_number_digits)\{1, -1\}")
FOLLOWED = re.compile(r" \(=\(.*\)\)$", re.MULTILINE)  # by what a string must be: by JSON
STRING = re.compile(r'^root ::= \(\("\\"" (.*) "\\""\)\)$', re.MULTILINE)
ANY_TEXT = r"root ::= [^<]*"


def build_grammar(spec: dict[str, Any]) -> Any:
    """Return xgrammar's `Grammar` of a specification.

    Raises:
        RuntimeError: xgrammar cannot parse it.
    """
    from xgrammar import Grammar

    if "format" in spec:
        return Grammar.from_structural_tag(
            json.dumps({"type": "structural_tag", "format": _with_grammars(spec["format"])})
        )
    if "json" in spec:
        return Grammar.from_ebnf(_json_grammar(spec["json"], spec.get("place", "")))
    if "text" in spec:
        grammar = _json_grammar(spec["text"], "text")
        return Grammar.from_ebnf(STRING.sub(r"root ::= ((\1))", grammar) if STRING.search(grammar) else ANY_TEXT)
    if "regex" in spec:
        return Grammar.from_regex(spec["regex"])
    if "choice" in spec:
        return Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, spec['choice']))}")
    return Grammar.from_ebnf(spec["grammar"])


def _json_grammar(schema: Any, place: str) -> str:
    """Return the EBNF of a JSON schema."""
    from xgrammar import Grammar

    # White space is as json.dumps writes it: unbounded white space could go on until max_tokens.
    grammar = str(Grammar.from_json_schema(json.dumps(schema), any_whitespace=False))
    for part, replacement in (
        PLACES[place] | {part: MENDED[part] for part in MENDED if part not in PLACES[place]}
    ).items():
        grammar = grammar.replace(part, replacement)
    grammar = EXPONENT.sub(r"\1[12]? \2{1, 2}", QUOTED_ADDRESS.sub("", grammar))
    return FOLLOWED.sub("", grammar) if place else grammar


def _with_grammars(value: Any) -> Any:
    """Return a format, or a part of it, with grammars in place of specifications."""
    if isinstance(value, list):
        return [_with_grammars(child) for child in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "specified":
        return {"type": "grammar", "grammar": str(build_grammar(value["spec"]))}
    return {key: _with_grammars(child) for key, child in value.items()}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
