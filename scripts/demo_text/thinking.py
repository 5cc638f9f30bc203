"""Answers after a thinking block, whose first tag the chat template writes if it is asked to."""

from __future__ import annotations

import random

from .chats import SMALL_TALK, end_turn, system_turn
from .document import TURN_END, TURN_START, Document, add_answer
from .facts import draw_facts
from .filler import scatter
from .words import expand
from .world import capital_qa, sum_qa, world_qa


def think(document: Document, question: str, thought: str) -> Document:
    document.add(f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n").add("<think>\n", given=True)
    return document.add(thought).add("\n</think>\n\n")


def thinking_chat(rng: random.Random, words: int) -> Document:
    """A question, a thought that leads to the answer, and the answer. Later prompts leave earlier thoughts out."""
    document = system_turn(rng)
    draw = rng.random()
    if draw < 0.3:
        facts = draw_facts(rng, rng.choice((1, 2, 3, 4)))
        fact = rng.choice(facts)
        question = fact.question(rng)
        text = scatter(rng, facts, max(8, min(words - 60, int(words * rng.random()))))
        document = think(document, f"{text}\n\n{question}", f"The text says: {fact.answer}")
        return end_turn(add_answer(document, fact.answer), last=True)
    if draw < 0.5:
        question, answer = sum_qa(rng)
        calculation, result = answer.rstrip(".").split(" is ")
        thought = f"I have to find {calculation}. The result is {result}."
    elif draw < 0.85:
        question, answer = capital_qa(rng) if rng.random() < 0.5 else world_qa(rng)
        thought = "I know this. " + answer
    else:
        question, answer = rng.choice(SMALL_TALK)
        question, answer = expand(rng, question), expand(rng, answer)
        thought = "This is small talk. I answer politely."
    return end_turn(think(document, question, thought).add(answer, answer=True), last=True)
