"""Text around facts: scenery, stories, noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .facts import Fact
from .stories import story_sentences
from .words import ANIMALS, COLORS, DAYS, FOODS, MONTHS, NAMES, OBJECTS, OUTDOORS, SECRET_WORDS, expand, made_up_word
from .world import WORLD_FACTS, world_qa

SCENERY = (
    "The [river|road|path|wind] [ran|went|led] [past|through|around] the [old|big|quiet|little] {P}.",
    "[Clouds|Birds|Leaves] [moved|drifted|flew] [slowly|quietly] over the {P}.",
    "A {K} [sat|slept|stood] [beside|behind|near] the {P} and [looked at the sky|did not move|waited].",
    "[In the morning|At noon|In the evening|At night], the {P} was [quiet|full of people|bright|dark and cold].",
    "Some [children|people|travelers] [walked|ran] to the {P} [with a {O}|in the rain|with a {K}].",
    "The {O} on the table was [{color}|old|new|very small].",
    "[Nobody|Everybody|An old man] [talked|knew] about the {P} [in those days|at that time].",
    "It was [{day}|a {day}] in {month}, and the [sun was shining|rain fell|snow was deep|air was warm].",
    "[There were|They sold|People ate] {F} and [{F2}|bread] at the {P}.",
    "The [train|bus|ship|wagon] to the {P} was [late|full|on time|empty] [again|that day|as always].",
    "[Old|Young] {N} [laughed|said nothing|told a story about a {K}|sang a song].",
    "Far away, a {K} [called|cried], and then [it was quiet again|another one answered].",
    "The [walls|windows|doors] of the {P} were {color}.",
    "[Every year|Once a week|Sometimes], there is a [market|party|concert] near the {P}.",
    "[Perhaps|Maybe] it will [rain|snow|be sunny] tomorrow.",
)


def scenery(rng: random.Random) -> str:
    slots = {
        "P": rng.choice(OUTDOORS), "K": rng.choice(ANIMALS), "O": rng.choice(OBJECTS), "color": rng.choice(COLORS),
        "day": rng.choice(DAYS), "month": rng.choice(MONTHS), "F": rng.choice(FOODS), "F2": rng.choice(FOODS),
        "N": rng.choice(NAMES),
    }  # fmt: skip
    return expand(rng, rng.choice(SCENERY), slots)


def noise(rng: random.Random) -> str:
    """A sentence of known and made-up words in no order, so that odd text around a fact does no harm."""
    made_up = rng.choice((0.0, 0.5, 1.0))
    words = [
        made_up_word(rng) if rng.random() < made_up else rng.choice(SECRET_WORDS) for _ in range(rng.randint(4, 12))
    ]
    return " ".join(words).capitalize() + "."


def repetition(rng: random.Random, words: int) -> list[str]:
    """The same few sentences over and over, as people pad a prompt."""
    makers = (scenery, scenery, noise, lambda r: r.choice(WORLD_FACTS)[1])
    period = [rng.choice(makers)(rng) for _ in range(rng.randint(1, 5))]
    length = sum(sentence.count(" ") + 1 for sentence in period)
    return period * (1 + words // length)


def filler(rng: random.Random, words: int) -> list[str]:
    """Sentences without retrieval facts, about ``words`` words of them."""
    sentences: list[str] = []
    count = 0
    style = rng.random()
    if style > 0.92:
        return repetition(rng, words)
    if style > 0.88:
        return [noise(rng) for _ in range(1 + words // 8)]
    while count < words:
        if rng.random() < (0.15 if style < 0.4 else 0.9):
            piece = story_sentences(rng)
        elif rng.random() < 0.9:
            piece = [scenery(rng) for _ in range(rng.randint(1, 6))]
        else:
            piece = [world_qa(rng)[1]]
        for sentence in piece:
            if count >= words:
                break
            sentences.append(sentence)
            count += sentence.count(" ") + 1
    return sentences


def scatter(rng: random.Random, facts: Sequence[Fact], words: int) -> str:
    """The facts at random places in filler text."""
    sentences = filler(rng, words)
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact.statement(rng))
    joiner = rng.random()
    if joiner < 0.8:
        return " ".join(sentences)
    return "".join(s + ("\n" if rng.random() < 0.15 else " ") for s in sentences).rstrip()
