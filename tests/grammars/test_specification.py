"""Grammars of JSON schemas: strings of limited length are text that JSON can hold."""

from typing import Any

import pytest

from pdserve.grammars.specification import build_grammar

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'pdserve[structured]'")
STRING = {"type": "string", "minLength": 1, "maxLength": 3}


def accepts(schema: dict[str, Any], text: bytes) -> bool:
    vocabulary = xgrammar.TokenizerInfo([b"a", b"b", b"</s>"], stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_grammar(build_grammar({"json": schema}))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (STRING, ['"a"', '"é漢😀"', '"\x7f"'], ['""', '"abcd"', '"a\x13"', b'"\xed\xa0\x80"', '"\\"', 'a"']),
        ({"type": "string", "maxLength": 2}, ['""', '"ab"'], ['"abc"', '"\x00"']),
        ({"type": "string", "minLength": 2}, ['"ab"', '"abcdefghi"'], ['"a"', '"ab\x1f"']),
        ({"type": "string", "pattern": "^b+$", "maxLength": 1}, ['"b"'], ['"a"']),
        (
            {
                "type": "object",
                "properties": {"const": STRING, "minLength": STRING},
                "required": ["const", "minLength"],
            },
            ['{"const": "a", "minLength": "b"}'],
            ['{"const": "a\x13", "minLength": "b"}', '{"const": "a", "minLength": "\x13"}'],
        ),
        ({"const": STRING}, ['{"type":"string","minLength":1,"maxLength":3}'], ['"a"']),
        ({"anyOf": [STRING, {"type": "null"}]}, ['"a"', "null"], ['"\x13"']),
    ],
)
def test_strings_of_limited_length(schema: dict[str, Any], good: list[str], bad: list[str | bytes]) -> None:
    for text in good:
        assert accepts(schema, text.encode()), text
    for one in bad:
        assert not accepts(schema, one if isinstance(one, bytes) else one.encode()), one


HALF, PAIR = r'"\ud83d"', r'"\ud83d\ude00"'


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, [PAIR, r'"\u00e9\uE000"'], [HALF, HALF[:-1] + 'a"', r'"\ude00"', r'"\ud83d\u0041"']),
        ({"type": "string", "format": "json-pointer"}, ['"/a~1b/é"'], ['"/""', '"/\n"', r'"/\x"']),
        ({"type": "string", "format": "email"}, ['"a.b@c.de"'], [r'"\"a\x\"@c.de"']),
        ({"type": "number"}, ["-1.5e-200", "1e22"], ["1e400", "2e939"]),
    ],
)
def test_answers_are_json_that_every_reader_takes(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(schema, text.encode()), text
    for text in bad:
        assert not accepts(schema, text.encode()), text
