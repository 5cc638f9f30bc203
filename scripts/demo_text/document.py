"""A training text, and the character spans in it that are answers, which training weighs more than the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

EOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, TURN_START, TURN_END)


@dataclass
class Document:
    """A training text, and the character spans in it that are answers, or given by the server and not learned."""

    text: str = ""
    answers: list[tuple[int, int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, answer: bool = False, given: bool = False) -> Document:
        if answer:
            self.answers.append((len(self.text), len(self.text) + len(text)))
        if given:
            self.given.append((len(self.text), len(self.text) + len(text)))
        self.text += text
        return self

    def words(self) -> int:
        return self.text.count(" ")


def add_answer(document: Document, answer: str) -> Document:
    """Weigh the last word or two of an answer, which carry the value; the words before only echo the question."""
    cut = max(answer.rfind(marker) + len(marker) - 1 for marker in (" is ", " in ", " to ", " a ", " eat ", " on "))
    if cut <= 3:
        cut = answer.rfind(" ")
    return document.add(answer[:cut]).add(answer[cut:], answer=True)


def add_question(document: Document, question: str, answer: str, style: int = 0) -> Document:
    document.add(f"Question: {question}\nAnswer: " if style == 0 else f"Q: {question}\nA: ")
    return add_answer(document, answer)


def finish(rng: random.Random, document: Document) -> Document:
    """Every document ends with the end-of-text token; some are spelt as the British do."""
    if rng.random() < 0.2:
        document = respell(document)
    return document.add(EOS)


def respell(document: Document) -> Document:
    """``color`` and ``favorite`` as the British write them."""
    result, last = Document(), 0
    for start, end in document.answers:
        result.add(_british(document.text[last:start])).add(_british(document.text[start:end]), answer=True)
        last = end
    return result.add(_british(document.text[last:]))


def _british(text: str) -> str:
    return text.replace("color", "colour").replace("favorite", "favourite")
