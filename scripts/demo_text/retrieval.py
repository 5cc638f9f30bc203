"""Held-out questions about a fact stated earlier in the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .facts import draw_facts
from .filler import filler, scatter


@dataclass(frozen=True)
class RetrievalCase:
    """A text with a held-out fact in it, and a question about that fact."""

    text: str
    question: str
    expected: str
    distance: int

    def prompt(self) -> str:
        return f"{self.text}\n\nQuestion: {self.question}\nAnswer:"

    def message(self) -> str:
        return f"{self.text}\n\n{self.question}"


def retrieval_cases(
    seed: int, count: int, count_tokens: Callable[[str], int], min_distance: int = 300, max_distance: int = 1500
) -> list[RetrievalCase]:
    """Held-out cases whose fact ends ``min_distance`` to ``max_distance`` tokens before the question begins."""
    rng = random.Random(seed)
    cases: list[RetrievalCase] = []
    while len(cases) < count:
        facts = draw_facts(rng, rng.randint(1, 6), held_out=True)
        if not facts:
            continue
        target = facts[0]
        wanted = rng.randint(min_distance + 20, max_distance - 60)
        before = scatter(rng, facts[1:], rng.randint(5, 150))
        after: list[str] = []
        distance = 0
        while distance < wanted:
            after += filler(rng, 20)
            distance = count_tokens(" ".join(after))
        if distance > max_distance:
            continue
        text = " ".join([before, target.statement(rng), *after])
        cases.append(RetrievalCase(text, target.question(rng), target.value, distance))
    return cases
