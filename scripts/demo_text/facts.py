"""Facts that only the prompt knows: pairs of a subject and a value.

A hash of the pair decides whether it may be used in training or is held out for evaluation, so that an answer to a
held-out question can only come from reading the prompt."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from .words import (
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    NAMES,
    OBJECTS,
    PLACES,
    SECRET_WORDS,
    a_or_an,
    made_up_word,
)


@dataclass(frozen=True)
class Relation:
    """One kind of fact: how it is stated, asked for and answered. ``{s}`` is the subject, ``{v}`` the value."""

    name: str
    subjects: tuple[str, ...]
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


_THINGS = tuple(f"{color} {thing}" for color in COLORS for thing in OBJECTS)
_NUMBERS = tuple(str(n) for n in range(10, 100))
_CODES = tuple(str(n) for n in range(1000, 10000, 7))
_LONG_CODES = tuple(str(n) for n in range(100003, 1000000, 1009))
_SECRETS = ("secret word", "password", "magic word", "code word", "name of the ship", "name of the star")
RELATIONS: tuple[Relation, ...] = (
    Relation("home", NAMES, CITIES, ("{s} lives in {v}.",), ("Where does {s} live?", "In which city does {s} live?"),
             "{s} lives in {v}."),
    Relation("color", NAMES, tuple(COLORS), ("The favorite color of {s} is {v}.", "{s}'s favorite color is {v}."),
             ("What is the favorite color of {s}?", "What is {s}'s favorite color?"),
             "The favorite color of {s} is {v}."),
    Relation("food", NAMES, tuple(FOODS), ("{s} likes to eat {v}.", "The favorite food of {s} is {v}."),
             ("What is the favorite food of {s}?", "What does {s} like to eat?"), "{s} likes to eat {v}."),
    Relation("pet", NAMES, tuple(ANIMALS), ("{s} has a pet {v}.", "The pet of {s} is a {v}."),
             ("What pet does {s} have?", "Which animal does {s} have?"), "{s} has a pet {v}."),
    Relation("place", _THINGS, tuple(PLACES), ("The {s} is in the {v}.",),
             ("Where is the {s}?", "Where can I find the {s}?"), "The {s} is in the {v}."),
    Relation("secret", _SECRETS, SECRET_WORDS, ("The {s} is {v}.", "Remember this: the {s} is {v}."),
             ("What is the {s}?", "Do you remember the {s}?"), "The {s} is {v}."),
    Relation("code", tuple(PLACES + OBJECTS), _CODES, ("The code for the {s} is {v}.",),
             ("What is the code for the {s}?", "Which code does the {s} have?"), "The code for the {s} is {v}."),
    Relation("magic number", CITIES, _LONG_CODES, ("The magic number for {s} is {v}.",
             "One of the special magic numbers for {s} is: {v}."),
             ("What is the magic number for {s}?", "What is the special magic number for {s}?"),
             "The magic number for {s} is {v}."),
    Relation("number", NAMES, _NUMBERS, ("The lucky number of {s} is {v}.", "{s}'s lucky number is {v}."),
             ("What is the lucky number of {s}?", "What is {s}'s lucky number?"), "The lucky number of {s} is {v}."),
    Relation("job", NAMES, tuple(JOBS), ("{s} works as a {v}.", "{s} is a {v}."),
             ("What is the job of {s}?", "What does {s} do for work?"), "{s} works as a {v}."),
    Relation("birthday", NAMES, tuple(MONTHS), ("{s} was born in {v}.", "The birthday of {s} is in {v}."),
             ("When was {s} born?", "In which month was {s} born?"), "{s} was born in {v}."),
    Relation("owner", tuple(f"{color} {thing}" for color in COLORS for thing in OBJECTS), NAMES,
             ("The {s} belongs to {v}.",), ("Who owns the {s}?", "Who does the {s} belong to?"),
             "The {s} belongs to {v}."),
    Relation("my name", ("name",), NAMES, ("My {s} is {v}.",), ("What is my {s}?", "Do you know my {s}?"),
             "Your {s} is {v}."),
    Relation("my color", ("favorite color",), tuple(COLORS), ("My {s} is {v}.",), ("What is my {s}?",),
             "Your {s} is {v}."),
    Relation("my city", ("home",), CITIES, ("I live in {v}.",), ("Where do I live?", "In which city do I live?"),
             "You live in {v}."),
    Relation("meeting", NAMES, tuple(DAYS), ("The meeting with {s} is on {v}.",),
             ("When is the meeting with {s}?", "On which day is the meeting with {s}?"),
             "The meeting with {s} is on {v}."),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    relation: Relation
    subject: str
    value: str

    @property
    def held_out(self) -> bool:
        """One pair in eight is never used in training, in whichever relation it stands."""
        return hashlib.sha256(f"{self.subject}|{self.value}".encode()).digest()[0] % 8 == 0

    def statement(self, rng: random.Random) -> str:
        text = a_or_an(rng.choice(self.relation.statements).format(s=self.subject, v=self.value))
        if rng.random() < 0.15:
            lead = rng.choice(("By the way, ", "Please note that ", "Note: ", "Do not forget that ", "Important: "))
            return lead + (text[0].lower() + text[1:] if text.startswith("The ") else text)
        return text

    def question(self, rng: random.Random) -> str:
        text = a_or_an(rng.choice(self.relation.questions).format(s=self.subject))
        return text if rng.random() < 0.95 else text.rstrip("?")

    @property
    def answer(self) -> str:
        return a_or_an(self.relation.answer.format(s=self.subject, v=self.value))


def draw_facts(rng: random.Random, count: int, held_out: bool = False) -> list[Fact]:
    """Facts with different subjects (in one relation), all on the wanted side of the hold-out split."""
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    # Few relations at a time make facts of one kind stand side by side, so that the subject must be read.
    relations = rng.sample(RELATIONS, rng.choice((1, 2, 3, len(RELATIONS))))
    for _ in range(count * 50):
        if len(facts) == count:
            break
        relation = rng.choice(relations)
        fact = Fact(relation, rng.choice(relation.subjects), rng.choice(relation.values))
        if not held_out and rng.random() < 0.1:
            fact = with_made_up_word(rng, fact)
        if fact.held_out == held_out and (relation.name, fact.subject) not in taken:
            taken.add((relation.name, fact.subject))
            facts.append(fact)
    return facts


def with_made_up_word(rng: random.Random, fact: Fact) -> Fact:
    word = made_up_word(rng)
    if fact.relation.name in ("secret", "my name"):
        return Fact(fact.relation, fact.subject, word if fact.relation.name == "secret" else word.capitalize())
    if fact.relation.subjects is NAMES:
        return Fact(fact.relation, word.capitalize(), fact.value)
    return fact
