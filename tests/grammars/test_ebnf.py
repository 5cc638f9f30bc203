"""EBNF: what grammars allow, against the languages that their rules define."""

import itertools
import random

import pytest

from pdserve.grammars.ebnf import Characters, Choice, Node, Reference, Repeat, Run, Sequence, parse_ebnf
from pdserve.grammars.specification import lark_grammar
from tests.grammars.byte_matcher import ByteMatcher

ALPHABET, MOST = "abc", 4
WORDS = ["".join(word) for length in range(MOST + 1) for word in itertools.product(ALPHABET, repeat=length)]
ATOMS = ['"a"', '"b"', '"ab"', "[a-b]", "[^a]", "[b-c]", "[a-c]", '""']


def matcher(grammar: str) -> ByteMatcher:
    return ByteMatcher(lark_grammar({"grammar": grammar}, {}))


def language(grammar: str) -> set[str]:
    """Return the words of a grammar of at most MOST characters: the least fixed point of its rules."""
    rules = parse_ebnf(grammar)
    known: dict[str, set[str]] = {name: set() for name in rules}
    while (grown := {name: words_of(rule, known) for name, rule in rules.items()}) != known:
        known = grown
    return known["root"]


def words_of(node: Node, known: dict[str, set[str]]) -> set[str]:
    match node:
        case Characters(characters):
            return {letter for letter in ALPHABET if ord(letter) in characters}
        case Reference(name):
            return known[name]
        case Choice(options):
            return {word for option in options for word in words_of(option, known)}
        case Sequence(parts):
            words = {""}
            for part in parts:
                words = joined(words, words_of(part, known))
            return words
        case Repeat(part, least, most):
            once, words, found = words_of(part, known), {""}, set[str]()
            for count in range(MOST + least + 1 if most is None else most + 1):
                found |= words if count >= least else set()
                words = joined(words, once)
            return found
        case Run():
            raise AssertionError("a parser finds no runs")


def joined(first: set[str], second: set[str]) -> set[str]:
    return {one + other for one in first for other in second if len(one + other) <= MOST}


def random_grammar(drawn: random.Random) -> str:
    """Return a grammar of three rules, which refer to each other."""

    def expression(depth: int) -> str:
        kind = drawn.choice(["atom", "atom", "rule"] + ["sequence", "choice", "repeat"] * (depth > 0))
        match kind:
            case "rule":
                return drawn.choice(["root", "x", "y"])
            case "sequence":
                return f"{expression(depth - 1)} {expression(depth - 1)}"
            case "choice":
                return f"({expression(depth - 1)} | {expression(depth - 1)})"
            case "repeat":
                return f"({expression(depth - 1)}){drawn.choice(['*', '+', '?', '{1,2}', '{2}', '{0,}'])}"
        return drawn.choice(ATOMS)

    return "\n".join(
        f"{name} ::= {expression(3)} | {expression(2)} | {drawn.choice(ATOMS)}" for name in ("root", "x", "y")
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_allow_their_languages(seed: int) -> None:
    grammar = random_grammar(random.Random(seed))
    allows = matcher(grammar).matches
    assert {word for word in WORDS if allows(word)} == language(grammar), grammar


JSON = r"""
root ::= value  # of RFC 8259, as llama.cpp has it
value ::= object | array | string | number | "true" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
array ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" (
  [^"\\\x7F\x00-\x1F]
  | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
)* "\""
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (JSON, ['{"a": [1, -2.5, "é\\n\\u00e9"], "b":true}', "[]"], ['{"a" 1}', '"\x01"', "01"]),
        ('root ::= name "!"\nname ::= [a-z] name | [a-z]', ["a!", "abc!"], ["!", "a"]),
        ('root ::= a b\na ::= [a-z]+\nb ::= [a-z] "!"', ["ab!", "abcd!"], ["a!"]),
        (r'root ::= [\]\-\\^] "é\u00e9\U0001F600\x41\t\""', [']éé😀A\t"', '^éé😀A\t"'], ['aéé😀A\t"']),
        ("root ::= " + "(" * 60 + '"a"' + ")?" * 60, ["", "a"], ["aa"]),
        ("root ::= [^a-z]{2,3}", ["\n漢", "😀ÄB"], ["a", "A", "ABCD"]),
    ],
)
def test_grammars(grammar: str, good: list[str], bad: list[str]) -> None:
    allows = matcher(grammar).matches
    assert ([*filter(allows, good)], [*filter(allows, bad)]) == (good, [])


def test_a_string_is_a_lexeme_of_its_own() -> None:
    """Else a mask within it reads every token of the vocabulary character by character."""
    lines = lark_grammar({"grammar": JSON}, {}).splitlines()
    assert any(r"\x{23}-\x{5b}" in line and "]+/" in line for line in lines)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("nothing", r"a rule must begin with its name and ::= \(line 1\)"),
        ('root ::= "a"\n\nx ::= ("b"', r"a parenthesis is not closed \(line 3\)"),
        ("root ::= x", "the rule 'x' is not defined"),
        ('x ::= "a"', "there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', r"the rule 'root' is defined twice \(line 2\)"),
        ('root ::= "a" (="b")', r"lookaheads are not supported \(line 1\)"),
        ('root ::= TagDispatch(("a", b))', r"begins nothing that EBNF has \(line 1\)"),
        (r'root ::= "\q"', r"\\q is not an escape \(line 1\)"),
        ("root ::= [z-a]", r"the range z-a is empty \(line 1\)"),
        ('root ::= "a"{3,2}', r"\{3,2\} asks for more than it allows \(line 1\)"),
    ],
)
def test_invalid_grammars(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lark_grammar({"grammar": grammar}, {})
