"""EBNF of clients means what it means to xgrammar, for which they may have written it."""

import random

import pytest

from tests.grammars.test_ebnf import WORDS, matcher, random_grammar

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_grammars_allow_what_they_allow_in_xgrammar(first: int) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install xgrammar")
    vocabulary = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"<|end|>"], stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(vocabulary)
    for seed in range(first, first + 100):
        grammar = random_grammar(random.Random(seed))
        compiled, allows = compiler.compile_grammar(grammar), matcher(grammar).matches

        def accepts(word: str, compiled: object = compiled) -> bool:
            follower = xgrammar.GrammarMatcher(compiled)
            return all(follower.accept_token(token) for token in [*word.encode(), 256])

        assert {*filter(allows, WORDS)} == {*filter(accepts, WORDS)}, grammar
