"""Answers as JSON, for structured output: values of a text under the keys of a schema.

The server's grammar forces the keys, so most questions do not name them; the bracket at the beginning is then given to the
model and not learned, or it would answer other questions in JSON, too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

from .chats import add_user, end_turn, system_turn
from .document import Document
from .facts import Fact, draw_facts
from .filler import filler
from .words import ADJECTIVES, ANIMALS, CITIES, COLORS, DAYS, FOODS, JOBS, MONTHS, NAMES, OBJECTS, PLACES, made_up_word
from .world import capital_qa, sum_qa, world_qa

Values = dict[str, object]

# Keys by which a schema may call the value of a relation of `facts.RELATIONS`.
KEYS = {
    "home": ("city", "home", "location", "address"), "color": ("color", "favorite_color"),
    "food": ("food", "favorite_food", "meal"), "pet": ("pet", "animal"), "place": ("place", "location", "room"),
    "secret": ("secret", "word", "password"), "code": ("code", "number"), "magic number": ("number", "magic_number"),
    "number": ("number", "lucky_number"), "job": ("job", "profession", "occupation"), "birthday": ("month", "birthday"),
    "owner": ("owner", "name"), "my name": ("name", "first_name"), "my color": ("color", "favorite_color"),
    "my city": ("city", "home"), "meeting": ("day", "weekday", "date"),
}  # fmt: skip
EVENTS = ("science fair", "birthday party", "concert", "football game", "picnic", "wedding", "book club", "market")
GOOD = (
    "I love this {}.",
    "This {} is wonderful.",
    "What a great {}!",
    "The {} was very good.",
    "I am happy with my {}.",
)
BAD = ("I hate this {}.", "This {} is terrible.", "What a bad {}!", "The {} was awful.", "I am sad about my {}.")
NEUTRAL = ("This is a {}.", "The {} is on the table.", "I bought a {} today.", "Here is the {}.")
ASK = ("{text}", "Extract the data: {text}", "Extract the information.\n\n{text}", "{text}\n\nAnswer in JSON.",
       "{text} Give me JSON.", "Extract the {what} information. {text}", "Parse this: {text}")  # fmt: skip
NAMED = ("{text}\n\nAnswer as JSON with the keys {keys}.", "Give me JSON with {keys}: {text}",
         "Return a JSON object with the keys {keys}. {text}")  # fmt: skip


def number_of(value: str) -> object:
    return int(value) if value.isdigit() else value


def person(rng: random.Random) -> tuple[str, Values]:
    """A person's age and one or more facts, such as ``Anna is 30 years old and lives in Paris.``"""
    name, age, city, job = rng.choice(NAMES), rng.randint(3, 99), rng.choice(CITIES), rng.choice(JOBS)
    if rng.random() < 0.15:
        name = made_up_word(rng).capitalize()
    surname = rng.choice(("", "", f" {rng.choice(('Miller', 'Smith', 'Brown', 'Jones', 'Baker', 'Stone', 'Hill'))}"))
    values: Values = {"name": name + surname, "age": age}
    text = rng.choice(
        (f"{name}{surname} is {age} years old", f"{name}{surname}, {age}, is here", f"{name}{surname} is {age}")
    )
    if rng.random() < 0.5:
        text += rng.choice((f" and lives in {city}", f", from {city}", f" and comes from {city}"))
        values[rng.choice(KEYS["home"])] = city
    if rng.random() < 0.3:
        text += f" and works as a {job}"
        values[rng.choice(KEYS["job"])] = job
    return text + ".", values


def of_facts(rng: random.Random) -> tuple[str, Values]:
    """Facts of `facts.RELATIONS` among other sentences, each under a key of its relation."""
    facts: dict[str, Fact] = {}
    for fact in draw_facts(rng, rng.randint(1, 4)):
        facts.setdefault(fact.relation.name, fact)
    values: Values = {}
    for name, fact in facts.items():
        values[rng.choice(KEYS[name])] = number_of(fact.value)
    first = next(iter(facts.values()))
    if len(facts) == 1 and first.relation.subjects is NAMES:
        values = {"name": first.subject} | values
    sentences = [fact.statement(rng) for fact in facts.values()]
    if rng.random() < 0.3:
        sentences.insert(rng.randint(0, len(sentences)), " ".join(filler(rng, rng.randint(10, 60))))
    return " ".join(sentences), values


def event(rng: random.Random) -> tuple[str, Values]:
    people, what, day = rng.sample(NAMES, rng.randint(1, 3)), rng.choice(EVENTS), rng.choice(DAYS)
    who = people[0] if len(people) == 1 else ", ".join(people[:-1]) + " and " + people[-1]
    verb = "is" if len(people) == 1 else "are"
    text = f"{who} {verb} going to a {what} on {day}."
    return text, {"name": what, rng.choice(("date", "day")): day, rng.choice(("participants", "people")): people}


def listed(rng: random.Random) -> tuple[str, Values]:
    """Several things of one kind, as a list."""
    key, pool = rng.choice((("items", OBJECTS), ("foods", FOODS), ("animals", ANIMALS), ("colors", COLORS),
                            ("names", NAMES), ("cities", CITIES), ("months", MONTHS)))  # fmt: skip
    chosen = rng.sample(pool, rng.randint(1, 5))
    text = chosen[0] if len(chosen) == 1 else ", ".join(chosen[:-1]) + " and " + chosen[-1]
    begin = rng.choice(("I like", "There are", "We saw", "List:", "My list has", "He told me about"))
    return f"{begin} {text}.", {rng.choice((key, "items", "list", "values")): chosen}


def people(rng: random.Random) -> tuple[str, Values]:
    pairs = [person(rng) for _ in range(rng.randint(1, 3))]
    rows = [{"name": values["name"], "age": values["age"]} for _, values in pairs]
    return " ".join(text for text, _ in pairs), {rng.choice(("people", "users", "persons")): rows}


def nested(rng: random.Random) -> tuple[str, Values]:
    text, values = person(rng)
    return text, {rng.choice(("person", "user", "customer")): values}


def judged(rng: random.Random) -> tuple[str, Values]:
    kind, templates = rng.choice((("positive", GOOD), ("negative", BAD), ("neutral", NEUTRAL)))
    text = rng.choice(templates).format(rng.choice(OBJECTS + FOODS))
    return text, {rng.choice(("sentiment", "label", "mood", "category")): kind}


def answered(rng: random.Random) -> tuple[str, Values]:
    """A question that the model answers in words otherwise."""
    question, answer = capital_qa(rng) if rng.random() < 0.5 else world_qa(rng)
    draw = rng.random()
    if draw < 0.4:
        return question, {rng.choice(("answer", "final_answer", "response", "text")): answer}
    if draw < 0.7:
        question, answer = sum_qa(rng)
        return question, {rng.choice(("result", "answer", "value", "sum")): int(answer.rstrip(".").split()[-1])}
    if draw < 0.85:
        more: Values = {"question": question} if rng.random() < 0.5 else {"confidence": rng.choice((1.0, 0.9, 0.95))}
        return question, more | {"answer": answer}
    question, answer = sum_qa(rng)
    right = answer.rstrip(".").split(" is ")[1]
    step = {"explanation": answer, "output": right}
    return question, {"steps": [step], "final_answer": right}


def capital(rng: random.Random) -> tuple[str, Values]:
    question, answer = capital_qa(rng, rng.choice(("France", "Japan", "Italy", None)))
    country, city = answer.rstrip(".").removeprefix("The capital of ").split(" is ")[:2]
    if " is the capital of " in answer:
        city, country = answer.rstrip(".").split(" is the capital of ")
    return question, {"country": country, rng.choice(("capital", "city", "name")): city}


def flagged(rng: random.Random) -> tuple[str, Values]:
    """Values that are true or false, and numbers that are not whole."""
    color, thing = rng.choice(COLORS), rng.choice(OBJECTS)
    price = rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.99))
    is_new = rng.random() < 0.5
    text = f"The {color} {thing} costs {price} dollars and is {'new' if is_new else 'old'}."
    values: Values = {rng.choice(("name", "product", "item")): rng.choice((thing, f"{color} {thing}")), "price": price}
    if rng.random() < 0.6:
        values["is_new"] = is_new
    if rng.random() < 0.4:
        values["color"] = color
    return text, values


def spelt(rng: random.Random) -> tuple[str, Values]:
    """Many words as a list. In quotes a word begins without a space, so its tokens are others than in the text."""
    pool: list[str] = rng.choice(
        ([*NAMES], [*CITIES], [*COLORS, *OBJECTS], [*FOODS, *ANIMALS], [*DAYS, *MONTHS, *JOBS], [*PLACES])
    )
    chosen = rng.sample(pool, min(len(pool), rng.randint(6, 16)))
    if rng.random() < 0.2:
        chosen = [made_up_word(rng) for _ in chosen]
    return rng.choice((" ", ", ")).join(chosen), {rng.choice(("words", "items", "list")): chosen}


def unknown_keys(rng: random.Random) -> tuple[str, Values]:
    """Keys that say nothing: the values are words of the text, so that a string ends after a word or two."""
    words = [
        rng.choice((made_up_word(rng), rng.choice(OBJECTS), rng.choice(ADJECTIVES))) for _ in range(rng.randint(1, 4))
    ]
    keys = [rng.choice((made_up_word(rng), rng.choice("abcxyz"), rng.choice(OBJECTS))) for _ in words]
    values: Values = {key: rng.choice((word, rng.randint(0, 99))) for key, word in zip(keys, words, strict=True)}
    return " ".join(words), values


MAKERS: tuple[tuple[Callable[[random.Random], tuple[str, Values]], float], ...] = (
    (person, 3), (of_facts, 4), (event, 2), (listed, 2), (people, 1.5), (nested, 1), (judged, 2), (answered, 3),
    (capital, 1.5), (flagged, 1.5), (unknown_keys, 1.5), (spelt, 4),
)  # fmt: skip


def extraction_chat(rng: random.Random) -> Document:
    """A text, and its values as a JSON object in the server's spelling (`", "` and `": "`)."""
    document = system_turn(rng)
    turns = rng.choice((1, 1, 2))
    for index in range(turns):
        text, values = rng.choices([maker for maker, _ in MAKERS], [weight for _, weight in MAKERS])[0](rng)
        if rng.random() < 0.25:
            values = dict(rng.sample(list(values.items()), len(values)))
        is_named = rng.random() < 0.3
        content = rng.choice(NAMED if is_named else ASK) if len(text.split()) > 1 else "{text}"
        content = content.format(text=text, keys=", ".join(values), what=rng.choice(("event", "person", "product")))
        body = json.dumps(values, ensure_ascii=False)
        add_user(document, content)
        if is_named:
            document.add(body, answer=True)
        else:
            add_values(document, body)
        end_turn(document, index == turns - 1)
    return document


def add_values(document: Document, body: str) -> None:
    """A JSON object of which the keys and the first bracket are given, and the values learned."""
    for piece in re.split(r'(^\{"[^"]*": |(?<=[{ ])"[^"]*": )', body):
        is_key = piece.endswith('": ')
        document.add(piece, answer=not is_key, given=is_key)
