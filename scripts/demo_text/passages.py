"""Documents of facts and questions about them."""

from __future__ import annotations

import random

from .document import Document, add_answer, add_question
from .facts import Fact, draw_facts
from .filler import scatter
from .words import SECRET_WORDS


def list_document(rng: random.Random, words: int) -> Document:
    """Facts in a row and then most of them asked for: dense practice in looking back."""
    document = Document()
    facts = draw_facts(rng, max(2, min(24, words // 14)))
    style = rng.random()
    if style < 0.35:  # bare pairs, stated and then repeated in another order
        pairs = [(fact.subject, fact.value) for fact in facts]
        if style < 0.25:
            pairs = [(word, rng.choice(SECRET_WORDS)) for word in rng.sample(SECRET_WORDS, len(facts))]
        document.add("".join(f"{left}: {right}\n" for left, right in pairs)).add("\n")
        for left, right in rng.sample(pairs, len(pairs)):
            document.add(f"{left}:").add(f" {right}", answer=True).add("\n")
        return document
    document.add(" ".join(fact.statement(rng) for fact in facts) + "\n\n")
    for fact in rng.sample(facts, len(facts)):
        if style < 0.6:
            add_answer(document, fact.answer).add(" ")
        else:
            add_question(document, fact.question(rng), fact.answer, int(style < 0.7)).add("\n")
    return document


def passage_document(rng: random.Random, words: int) -> Document:
    """A long text with facts in it; questions stand in the middle and at the end."""
    document = Document()
    facts: list[Fact] = []
    pool = draw_facts(rng, max(2, min(40, words // 25)))
    style = int(rng.random() < 0.2)
    while pool and document.words() < words - 40:
        count = min(len(pool), rng.randint(1, 6))
        facts += pool[:count]
        new, pool = pool[:count], pool[count:]
        share = rng.randint(20, max(21, min(words - document.words() - 30, 1 + words // rng.randint(1, 4))))
        document.add(scatter(rng, new, share) + "\n\n")
        for fact in rng.sample(facts, min(len(facts), rng.randint(1, 6))):
            if rng.random() < 0.8:
                add_question(document, fact.question(rng), fact.answer, style).add("\n\n")
            else:
                add_answer(document, fact.answer).add("\n\n")
    document.text = document.text.rstrip()
    return document
