"""Words that everything is made of, and how templates become sentences."""

from __future__ import annotations

import random
import re


def _words(text: str) -> list[str]:
    return text.split()


CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Belgium": "Brussels", "Denmark": "Copenhagen", "Sweden": "Stockholm", "Norway": "Oslo",
    "Finland": "Helsinki", "Iceland": "Reykjavik", "Ireland": "Dublin", "Poland": "Warsaw", "Hungary": "Budapest",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Estonia": "Tallinn", "Latvia": "Riga",
    "Lithuania": "Vilnius", "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Switzerland": "Bern",
    "the Netherlands": "Amsterdam", "the Czech Republic": "Prague", "the United Kingdom": "London",
    "England": "London", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Nepal": "Kathmandu",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "South Korea": "Seoul", "Mongolia": "Ulaanbaatar",
    "Indonesia": "Jakarta", "Malaysia": "Kuala Lumpur", "the Philippines": "Manila", "Pakistan": "Islamabad",
    "Iran": "Tehran", "Iraq": "Baghdad", "Lebanon": "Beirut", "Jordan": "Amman", "Egypt": "Cairo",
    "Morocco": "Rabat", "Algeria": "Algiers", "Tunisia": "Tunis", "Kenya": "Nairobi", "Ethiopia": "Addis Ababa",
    "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Argentina": "Buenos Aires", "Brazil": "Brasilia",
    "Colombia": "Bogota", "Uruguay": "Montevideo", "Venezuela": "Caracas", "Australia": "Canberra",
    "New Zealand": "Wellington", "the United States": "Washington",
}  # fmt: skip
GIRLS = _words(
    "Mia Anna Lily Emma Nora Ruby Clara Rosa Ella Maya Zoe Lucy Ivy Alice Grace Sara Lena Julia Eva Holly Daisy Olive"
)
BOYS = _words(
    "Tom Ben Max Leo Sam Jack Oscar Finn Hugo Noah Paul Peter David Felix Theo Adam Henry Luke Otto Simon Victor Bruno"
)
NAMES = tuple(GIRLS + BOYS)
ANIMALS = _words(
    "fox rabbit bear cat dog mouse owl frog duck hedgehog squirrel deer wolf turtle goose horse goat sheep pig cow "
    "lion tiger elephant monkey penguin parrot badger beaver otter crow swan donkey camel zebra whale dolphin seal "
    "snail bee spider dragon"
)
PEOPLE = {
    "girl": "she", "boy": "he", "king": "he", "queen": "she", "prince": "he", "princess": "she", "baker": "he",
    "sailor": "he", "farmer": "he", "teacher": "she", "doctor": "she", "painter": "she", "wizard": "he",
    "knight": "he", "robot": "he", "pirate": "he", "shepherd": "he", "gardener": "she",
}  # fmt: skip
ADJECTIVES = _words("brave little kind clever young curious happy shy lonely cheerful")
COLORS = _words("red blue green yellow orange purple white black brown pink gray golden silver")
OBJECTS = _words(
    "key book lamp ring box bell hat map cup drum kite ball clock mirror shell coin basket ladder bottle candle chair "
    "flute scarf sword letter spoon umbrella violin wagon whistle"
)
PLACES = _words(
    "kitchen garden forest library school market tower barn cave castle harbor museum station church park cellar attic "
    "bakery mill village valley meadow hospital hotel theater farm office"
)
OUTDOORS = _words("garden forest market harbor park village valley meadow farm mill castle lake")
FOODS = _words(
    "bread soup cheese honey apples pears cherries cake rice pizza salad fish carrots nuts pancakes grapes lemons "
    "bananas cookies pasta beans corn plums potatoes"
)
JOBS = _words("baker doctor teacher farmer painter sailor pilot writer nurse singer cook lawyer gardener driver")
MONTHS = _words("January February March April May June July August September October November December")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SECRET_WORDS = tuple(ANIMALS + OBJECTS + FOODS + COLORS)
CITIES = tuple(sorted(set(CAPITALS.values())))
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO]|um)")


def a_or_an(text: str) -> str:
    """Correct ``a`` to ``an`` before a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


def expand(rng: random.Random, template: str, slots: dict[str, str] | None = None) -> str:
    """Choose one of each ``[a|b]`` (they nest), then fill the ``{slots}``."""
    while "[" in template:
        template = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), template)
    return a_or_an(template.format_map(slots or {}))


def made_up_word(rng: random.Random) -> str:
    """A word that the vocabulary lacks, so that copying does not depend on knowing the word."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
