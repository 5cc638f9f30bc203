"""Cells: a large fleet is forecast by a small one with the same split, which gets its share of the requests.

A forecast of all instances would take longer than the controller may wait. Requests wait a little less in the fleet than in
its cell, since it balances more of them, so a cell errs on the safe side.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from pdserve.tools.autoscaler.change import Change
from pdserve.tools.autoscaler.situation import Situation
from pdserve.tools.bench.requests import Request

MAX_INSTANCES = 16  # in a forecast
MIN_OF_ROLE = 2  # instances that a cell has of a role, if the fleet has as many
MAX_SHARED = 0.05  # share of the requests that blocks of one conversation are in, at most
T = TypeVar("T", bound=Hashable)


def cell_share(counts: Mapping[str, int]) -> float:
    """Return the share of a fleet, given by numbers of instances, that is simulated in its place; 1.0: all of it."""
    numbers = [count for count in counts.values() if count]
    if sum(numbers) <= MAX_INSTANCES:
        return 1.0
    return min(1.0, max(MAX_INSTANCES / sum(numbers), MIN_OF_ROLE / min(numbers)))


def make_cell(situation: Situation, change: Change | None) -> tuple[Situation, Change | None]:
    """Return the situation of the fleet's cell, and the change made as much smaller; a small fleet is its own cell."""
    share = cell_share(situation.counts)
    if share == 1.0:
        return situation, change
    names = _members(situation, share)
    loads = [*situation.received, *situation.expected]
    # Exactly the cell's share of instances, which rounding makes another than `share`.
    kept = _requests(loads, len(names) / len(situation.names))
    numbers = {loads[old].index: new for new, old in enumerate(kept)}
    chosen = [
        replace(loads[old], index=new, after=numbers.get(after) if (after := loads[old].after) is not None else None)
        for new, old in enumerate(kept)
    ]
    first = sum(old < len(situation.received) for old in kept)
    smaller = replace(
        situation,
        members={name: role for name, role in situation.members.items() if name in names},
        moves=[move for move in situation.moves if move[1] in names],
        received=chosen[:first],
        waiting=frozenset(numbers[index] for index in situation.waiting if index in numbers),
        expected=chosen[first:],
    )
    if change is None:
        return smaller, None
    count, others = max(1, round(change.count * share)), round(change.others * share)
    return smaller, replace(change, count=count, others=max(1, others) if change.others else 0)


def _members(situation: Situation, share: float) -> set[str]:
    """Return the instances of the cell: their share of those that had the same roles at the same times."""
    histories: dict[str, list[tuple[float, str]]] = {name: [(0.0, role)] for name, role in situation.members.items()}
    for at, name, role in situation.moves:
        histories.setdefault(name, []).append((at, role))
    groups = defaultdict[Hashable, list[str]](list)
    for name in sorted(histories):
        groups[tuple(histories[name])].append(name)
    counts = _apportion({history: len(names) for history, names in groups.items()}, share)
    return {name for history, names in groups.items() for name in names[: counts[history]]}


def _apportion(sizes: Mapping[T, int], share: float) -> Counter[T]:
    """Return each size times `share`, in whole numbers that add up to the sum times `share` (largest remainder method)."""
    counts = Counter({key: int(size * share) for key, size in sizes.items()})
    remainders = sorted(sizes, key=lambda key: counts[key] - sizes[key] * share)
    counts.update(remainders[: round(sum(sizes.values()) * share) - counts.total()])
    return counts


def _requests(loads: Sequence[Request], share: float) -> list[int]:
    """Return the indices of whole conversations with about `share` of all tokens, in the order of their hashes."""
    uses = Counter(name for load in loads for name, _ in load.blocks)
    most = max(1.0, MAX_SHARED * len(loads))

    def conversation(load: Request) -> str:
        own = (name for name, _ in load.blocks if uses[name] <= most)
        return next(own, str(load.index))

    groups = defaultdict[str, list[int]](list)
    for place, load in enumerate(loads):
        groups[conversation(load)].append(place)
    left = share * _tokens(loads)
    kept = list[int]()
    for name in sorted(groups, key=lambda name: blake2b(name.encode()).digest()):
        if left <= 0:
            break
        kept += groups[name]
        left -= _tokens(loads[place] for place in groups[name])
    return sorted(kept)


def _tokens(loads: Iterable[Request]) -> int:
    return sum(load.input_tokens + load.output_tokens for load in loads)
