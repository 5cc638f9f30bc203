"""Texts written again, with or without an edit: most of the answer stands in the prompt already."""

from __future__ import annotations

import random
import re

from .chats import add_user, end_turn
from .document import Document
from .facts import draw_facts
from .filler import filler, noise, scenery
from .words import ANIMALS, COLORS, NAMES, OBJECTS, OUTDOORS, made_up_word

COPY = (
    "Repeat this text:\n\n{text}",
    "Copy this text:\n\n{text}",
    "Write this text again:\n\n{text}",
    "Repeat: {text}",
)
REPLACE = (
    "Write this text again, but replace {old} with {new}:\n\n{text}", "Replace {old} with {new} in this text:\n\n{text}",
    "{text}\n\nReplace {old} with {new}.", "Change {old} to {new}:\n\n{text}",
)  # fmt: skip
APPEND = (
    "Add this sentence to the end: {new}\n\n{text}",
    'Write this text again and add "{new}" at the end:\n\n{text}',
)
LEAVE_OUT = ("Write this text again without the first sentence:\n\n{text}", "Remove the first sentence:\n\n{text}")


def unpredictable(rng: random.Random, words: int) -> list[str]:
    """Sentences of about ``words`` words, most of which nothing but the text itself tells: copying must look back."""
    sentences: list[str] = []
    style = rng.random()
    while sum(sentence.count(" ") + 1 for sentence in sentences) < words:
        if style < 0.45:
            sentences += [fact.statement(rng) for fact in draw_facts(rng, 2)]
        elif style < 0.8:
            sentences.append(noise(rng) if rng.random() < 0.6 else scenery(rng))
        else:
            sentences += filler(rng, words)
    return sentences


def editing_chat(rng: random.Random, words: int) -> Document:
    """Texts of at most about half of ``words`` words, and each after an edit; most have several short ones."""
    document = Document()
    turns = rng.choice((1, 2, 4, 6))
    for index in range(turns):
        sentences = unpredictable(rng, rng.randint(5, max(8, words // 2 // turns)))
        content, answer = edit(rng, sentences)
        end_turn(add_user(document, content).add(answer, answer=True), last=index == turns - 1)
    return document


def edit(rng: random.Random, sentences: list[str]) -> tuple[str, str]:
    """A request to write the sentences again, and their text after it."""
    text = " ".join(sentences)
    known = [word for word in (*NAMES, *ANIMALS, *COLORS, *OBJECTS, *OUTDOORS) if re.search(rf"\b{word}\b", text)]
    draw = rng.random()
    if draw < 0.25 or not known:
        return rng.choice(COPY).format(text=text), text
    if draw < 0.85:
        old = rng.choice(known)
        pool = next(pool for pool in (NAMES, ANIMALS, COLORS, OBJECTS, OUTDOORS) if old in pool)
        new = rng.choice(pool) if rng.random() < 0.85 else made_up_word(rng)
        return rng.choice(REPLACE).format(old=old, new=new, text=text), re.sub(rf"\b{old}\b", new, text)
    if draw < 0.93 or len(sentences) < 2:
        new = unpredictable(rng, 5)[0]
        return rng.choice(APPEND).format(new=new, text=text), f"{text} {new}"
    return rng.choice(LEAVE_OUT).format(text=text), " ".join(sentences[1:])
