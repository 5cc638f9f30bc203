"""What training draws its documents from."""

from __future__ import annotations

import random

from .chats import add_user, end_turn, passage_chat, remember_chat, short_chat
from .document import EOS, TURN_END, TURN_START, Document, add_answer, add_question, finish
from .editing import editing_chat
from .extraction import extraction_chat
from .passages import list_document, passage_document
from .stories import story
from .thinking import thinking_chat
from .tools import tool_chat
from .world import sum_qa, world_document


def draw_document(rng: random.Random, words: int) -> Document:
    """One training document of at most about ``words`` words. Every document ends with the end-of-text token."""
    draw = rng.random()
    if words < 60:
        draw *= 0.45
    if draw < 0.17:
        document = world_document(rng)
    elif draw < 0.38:
        document = short_chat(rng)
    elif draw < 0.48:
        document = Document(story(rng))
    elif draw < 0.6:
        document = list_document(rng, rng.randint(40, min(words, 400)))
    else:
        return draw_long_document(rng, words)
    return finish(rng, document)


def sums_document(rng: random.Random) -> Document:
    """A few small sums, which are learned by heart."""
    document = Document()
    count = rng.randint(1, 6)
    as_chat = rng.random() < 0.6
    for index in range(count):
        question, answer = sum_qa(rng)
        if as_chat:
            end_turn(add_answer(add_user(document, question), answer), index == count - 1)
        else:
            add_question(document.add("\n\n" if index else ""), question, answer)
    return document.add(EOS)


def draw_long_document(rng: random.Random, words: int) -> Document:
    draw = rng.random()
    if draw < 0.5:
        document = passage_document(rng, words)
    elif draw < 0.88:
        document = passage_chat(rng, words)
    else:
        document = remember_chat(rng, words)
    return finish(rng, document)


SKILLS = ("calls", "JSON", "thinking", "edits")


def skill_case(rng: random.Random, skill: str, words: int) -> tuple[str, str]:
    """A prompt and its answer in one of `SKILLS`: the first turn of a document. It has one right answer."""
    makers = {"calls": tool_chat, "JSON": extraction_chat}
    while True:
        chats = {"thinking": thinking_chat, "edits": editing_chat}
        document = makers[skill](rng) if skill in makers else chats[skill](rng, words)
        prompt, start, rest = document.text.partition(f"{TURN_START}assistant\n")
        thought, tag, answer = rest.partition("<think>\n")
        is_vague = "small talk" in rest if skill == "thinking" else skill == "calls" and "<tool_call>" not in rest
        if is_vague or (skill == "JSON" and "the keys" not in prompt):
            continue
        return prompt + start + (tag if not thought else ""), (answer if tag else rest).partition(TURN_END)[0]


def draw_skill(rng: random.Random, words: int) -> Document:
    """A document of what the second part of training adds: calls, JSON, thinking blocks, edited copies."""
    draw = rng.random()
    if draw < 0.3:
        document = tool_chat(rng)
    elif draw < 0.54:
        document = extraction_chat(rng)
    elif draw < 0.7:
        document = thinking_chat(rng, words)
    else:
        document = editing_chat(rng, words)
    return document.add(EOS)
