"""Lark's rules for a grammar in EBNF: see `ebnf.py`."""

import itertools

from pdserve.grammars.character_sets import CharacterSet
from pdserve.grammars.ebnf import EMPTY, Characters, Choice, Node, Reference, Repeat, Run, Sequence, parse_ebnf
from pdserve.grammars.runs import unsafe_runs

MAX_INLINED = 8  # references within each other


def lark_rules(text: str, prefix: str) -> list[str]:
    """Return the rules of a grammar, whose names begin with a prefix; the first is `root`.

    Raises:
        ValueError: the grammar is invalid.
    """
    rules = {name: _without_recursion(name, rule) for name, rule in parse_ebnf(text).items()}
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    used = {"root", *_reached("root", rules)}
    for name in sorted(used - rules.keys()):
        raise ValueError(f"the rule {name!r} is not defined")
    flat = {name: rule for name, rule in rules.items() if name not in _reached(name, rules)}
    with_runs = {name: _with_runs(rule, flat) for name, rule in rules.items()}
    return _Writer({name: rule for name, rule in with_runs.items() if name in used}, prefix).lines


def _without_recursion(name: str, rule: Node) -> Node:
    """Return a rule with a repetition in place of references to itself at the ends of its options, if it has no others."""
    options = rule.options if isinstance(rule, Choice) else (rule,)
    own = Reference(name)
    for at_end in (True, False):
        heads, rests = list[Node](), list[Node]()
        for option in options:
            parts = option.parts if isinstance(option, Sequence) else (option,)
            if len(parts) > 1 and parts[-1 if at_end else 0] == own:
                heads.append(Sequence(parts[:-1] if at_end else parts[1:]))
            else:
                rests.append(option)
        if heads and rests and not any(name in _references(node) for node in (*heads, *rests)):
            repeated, rest = Repeat(_choice(heads), 0, None), _choice(rests)
            return Sequence((repeated, rest) if at_end else (rest, repeated))
    return rule


def _with_runs(node: Node, rules: dict[str, Node]) -> Node:
    """Return a node with runs in place of repeated characters; `rules` are those that do not refer to themselves."""
    match node:
        case Sequence(parts):
            return Sequence(tuple(_with_runs(part, rules) for part in parts))
        case Choice(options):
            return Choice(tuple(_with_runs(option, rules) for option in options))
        case Repeat(Characters(characters), least, most) if least <= 1 and (most is None or most > 1):
            run = Run(characters, most)
            return Repeat(run, 0, 1) if least == 0 else run
        case Repeat(part, least, None) if least <= 1:
            return _repeated_options(_options(part, rules, 0), least, rules)
        case Repeat(part, least, most):
            return Repeat(_with_runs(part, rules), least, most)
    return node


def _repeated_options(options: list[Node], least: int, rules: dict[str, Node]) -> Node:
    """Return any number of options, `least` (0 or 1) or more, of which the characters are runs."""
    sets = [option.characters for option in options if isinstance(option, Characters)]
    others = [_with_runs(option, rules) for option in options if not isinstance(option, Characters)]
    if not sets:
        return Repeat(_choice(others), least, None)
    run = Run(CharacterSet.from_ranges(one for found in sets for one in found.ranges), None)
    maybe = Repeat(run, 0, 1)
    if not others:
        return run if least else maybe
    other = _choice(others)
    further = Repeat(Sequence((other, maybe)), 0, None)
    if not least:
        return Sequence((maybe, further))
    return Choice((Sequence((run, further)), Sequence((other, maybe, further))))


def _options(node: Node, rules: dict[str, Node], depth: int) -> list[Node]:
    """Return the options of a node, with those of the rules to which it refers if one of them is a character."""
    if isinstance(node, Choice):
        return [found for option in node.options for found in _options(option, rules, depth)]
    rule = rules.get(node.name) if isinstance(node, Reference) and depth < MAX_INLINED else None
    if isinstance(rule, Characters | Choice | Reference):
        found = _options(rule, rules, depth + 1)
        return found if any(isinstance(option, Characters) for option in found) else [node]
    return [node]


def _choice(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _reached(name: str, rules: dict[str, Node]) -> set[str]:
    """Return the names to which a rule refers, directly or by others."""
    found, stack = set[str](), [name]
    while stack:
        new = _references(rules[one]) - found if (one := stack.pop()) in rules else set()
        found |= new
        stack += new
    return found


def _references(node: Node) -> set[str]:
    match node:
        case Reference(name):
            return {name}
        case Sequence(parts) | Choice(parts):
            return {name for part in parts for name in _references(part)}
        case Repeat(part, _, _):
            return _references(part)
    return set()


class _Writer:
    """Writes rules; what is nested becomes a rule of its own, because Lark's parentheses may not be nested deeply."""

    def __init__(self, rules: dict[str, Node], prefix: str) -> None:
        self._unsafe = unsafe_runs(rules)
        self._prefix, self._number = prefix, itertools.count().__next__
        self._names = {name: f"{prefix}{'root' if name == 'root' else self._number()}" for name in rules}
        self._terminals: dict[str, str] = {}
        self.lines: list[str] = []
        for name, rule in rules.items():
            self.lines.append(f"{self._names[name]}: {self._expression(rule)}")

    def _expression(self, node: Node) -> str:
        if isinstance(node, Choice):
            return " | ".join(self._part(option) for option in node.options)
        if isinstance(node, Sequence) and node != EMPTY:
            return " ".join(map(self._part, node.parts))
        return self._part(node)

    def _part(self, node: Node) -> str:
        """Return a node as a part of a sequence."""
        match node:
            case Characters(characters):
                return self._terminal(characters.regex)
            case Run(characters, most):
                counts = "+" if most is None else f"{{1,{most}}}"
                if node in self._unsafe:
                    return self._terminal(characters.regex) + counts
                return self._terminal(characters.regex + counts)
            case Reference(name):
                return self._names[name]
            case Repeat(part, least, most):
                inner = self._part(part)
                if " " in inner or inner[-1] in "+*?}":
                    inner = self._rule(inner)
                return f"{inner}{{{least},{'' if most is None else most}}}"
        return self._rule(self._expression(node)) if node != EMPTY else '""'

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}{self._number()}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _terminal(self, regex: str) -> str:
        if regex not in self._terminals:
            self._terminals[regex] = f"{self._prefix.upper()}C{len(self._terminals)}"
            self.lines.append(f"{self._terminals[regex]}: /{regex}/")
        return self._terminals[regex]
