"""Runs of characters that a lexer may take at once.

A lexer takes the longest lexeme. For a run of characters of one set, that is what a grammar of single characters says if,
wherever the run may begin or go on, nothing else may take one of its characters. This is checked on a finite automaton that
knows what has been read, but not by which reference it has come into a rule: so it allows more than the grammar does.
"""

from dataclasses import dataclass, field

from pdserve.grammars.ebnf import Characters, Choice, Node, Reference, Repeat, Run, Sequence

MAX_COPIES = 16  # of what is repeated a number of times
MAX_STATES = 500  # of the automaton; with more, no run is taken at once


@dataclass(frozen=True)
class _Edge:
    """A transition by a character of a set. `run` and `goes_on`: of a run, at its beginning or not."""

    node: Characters | Run
    target: int
    goes_on: bool = False


@dataclass
class _Automaton:
    """A nondeterministic automaton of a grammar."""

    edges: list[list[_Edge]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)  # transitions without a character

    def new(self) -> int:
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def closure(self, states: set[int]) -> frozenset[int]:
        """Return the states with edges that are reached without a character."""
        seen, stack = set(states), list(states)
        while stack:
            for target in self.free[stack.pop()]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return frozenset(state for state in seen if self.edges[state])


def unsafe_runs(rules: dict[str, Node]) -> set[Node]:
    """Return the runs that a lexer may not take at once."""
    automaton = _Automaton()
    ends = {name: (automaton.new(), automaton.new()) for name in rules}
    for name, rule in rules.items():
        _add(automaton, rule, *ends[name], ends)
    all_runs: set[Node] = {edge.node for edges in automaton.edges for edge in edges if isinstance(edge.node, Run)}
    found: set[Node] = set()
    if not all_runs:
        return found
    start = automaton.closure({ends["root"][0]})
    seen, stack = {start}, [start]
    while stack and found != all_runs:
        edges = [edge for state in stack.pop() for edge in automaton.edges[state]]
        for edge in edges:
            if isinstance(edge.node, Run) and edge.node not in found:
                found |= {node for other in edges if (node := _conflict(edge, other)) is not None}
        points = sorted(
            {point for edge in edges for low, high in edge.node.characters.ranges for point in (low, high + 1)}
        )
        for targets in {frozenset(edge.target for edge in edges if point in edge.node.characters) for point in points}:
            following = automaton.closure(set(targets))
            if following and following not in seen:
                seen.add(following)
                stack.append(following)
        if len(seen) > MAX_STATES:
            return all_runs
    return found


def _conflict(edge: _Edge, other: _Edge) -> Node | None:
    """Return the run of an edge, if the other one may take one of its characters and would end elsewhere."""
    same = edge.node == other.node and edge.goes_on == other.goes_on
    return None if same or not edge.node.characters.overlaps(other.node.characters) else edge.node


def _add(automaton: _Automaton, node: Node, start: int, end: int, ends: dict[str, tuple[int, int]]) -> None:
    """Add the transitions of a node between two states."""
    match node:
        case Characters():
            automaton.edges[start].append(_Edge(node, end))
        case Run():
            inside = automaton.new()
            automaton.edges[start].append(_Edge(node, inside))
            automaton.edges[inside].append(_Edge(node, inside, goes_on=True))
            automaton.free[inside].append(end)
        case Reference(name):
            automaton.free[start].append(ends[name][0])
            automaton.free[ends[name][1]].append(end)
        case Sequence(parts):
            for part in parts:
                middle = automaton.new()
                _add(automaton, part, start, middle, ends)
                start = middle
            automaton.free[start].append(end)
        case Choice(options):
            for option in options:
                _add(automaton, option, start, end, ends)
        case Repeat(part, least, most):
            count = max(least, 1) if most is None else most
            if count > MAX_COPIES:  # then any number of times, which allows more
                count, least, most = 1, 0, None
            before = after = automaton.new()
            automaton.free[start].append(after)
            for number in range(count):
                automaton.free[after] += [end] if number >= least else []
                before, after = after, automaton.new()
                _add(automaton, part, before, after, ends)
            automaton.free[after] += [end, *([before] if most is None else [])]
