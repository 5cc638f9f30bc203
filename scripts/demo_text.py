"""Text for the demo model: facts, stories, short chats, and questions about a fact stated earlier in the prompt.

Everything is drawn from one ``random.Random``, so the same seed gives the same text. A document is a string plus
the character spans of its answers, which training weighs more than the rest.

Retrieval facts are pairs of a subject and a value. A hash of the pair decides whether it may be used in training or
is held out for evaluation, so that an answer to a held-out question can only come from reading the prompt.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

EOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, TURN_START, TURN_END)


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


@dataclass
class Document:
    """A training text and the character spans in it that are answers."""

    text: str = ""
    answers: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, answer: bool = False) -> Document:
        if answer:
            self.answers.append((len(self.text), len(self.text) + len(text)))
        self.text += text
        return self

    def words(self) -> int:
        return self.text.count(" ")


# --------------------------------------------------------------------------------------------------------- stories

OPENINGS = (
    "Once upon a time, there was a {adj} {K} named {N}. {He} lived in {home}.",
    "Once upon a time, there lived a {adj} {K} [named|called] {N} in {home}.",
    "Once upon a time, in {home}, there lived a {K} named {N}. {N} was very {adj}.",
    "Long ago, there was a {K} named {N}. {N} was {adj} and lived in {home}.",
    "There once was a {adj} {K} [named|called] {N} who lived in {home}.",
    "{N} was a {adj} {K} who lived in {home}.",
    "In {home}, there lived a {adj} {K} named {N}.",
)
HOMES = (
    "a [small|little|warm|cozy|old|tall] [house|cottage|hut] [near the river|by the sea|at the edge of the forest|on a "
    "green hill|under a big oak tree|behind the old mill]",
    "a [quiet|little|happy|busy] village [near the mountains|by the lake|in the valley|by the sea]",
    "a [big|dark|green|quiet] forest [far away|near the mountains|behind the hills]",
)
HABITS = (
    "Every [morning|day|evening], {he} [walked|went] to the {P} to [look at the birds|sing a song|play|watch the "
    "clouds].",
    "{N} loved [{F}|to eat {F}] more than anything else.",
    "{N} [liked|loved] to [sing|dance|read|paint|play|tell jokes] with {his} friends.",
    "[Everyone|All the neighbors] liked {N}, because {he} was [always|so] [friendly|cheerful|helpful].",
)
DAYS_START = (
    "One [day|morning|afternoon|evening], ",
    "One [sunny|rainy|windy|cold|warm|quiet] [day|morning|afternoon|evening], ",
    "Early one morning, ",
    "On a [sunny|cold|bright] day in [spring|summer|autumn|winter], ",
)
ENDINGS = (
    "From that day on, {N} and {M} were best friends.",
    "{N} went home with a happy heart and slept well that night.",
    "And they all lived happily ever after.",
    "That night, {N} looked at the stars and smiled.",
    "{N} never forgot that day.",
    "And so the day ended with [a song|a big meal|laughter and music].",
    "{N} learned that [a good friend is worth more than gold|it is good to ask for help|kind words open every door|"
    "being brave does not mean having no fear|sharing makes everything better|small steps lead far].",
)

# Each plot is a list of sentences in order; a sentence in round brackets may be left out.
PLOTS: tuple[tuple[str, ...], ...] = (
    (  # something is lost and found
        "{start}{N} saw that {his} {color} {O} was gone.",
        "[{N} was very sad.|{N} began to cry.|\"Where is my {O}?\" asked {N}.|\"Oh no, my {O}!\" cried {N}.]",
        "{He} looked [under the bed|behind the door|in every corner] and in the {P}, but {he} could not find it.",
        "(Then it began to rain, and {N} felt [cold|tired|alone].)",
        "[Then|Soon|At last] {he} met a {fadj} {L} named {M}.",
        "[\"Why are you so sad?\" asked {M}.|\"What are you looking for?\" asked {M}.]",
        "[\"I have lost my {O},\" said {N}.|\"My {color} {O} is gone,\" said {N}.]",
        "[\"I will help you,\" said {M}.|\"Do not worry, we will find it together,\" said {M}.]",
        "[They searched all day long.|Together they walked to the {Q}.|They looked and looked.]",
        "[Finally|At last|After a while], {M} found the {O} [under a big stone|behind a tree|in the {Q}|in the tall "
        "grass].",
        "[\"Thank you, {M}!\" said {N}.|{N} was so happy that {he} danced.|{N} hugged {M} and laughed.]",
    ),
    (  # a way is blocked
        "{start}{N} wanted to go to the {P} to [visit {his} grandmother|buy some {F}|see the {color} flowers].",
        "(On the way, {he} sang a little song.)",
        "But the [bridge was broken|road was full of snow|river was too wide|gate was closed].",
        "[\"How can I get to the {P} now?\" {N} asked.|{N} sat down and did not know what to do.]",
        "[A {fadj} {L} named {M} came by.|Just then, a {L} named {M} came along the path.]",
        "[\"I know another way,\" said {M}.|\"Follow me,\" said {M}, \"I know a safe path.\"]",
        "They walked [through the {Q}|past the {Q}|around the {Q}] [hand in hand|for a long time|side by side].",
        "(On the way, they shared [some|a bag of] {F}.)",
        "[When the sun went down|At noon|Before it was dark], they reached the {P}.",
        "[\"I could not have done it without you,\" said {N}.|\"Thank you for your help,\" said {N}.|{N} thanked {M} "
        "with all {his} heart.]",
    ),
    (  # a storm
        "{start}a big storm came over the {P}.",
        "The wind [blew hard|howled], and the rain [fell and fell|beat on the roof].",
        "[{N} closed the door and lit a candle.|{N} made a fire and sat down beside it.]",
        "[Suddenly|All at once], there was a knock at the door.",
        "[It was a wet {L} named {M}.|Outside stood a {L} named {M}, cold and wet.]",
        "[\"May I come in?\" asked {M}.|\"Please help me, I am so cold,\" said {M}.]",
        "[\"Of course, come in,\" said {N}.|\"Sit by the fire and get warm,\" said {N}.]",
        "{N} gave {M} [some|a bowl of] {F}, and they [talked all night|told each other stories|played games until "
        "morning].",
        "(\"Tell me about the {Q},\" said {N}, and {M} told of far places.)",
        "In the morning, the storm was over and [the sky was blue|a rainbow stood over the {P}|the sun was shining].",
        "(Before {M} left, {N} gave {M} a {color} {O} as a gift.)",
    ),
    (  # learning something
        "{N} had one big wish: {he} wanted to learn to [swim|sing|dance|bake|paint|fly a kite|play the flute].",
        "{start}{N} tried it for the first time, but [it went wrong|it was too hard|everybody laughed].",
        "[{N} was sad and wanted to give up.|\"I will never learn it,\" said {N}.]",
        "[An old {L} named {M} saw it.|A wise {L} named {M} was watching from the {P}.]",
        "[\"Nobody can do it at once,\" said {M}.|\"Try again, and do not be afraid,\" said {M}.]",
        "So {N} [tried again every day|practiced every morning|worked hard for many days].",
        "(Sometimes {he} fell, but {he} always got up again.)",
        "(In the evening, {M} brought {F} for both of them.)",
        "[After many days|After a few weeks|One day in spring], {N} could do it.",
        "[\"Look, I did it!\" cried {N}.|Everyone in the {Q} clapped.|\"I knew you could do it,\" said {M}.]",
    ),
    (  # a present
        "{N} had a friend, a {L} named {M}.",
        "{start}it was the birthday of {M}, and {N} wanted to give {M} a [special|nice|wonderful] gift.",
        "[But {N} had no money.|But all the shops were closed.|But {he} did not know what {M} liked.]",
        "{He} went to the {P} and thought about it for a long time.",
        "[There|Under a tree|On the ground], {he} found [a little wood|an old board|a piece of cloth].",
        "[From it, {he} made a {color} {O}.|With it, {he} made a beautiful {color} {O}.]",
        "({He} worked until late at night.)",
        "In the evening, {N} brought the {O} to {M}.",
        "[\"This is the best gift of all!\" said {M}.|\"How beautiful!\" cried {M}.|{M} was happy beyond all "
        "words.]",
        "They [ate {F}|ate cake and {F}] and danced [until midnight|all evening].",
    ),
    (  # a sound in the night
        "{start}{N} heard a strange sound from the {P}.",
        "[\"What can that be?\" {he} asked.|{His} heart beat fast.|{He} was a little afraid.]",
        "{He} took {his} {O} and [walked slowly to|went quietly to|tiptoed to] the {P}.",
        "(The moon was shining, and everything was quiet.)",
        "There was the sound again, [louder than before|very near|behind the door]!",
        "[{N} opened the door.|{N} looked around the corner.] There sat a little {L}.",
        "[\"Please do not be angry,\" said the {L}. \"My name is {M}, and I have lost my way.\"|\"I am {M},\" said the "
        "{L}, \"and I cannot find my way home.\"]",
        "[{N} laughed.|{N} was glad that it was nothing bad.] \"[I will bring you home|Come, I will show you the "
        "way],\" {he} said.",
        "So they walked through the {Q} together, and [the stars showed them the way|the moon was their lamp].",
        "(At home, the mother of {M} gave them warm {F}.)",
    ),
    (  # a race
        "{start}a {L} named {M} said, \"I am the fastest in the whole [land|village|forest].\"",
        "[\"Let us have a race to the {P},\" said {N}.|\"Then race with me to the {P},\" said {N}.]",
        "Everybody came to watch, and {M} [ran away like the wind|was soon far ahead].",
        "[But on the way, {M} saw some {F} and stopped to eat.|But {M} became tired and lay down to sleep.]",
        "{N} [did not stop|went on, step by step|kept going], [past|through] the {Q}.",
        "(It was hot, and the way was long.)",
        "When {M} [woke up|looked up], {N} was already at the {P}.",
        "[\"You have won,\" said {M}. \"Well done!\"|\"I should not have been so proud,\" said {M}.]",
        "{N} [smiled and gave {M} a {color} {O}|shared the prize, a basket of {F}, with {M}].",
    ),
    (  # someone is ill
        "{start}{N} heard that {M}, the {L}, was ill.",
        "[\"I must do something,\" said {N}.|\"Poor {M}!\" said {N}.]",
        "{He} went to the {P} and [bought|found] some {F}.",
        "[Then {he} cooked a big pot of soup.|At home, {he} made tea with honey.]",
        "{N} carried everything through the {Q} to the house of {M}.",
        "(The way was long, and the basket was heavy.)",
        "{M} was lying in bed [under a {color} blanket|with a hot head].",
        "[\"How kind of you to come,\" said {M}.|\"You are a true friend,\" said {M}.]",
        "{N} [read a story aloud|sang a quiet song|told funny stories], and {M} [fell asleep|began to smile].",
        "After [two|three|a few] days, {M} was well again, and they went to the {P} together.",
    ),
    (  # a seed
        "{start}{N} found a {color} seed in the {P}.",
        "[\"What will grow from it?\" {he} asked.|{He} had never seen such a seed before.]",
        "{He} put it into the ground and gave it water [every day|every morning].",
        "[For a long time, nothing happened.|Days went by, but nothing grew.]",
        "[\"It is only a stone,\" said {M} the {L}.|{M}, a {L} from the {Q}, laughed about it.]",
        "But {N} [waited|did not give up|went on].",
        "[Then, one morning,|After the first warm rain,] there was a [small|tiny] green leaf.",
        "The plant grew and grew, until it was [as high as the house|bigger than {N}].",
        "[In summer, it was full of {F}.|In autumn, it had a hundred {color} flowers.]",
        "{N} [invited everyone to a feast|gave some to every neighbor], and {M} was the first to come.",
    ),
    (  # a journey
        "{start}{N} found an old map with a {color} line on it.",
        "[\"It shows the way to a treasure!\" said {he}.|The line led to the {P}, far away.]",
        "{He} packed some {F} and a {O}, and [set off|went on {his} way].",
        "In the {Q}, {he} met a {fadj} {L} named {M}. [\"May I come with you?\" asked {M}.|\"Take me with you,\" said "
        "{M}.]",
        "Together they [crossed a wide river|climbed a high mountain|walked for three days].",
        "(At night, they slept under the stars.)",
        "[At last|Finally], they came to the {P} and found [an old box|a big stone|a small door].",
        "[Inside was no gold, but a letter|Under it was no gold, but a letter]: \"The best treasure is a friend.\"",
        "{N} and {M} looked at each other and [laughed|smiled].",
    ),
    (  # a quarrel
        "{N} and {M} the {L} were [neighbors|good friends].",
        "{start}they both wanted to have the same {color} {O}.",
        "[\"It is mine!\" cried {N}.|\"I saw it first,\" said {N}.] [\"No, it is mine!\" cried {M}.|\"That is not "
        "true,\" said {M}.]",
        "They pulled and pulled, until the {O} [broke|fell into the river].",
        "[Now nobody had it, and both were sad.|{N} ran to the {P} and cried.]",
        "After [a while|an hour], {N} said, \"[I am sorry|That was wrong of me].\"",
        "\"I am sorry too,\" said {M}. \"[Let us make a new one|Let us never fight again].\"",
        "So they went to the {Q} and made a new {O}, [even nicer than the old one|big enough for two].",
        "(Then they ate {F} together.)",
    ),
    (  # a rescue
        "{start}{N} was walking through the {P} when {he} heard someone call for help.",
        "A {L} named {M} had fallen into [a deep hole|the cold water].",
        "[\"Hold on, I am coming!\" cried {N}.|\"Do not be afraid,\" called {N}.]",
        "{N} [looked around and found a long rope|took a long branch|ran to the {Q} to get a ladder].",
        "(It was not easy, for {M} was heavy.)",
        "{He} pulled with all {his} strength, and [at last|finally] {M} was safe.",
        "[\"You saved my life,\" said {M}.|\"How can I ever thank you?\" asked {M}.]",
        "[\"That is what friends are for,\" said {N}.|\"You would do the same for me,\" said {N}.]",
        "{M} gave {N} a {color} {O}, and {N} [kept it for all time|put it on the wall at home].",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class StoryRequest:
    """What a prompt fixes about a story; the rest is drawn."""

    kind: str | None = None
    name: str | None = None
    friend_kind: str | None = None
    adjective: str | None = None


def story_sentences(rng: random.Random, request: StoryRequest = StoryRequest()) -> list[str]:
    kind = request.kind or rng.choice(ANIMALS + list(PEOPLE) if rng.random() < 0.7 else ["girl", "boy"])
    if request.name:
        he = "she" if request.name in GIRLS else "he"
        if PEOPLE.get(kind, he) != he:
            kind = {"he": "boy", "she": "girl"}[he]
    else:
        he = PEOPLE.get(kind) or rng.choice(("he", "she"))
    name = request.name or rng.choice(BOYS if he == "he" else GIRLS)
    friend_kind = request.friend_kind or rng.choice([animal for animal in ANIMALS if animal != kind])
    his, him = ("his", "him") if he == "he" else ("her", "her")
    place, other_place = rng.sample(OUTDOORS, 2)
    slots = {
        "K": kind, "N": name, "he": he, "He": he.capitalize(), "his": his, "His": his.capitalize(), "him": him,
        "L": friend_kind, "M": rng.choice([n for n in NAMES if n != name]),
        "P": place, "Q": other_place, "O": rng.choice(OBJECTS), "F": rng.choice(FOODS), "color": rng.choice(COLORS),
        "adj": request.adjective or rng.choice(ADJECTIVES),
        "fadj": rng.choice(_words("friendly wise old kind funny clever gentle")),
    }  # fmt: skip
    slots["home"] = expand(rng, rng.choice(HOMES))
    slots["start"] = expand(rng, rng.choice(DAYS_START))
    plot = rng.choice(PLOTS)
    opening = rng.choice(OPENINGS[:3] if rng.random() < 0.5 else OPENINGS)
    sentences = [expand(rng, opening, slots)]
    if rng.random() < 0.6:
        sentences.append(expand(rng, rng.choice(HABITS), slots))
    for template in plot:
        if template.startswith("("):
            if rng.random() < 0.5:
                continue
            template = template[1:-1]
        sentences.append(expand(rng, template, slots))
    sentences.append(expand(rng, rng.choice(ENDINGS), slots))
    return sentences


def story(rng: random.Random, request: StoryRequest = StoryRequest()) -> str:
    """A story in one to three paragraphs."""
    sentences = story_sentences(rng, request)
    if rng.random() < 0.7:
        return " ".join(sentences)
    cut = rng.randint(2, len(sentences) - 2)
    return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])


# ----------------------------------------------------------------------------------------------- facts of the world

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


# -------------------------------------------------------------------------------------------------------- retrieval


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


def made_up_word(rng: random.Random) -> str:
    """A word that the vocabulary lacks, so that copying does not depend on knowing the word."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


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


def add_answer(document: Document, answer: str) -> Document:
    """Weigh the last word or two of an answer, which carry the value; the words before only echo the question."""
    cut = max(answer.rfind(marker) + len(marker) - 1 for marker in (" is ", " in ", " to ", " a ", " eat ", " on "))
    if cut <= 3:
        cut = answer.rfind(" ")
    return document.add(answer[:cut]).add(answer[cut:], answer=True)


def add_question(document: Document, question: str, answer: str, style: int = 0) -> Document:
    document.add(f"Question: {question}\nAnswer: " if style == 0 else f"Q: {question}\nA: ")
    return add_answer(document, answer)


def list_document(rng: random.Random, words: int) -> Document:
    """Facts in a row and then most of them asked for: dense practice in looking back."""
    document = Document()
    facts = draw_facts(rng, max(2, min(24, words // 14)))
    style = rng.random()
    if style < 0.35:  # bare pairs, stated and then repeated in another order
        pairs = [(fact.subject, fact.value) for fact in facts]
        if style < 0.25:
            pairs = [(word, rng.choice(SECRET_WORDS)) for word in rng.sample(SECRET_WORDS, len(facts))]
        document.add("".join(f"{left}: {right}\n" for left, right in pairs)).add("\n")
        for left, right in rng.sample(pairs, len(pairs)):
            document.add(f"{left}:").add(f" {right}", answer=True).add("\n")
        return document
    document.add(" ".join(fact.statement(rng) for fact in facts) + "\n\n")
    for fact in rng.sample(facts, len(facts)):
        if style < 0.6:
            add_answer(document, fact.answer).add(" ")
        else:
            add_question(document, fact.question(rng), fact.answer, int(style < 0.7)).add("\n")
    return document


def passage_document(rng: random.Random, words: int) -> Document:
    """A long text with facts in it; questions stand in the middle and at the end."""
    document = Document()
    facts: list[Fact] = []
    pool = draw_facts(rng, max(2, min(40, words // 25)))
    style = int(rng.random() < 0.2)
    while pool and document.words() < words - 40:
        count = min(len(pool), rng.randint(1, 6))
        facts += pool[:count]
        new, pool = pool[:count], pool[count:]
        share = rng.randint(20, max(21, min(words - document.words() - 30, 1 + words // rng.randint(1, 4))))
        document.add(scatter(rng, new, share) + "\n\n")
        for fact in rng.sample(facts, min(len(facts), rng.randint(1, 6))):
            if rng.random() < 0.8:
                add_question(document, fact.question(rng), fact.answer, style).add("\n\n")
            else:
                add_answer(document, fact.answer).add("\n\n")
    document.text = document.text.rstrip()
    return document


# ------------------------------------------------------------------------------------------------------------- chat


def add_user(document: Document, content: str) -> Document:
    return document.add(f"{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n")


def end_turn(document: Document, last: bool) -> Document:
    return document.add(TURN_END + ("" if last else "\n"))


READ_FIRST = (
    "{text}\n\n{question}",
    "{text}\n\nQuestion: {question}",
    "{text} {question}",
    "Read this text and answer the question.\n\n{text}\n\n{question}",
    "Here is a text:\n\n{text}\n\n{question}",
    "{question}\n\n{text}",
)


def passage_chat(rng: random.Random, words: int) -> Document:
    """A user message with a long text and a question, and more questions in later turns."""
    facts = draw_facts(rng, rng.choice((1, 1, 2, 3, 4, 6, 8)))
    asked = rng.sample(facts, len(facts)) + ([rng.choice(facts)] if rng.random() < 0.2 else [])
    text = scatter(rng, facts, max(10, words - 25 * len(asked)))
    document = system_turn(rng)
    for index, fact in enumerate(asked):
        question = fact.question(rng)
        if index == 0:
            weights = (4, 3, 2, 2, 2, 1)
            content = rng.choices(READ_FIRST, weights)[0].format(text=text, question=question)
        else:
            content = question
        add_answer(add_user(document, content), fact.answer)
        end_turn(document, index == len(asked) - 1)
    return document


def remember_chat(rng: random.Random, words: int) -> Document:
    """Facts told in chat turns, small talk or stories between, and questions about them at the end."""
    document = system_turn(rng)
    facts = draw_facts(rng, rng.randint(1, 5))
    for fact in facts:
        add_user(document, rng.choice(("", "", "Please remember: ", "Remember: ")) + fact.statement(rng))
        document.add(rng.choice(("I will remember that.", "Thank you, I will remember it.", "All right.")))
        end_turn(document, last=False)
    while document.words() < words - 20 * len(facts):
        exchange(rng, document)
        end_turn(document, last=False)
    for index, fact in enumerate(rng.sample(facts, len(facts))):
        add_answer(add_user(document, fact.question(rng)), fact.answer)
        end_turn(document, index == len(facts) - 1)
    return document


HELLO = "Hello! [How can I help you?|How can I help you today?|What can I do for you?|Nice to meet you.]"
WHO = (
    "I am the pdserve demo model[.|, a very small language model.] [I can tell stories, name capitals and answer "
    "questions about a text.|I can tell you a story or answer a simple question.]"
)
SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("[Hello|Hello!|Hi|Hi!|Hey|Hey there|Hello there!|Good morning|Good evening|Good day]", HELLO),
    ("[Hello|Hi|Hello!|Hi there!]", HELLO),
    ("[Hello|Hi|Hey], [how are you?|how are you today?]", "Hello! I am fine, thank you. How can I help you?"),
    ("How are you[?| today?| doing?]", "I am fine, thank you. [How can I help you?|How are you?]"),
    ("Who are you?", WHO),
    ("Who are you?", WHO),
    ("[What are you?|What is your name?|Tell me about yourself.|Which model are you?|What model is this?]", WHO),
    ("[Are you a human?|Are you a robot?]", "No, I am the pdserve demo model, a very small language model."),
    ("[What can you do?|How can you help me?|Help|What do you know?]", "I can tell stories, name capitals, do small "
     "sums and answer questions about a text."),
    ("[What is pdserve?|Tell me about pdserve.]", "pdserve is a serving system for language models. It splits prefill "
     "and decode between instances."),
    ("[Thank you|Thank you!|Thanks|Thanks!|Thanks a lot]", "You are welcome[.|!]"),
    ("[Bye|Goodbye|Good night|See you later|Goodbye!]", "Goodbye! [Have a nice day.|See you soon.]"),
    ("[Tell me a joke.|Do you know a joke?]", "[Why did the bee sit on the clock? It wanted to be on time.|What does a "
     "cloud wear under its coat? Thunderwear.|Why was the book sad? It had too many problems.]"),
    ("[I am sad.|I feel sad today.]", "I am sorry to hear that. Would you like to hear a story?"),
    ("[I am happy.|I am happy today!]", "That is good to hear!"),
    ("[What is the weather today?|What time is it?|What day is it today?]", "I am sorry, I do not know that."),
    ("[Who is the president?|What is the meaning of life?|How do I fix my car?|Write a program.|What is love?|How old "
     "is the king?|Explain physics to me.]", "I am sorry, I am a small demo model and I do not know that."),
)  # fmt: skip
STORY_PROMPTS = (
    "Tell me a story.", "Tell me a short story.", "Please tell me a story.", "Write a story.", "Write a short story.",
    "Can you tell me a story?", "Once upon a time", "Tell me another story.",
)  # fmt: skip
ECHO = ("Repeat: {}", "Say: {}", "Repeat after me: {}")
STORY_ABOUT = (
    "Tell me a story about {}.", "Tell me a short story about {}.", "Please tell me a story about {}.",
    "Write a story about {}.", "Write a short story about {}.", "Can you tell me a story about {}?", "A story about {}",
)  # fmt: skip


def system_turn(rng: random.Random) -> Document:
    document = Document()
    if rng.random() < 0.12:
        prompt = rng.choice(("You are a helpful assistant.", "You are the pdserve demo model.", "Answer briefly."))
        document.add(f"{TURN_START}system\n{prompt}{TURN_END}\n")
    return document


def sloppy(rng: random.Random, text: str) -> str:
    """The same question as some people type it: in lower case, or without its mark at the end."""
    if rng.random() < 0.08:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("?.!")
    return text


def story_request(rng: random.Random) -> tuple[str, StoryRequest]:
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(STORY_PROMPTS), StoryRequest()
    kind = rng.choice(ANIMALS + list(PEOPLE) + ["girl", "boy"])
    request, what = StoryRequest(kind), f"a {kind}"
    if draw > 0.85 and kind in ANIMALS:
        name = rng.choice(NAMES)
        request, what = StoryRequest(kind, name), f"a {kind} named {name}"
    elif draw > 0.7:
        friend = rng.choice([animal for animal in ANIMALS if animal != kind])
        request, what = StoryRequest(kind, None, friend), f"a {kind} and a {friend}"
    elif draw > 0.55:
        adjective = rng.choice(ADJECTIVES)
        request, what = StoryRequest(kind, adjective=adjective), f"a {adjective} {kind}"
    return a_or_an(rng.choice(STORY_ABOUT).format(what)), request


def exchange(rng: random.Random, document: Document) -> Document:
    """One question of the user and its answer, without the end of the turn."""
    draw = rng.random()
    if draw < 0.3:
        question, answer = rng.choice(SMALL_TALK)
        return add_user(document, sloppy(rng, expand(rng, question))).add(expand(rng, answer))
    if draw < 0.72:
        question, answer = capital_qa(rng) if rng.random() < 0.3 else world_qa(rng)
        return add_answer(add_user(document, sloppy(rng, question)), answer)
    if draw < 0.77:
        words = " ".join(rng.choice(SECRET_WORDS) for _ in range(rng.randint(1, 8)))
        return add_user(document, rng.choice(ECHO).format(words)).add(words, answer=True)
    if draw < 0.8:
        top = rng.randint(3, 20)
        return add_user(document, f"Count to {top}.").add(", ".join(str(n) for n in range(1, top + 1)) + ".")
    prompt, request = story_request(rng)
    return add_user(document, sloppy(rng, prompt)).add(story(rng, request))


def short_chat(rng: random.Random) -> Document:
    document = system_turn(rng)
    turns = rng.choice((1, 1, 1, 2, 3, 4))
    for index in range(turns):
        exchange(rng, document)
        end_turn(document, index == turns - 1)
    return document


# ----------------------------------------------------------------------------------------------------- the mixture


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


# ----------------------------------------------------------------------------------------------- held-out questions


@dataclass(frozen=True)
class RetrievalCase:
    """A text with a held-out fact in it, and a question about that fact."""

    text: str
    question: str
    expected: str
    distance: int

    def prompt(self) -> str:
        return f"{self.text}\n\nQuestion: {self.question}\nAnswer:"

    def message(self) -> str:
        return f"{self.text}\n\n{self.question}"


def retrieval_cases(
    seed: int, count: int, count_tokens: Callable[[str], int], min_distance: int = 300, max_distance: int = 1500
) -> list[RetrievalCase]:
    """Held-out cases whose fact ends ``min_distance`` to ``max_distance`` tokens before the question begins."""
    rng = random.Random(seed)
    cases: list[RetrievalCase] = []
    while len(cases) < count:
        facts = draw_facts(rng, rng.randint(1, 6), held_out=True)
        if not facts:
            continue
        target = facts[0]
        wanted = rng.randint(min_distance + 20, max_distance - 60)
        before = scatter(rng, facts[1:], rng.randint(5, 150))
        after: list[str] = []
        distance = 0
        while distance < wanted:
            after += filler(rng, 20)
            distance = count_tokens(" ".join(after))
        if distance > max_distance:
            continue
        text = " ".join([before, target.statement(rng), *after])
        cases.append(RetrievalCase(text, target.question(rng), target.value, distance))
    return cases
