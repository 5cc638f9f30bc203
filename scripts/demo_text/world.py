"""Facts of the world, which are the same everywhere: capitals, sums and some others."""

from __future__ import annotations

import random

from .document import Document, add_answer, add_question
from .words import CAPITALS

WORLD_FACTS: tuple[tuple[str, str], ...] = (
    ("What color is the sky?", "The sky is blue."), ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."), ("What color is a banana?", "A banana is yellow."),
    ("What is a baby dog called?", "A baby dog is called a puppy."),
    ("What is a baby cat called?", "A baby cat is called a kitten."),
    ("What is a baby cow called?", "A baby cow is called a calf."),
    ("What is a baby sheep called?", "A baby sheep is called a lamb."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("What is the opposite of up?", "The opposite of up is down."),
    ("What is the opposite of day?", "The opposite of day is night."),
    ("What is the opposite of left?", "The opposite of left is right."),
    ("What is the opposite of old?", "The opposite of old is young."),
    ("What is the opposite of fast?", "The opposite of fast is slow."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What do bees make?", "Bees make honey."), ("What do cows eat?", "Cows eat grass."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What planet do we live on?", "We live on the planet Earth."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    ("What is the highest mountain?", "The highest mountain is Mount Everest."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("What is ice?", "Ice is frozen water."),
    ("What comes after Monday?", "After Monday comes Tuesday."),
    ("What comes after Friday?", "After Friday comes Saturday."),
)  # fmt: skip


def capital_qa(rng: random.Random, country: str | None = None) -> tuple[str, str]:
    country = country or rng.choice(list(CAPITALS))
    capital = CAPITALS[country]
    if rng.random() < 0.15 and country != "England":
        return f"Which country has the capital {capital}?", f"{capital} is the capital of {country}."
    question = rng.choice(
        ("What is the capital of {}?", "What is the capital of {}?", "What is the capital city of {}?",
         "Which city is the capital of {}?", "Do you know the capital of {}?", "Tell me the capital of {}.")
    )  # fmt: skip
    return question.format(country), f"The capital of {country} is {capital}."


def sum_qa(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    sign = rng.random()
    if sign < 0.55:
        word, symbol, result = "plus", "+", left + right
    elif sign < 0.8:
        left, right = max(left, right), min(left, right)
        word, symbol, result = "minus", "-", left - right
    else:
        word, symbol, result = "times", "*", left * right
    shown = word if rng.random() < 0.7 else symbol
    question = rng.choice(("What is {} {} {}?", "What is {} {} {}?", "How much is {} {} {}?"))
    return question.format(left, shown, right), f"{left} {shown} {right} is {result}."


def world_qa(rng: random.Random) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.55:
        return capital_qa(rng)
    return sum_qa(rng) if draw < 0.75 else rng.choice(WORLD_FACTS)


def world_document(rng: random.Random) -> Document:
    """A few facts of the world, as statements or as questions and answers."""
    document = Document()
    style = rng.random()
    if style < 0.15:  # a sentence that starts with the capital, or a count
        for _ in range(rng.randint(1, 3)):
            country = rng.choice(list(CAPITALS))
            document.add(f"{CAPITALS[country]} is the capital of").add(f" {country}.", answer=True).add(" ")
        document.text = document.text.rstrip()
        return document
    for index in range(rng.choice((1, 1, 1, 2, 3, 5))):
        question, answer = capital_qa(rng) if rng.random() < 0.5 else world_qa(rng)
        if style < 0.65:
            add_answer(document.add(" " if index else ""), answer)
        else:
            add_question(document.add("\n\n" if index else ""), question, answer)
    return document
