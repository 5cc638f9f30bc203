"""Conversations: small talk, stories, and questions about what was said."""

from __future__ import annotations

import random

from .document import TURN_END, TURN_START, Document, add_answer
from .facts import draw_facts
from .filler import scatter
from .stories import StoryRequest, story
from .words import ADJECTIVES, ANIMALS, NAMES, PEOPLE, SECRET_WORDS, a_or_an, expand
from .world import capital_qa, world_qa


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
