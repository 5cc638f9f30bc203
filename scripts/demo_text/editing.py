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
    """A text of at most about half of ``words``, and the same text after an edit."""
    sentences = unpredictable(rng, rng.randint(6, max(8, words // 2 - 20)))
    text = " ".join(sentences)
    known = [word for word in (*NAMES, *ANIMALS, *COLORS, *OBJECTS, *OUTDOORS) if re.search(rf"\b{word}\b", text)]
    draw = rng.random()
    if draw < 0.25 or not known:
        content, answer = rng.choice(COPY).format(text=text), text
    elif draw < 0.8:
        old = rng.choice(known)
        pool = next(pool for pool in (NAMES, ANIMALS, COLORS, OBJECTS, OUTDOORS) if old in pool)
        new = rng.choice(pool) if rng.random() < 0.85 else made_up_word(rng)
        content = rng.choice(REPLACE).format(old=old, new=new, text=text)
        answer = re.sub(rf"\b{old}\b", new, text)
    elif draw < 0.9 or len(sentences) < 2:
        new = filler(rng, 5)[0]
        content, answer = rng.choice(APPEND).format(new=new, text=text), f"{text} {new}"
    else:
        content, answer = rng.choice(LEAVE_OUT).format(text=text), " ".join(sentences[1:])
    return end_turn(add_user(Document(), content).add(answer, answer=True), last=True)
