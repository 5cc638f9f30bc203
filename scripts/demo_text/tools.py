"""Calls of functions in Hermes' format, the answers that follow their results, and questions that need no call."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from .chats import SMALL_TALK, end_turn, sloppy
from .document import TURN_END, TURN_START, Document, add_answer
from .words import ANIMALS, CITIES, COLORS, DAYS, FOODS, MONTHS, NAMES, OBJECTS, PLACES, expand, made_up_word
from .world import capital_qa

VALUES: dict[str, tuple[object, ...]] = {
    "city": CITIES, "name": NAMES, "animal": tuple(ANIMALS), "color": tuple(COLORS), "food": tuple(FOODS),
    "object": tuple(OBJECTS), "place": tuple(PLACES), "day": tuple(DAYS), "month": tuple(MONTHS),
    "city2": CITIES, "currency": ("USD", "EUR", "GBP", "JPY"), "currency2": ("CHF", "CAD", "INR", "SEK"),
    "number": tuple(range(1, 100)), "number2": tuple(range(1, 100)), "unit": ("celsius", "fahrenheit"),
    "topic": tuple(OBJECTS + ANIMALS + FOODS), "minutes": tuple(range(1, 60)), "symbol": ("ABC", "XYZ", "IBM", "TSLA"),
    "text": tuple(f"{color} {thing}" for color in COLORS for thing in OBJECTS), "level": tuple(range(0, 101, 5)),
}  # fmt: skip


RESULTS: dict[str, tuple[object, ...]] = {
    "condition": ("sunny", "rainy", "cloudy", "windy", "snow"), "temperature": tuple(range(-10, 40)),
    "time": tuple(f"{hour}:{minute}" for hour in range(24) for minute in ("00", "15", "30", "45")),
    "price": tuple(range(1, 500)), "status": ("done", "ok", "sent", "ready", "failed"), "result": tuple(range(1, 1000)),
    "answer": tuple(f"{color} {thing}" for color in COLORS for thing in OBJECTS), "city": CITIES,
}  # fmt: skip


VERBS = (
    "get_",
    "set_",
    "find_",
    "make_",
    "",
    "do_",
    "search_",
    "create_",
    "delete_",
    "update_",
    "send_",
    "list_",
    "check_",
)
NOUNS = (
    "flights", "hotel", "account", "order", "ticket", "song", "movie", "news", "recipe", "user", "invoice", "calendar",
    "contact", "reminder", "route", "currency", "price", "event", "file", "folder", "document", "image", "location",
    "temperature", "distance", "translation", "summary", "database", "record", "product", "customer", "payment", "report",
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A function in the templates of its names, its parameters (kind of value: names that it may have) and questions."""

    names: tuple[str, ...]
    about: str
    parameters: dict[str, tuple[str, ...]]
    questions: tuple[str, ...]
    results: tuple[str, ...]  # what it returns: names in `RESULTS`


TOOLS = (
    Tool(("get_weather", "get_current_weather", "weather", "fetch_weather"), "Get the weather in a city.",
         {"city": ("city", "location", "place")},
         ("[What is|How is|What's] the weather [like ||]in {city}[?| today?| now?]", "Weather in {city}[?|]",
          "Is it [raining|sunny|cold] in {city}?", "[Tell me|Get|Check] the weather in {city}[.|]",
          "What is the temperature in {city}?"),
         ("temperature", "condition")),
    Tool(("get_weather", "get_current_weather"), "Get the weather in a city.",
         {"city": ("city", "location"), "unit": ("unit",)},
         ("What is the weather in {city} in {unit}?", "How warm is it in {city}, in {unit}?"), ("temperature",)),
    Tool(("get_time", "get_current_time", "current_time"), "Get the time in a city.",
         {"city": ("city", "timezone", "location")}, ("What time is it in {city}?", "Tell me the time in {city}."),
         ("time",)),
    Tool(("add", "add_numbers", "sum", "calculate_sum"), "Add two numbers.",
         {"number": ("a", "x", "first"), "number2": ("b", "y", "second")},
         ("[What is|Add|Calculate] {number} [plus|and|+] {number2}[?|.]",), ("result",)),
    Tool(("multiply", "multiply_numbers"), "Multiply two numbers.", {"number": ("a", "x"), "number2": ("b", "y")},
         ("[What is|Multiply] {number} [times|by] {number2}[?|.]",), ("result",)),
    Tool(("search", "web_search", "search_web", "lookup"), "Search for a topic.", {"topic": ("query", "topic", "q")},
         ("[Search for|Look up|Find] [information about |]{topic}[.|]",), ("answer",)),
    Tool(("send_email", "send_message", "send_mail"), "Send a message.",
         {"name": ("to", "recipient"), "text": ("subject", "message", "body")},
         ("Send [an email|a message] to {name} about the {text}[.|]", "Write to {name} about the {text}[.|]"),
         ("status",)),
    Tool(("set_timer", "start_timer"), "Start a timer.", {"minutes": ("minutes", "duration")},
         ("Set a timer for {minutes} minutes[.|]", "Wake me in {minutes} minutes[.|]"), ("status",)),
    Tool(("get_stock_price", "stock_price"), "Get the price of a stock.", {"symbol": ("symbol", "ticker")},
         ("What is the [stock price|price] of {symbol}?",), ("price",)),
    Tool(("book_table", "reserve_table", "create_event", "add_event"), "Book a table or an event.",
         {"place": ("place", "title", "where"), "day": ("day", "date")},
         ("Book the {place} for {day}[.|]", "[Reserve|Plan] the {place} on {day}[.|]"), ("status",)),
    Tool(("order_food", "order", "buy"), "Order food.",
         {"food": ("item", "food", "product"), "number": ("quantity", "count")},
         ("[Order|Buy] {number} {food}[.|, please.]", "I want {number} {food}[.|]"), ("status", "price")),
    Tool(("set_light", "set_brightness", "dim_lights"), "Set the light of a room.",
         {"place": ("room", "place"), "level": ("level", "brightness")},
         ("Set the light in the {place} to {level}[.|]", "Dim the {place} to {level}[.|]"), ("status",)),
    Tool(("get_user", "find_user", "get_customer", "find_person"), "Find a person.", {"name": ("name", "user", "person")},
         ("[Who is|Find|Look up] {name}[?|.]", "Get the [user|customer] {name}[.|]"), ("city", "answer")),
    Tool(("translate", "translate_text"), "Translate a text.", {"text": ("text",)},
         ("Translate: {text}", "Translate the words {text}[.|]"), ("answer",)),
    Tool(("search_flights", "find_flights", "book_flight", "find_trains", "get_route"),
         "Find a way from one city to another.",
         {"city": ("origin", "from", "from_city", "start"), "city2": ("destination", "to", "to_city", "end")},
         ("[Find|Search|Book|Show] [flights|a flight|trains|a train|the route|a way] from {city} to {city2}[.|]",
          "How do I get from {city} to {city2}?"), ("price", "status")),
    Tool(("convert", "convert_currency", "exchange_rate"), "Convert money.",
         {"number": ("amount", "value"), "currency": ("from_currency", "source"), "currency2": ("to_currency", "target")},
         ("Convert {number} {currency} to {currency2}[.|]", "How much is {number} {currency} in {currency2}?"),
         ("result",)),
    Tool(("play_song", "play_music", "create_reminder", "add_note", "set_reminder", "create_ticket"), "Take a title.",
         {"text": ("title", "song", "name", "note"), "day": ("day", "date")},
         ("[Play|Remember|Note] {text} on {day}[.|]", "[Create a reminder|Make a note]: {text}, {day}"), ("status",)),
    Tool(("get_user_info", "get_account", "delete_user", "get_order_status", "get_invoice"), "Needs a number.",
         {"number": ("id", "user_id", "order_id", "account_id")},
         ("[Get|Show|Delete|Check] the [user|account|order|invoice] {number}[.|]", "What about number {number}?"),
         ("status", "answer")),
    Tool(("list_files", "get_date", "get_news", "ping", "get_status", "roll_dice"), "Needs no arguments.", {},
         ("[Call|Run|Use] {function}[.|]", "[Show|Tell] me the [files|date|news|status][.|]", "Roll the dice[.|]"),
         ("status",)),
)  # fmt: skip


def signature(name: str, about: str, parameters: list[str]) -> str:
    """The line about a function as the chat template writes it."""
    return f"{name}({', '.join(parameters)})" + (f": {about}" if about else "")


@dataclass(frozen=True)
class Call:
    """One function as a request declares it, and a question that calls it."""

    line: str
    question: str
    name: str
    arguments: dict[str, object]
    results: tuple[str, ...]


def draw_value(rng: random.Random, kind: str) -> object:
    """A value of one kind; names are sometimes made up, so that copying one does not depend on knowing it."""
    if kind in ("city", "city2", "name", "topic") and rng.random() < 0.25:
        return " ".join(made_up_word(rng).capitalize() for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(VALUES[kind])


def draw_call(rng: random.Random) -> Call:
    tool = rng.choice(TOOLS)
    name = rng.choice(tool.names)
    kinds = list(tool.parameters)
    chosen = {kind: rng.choice(names) for kind, names in tool.parameters.items()}
    values = {kind: draw_value(rng, kind) for kind in kinds}
    question = expand(
        rng, rng.choice(tool.questions), {**{kind: str(value) for kind, value in values.items()}, "function": name}
    )
    about = tool.about if rng.random() < 0.8 else ""
    return Call(signature(name, about, list(chosen.values())), question, name,
                {chosen[kind]: values[kind] for kind in kinds}, tool.results)  # fmt: skip


def made_up_call(rng: random.Random) -> Call:
    """A function of any name and parameters, which the question spells out."""
    name = rng.choice(VERBS) + rng.choice((made_up_word(rng), rng.choice(OBJECTS), rng.choice(NOUNS)))
    kinds = rng.sample(list(VALUES), rng.randint(0, 3))
    names = [rng.choice((kind.rstrip("2"), made_up_word(rng), rng.choice(NOUNS))) for kind in kinds]
    arguments = {key: draw_value(rng, kind) for key, kind in zip(names, kinds, strict=True)}
    told = " and ".join(f"{key} {value}" for key, value in arguments.items())
    verb = rng.choice(("Call", "Use", "Run"))
    question = f"{verb} {name}" + (f" with {told}." if told else ".")
    return Call(
        signature(name, rng.choice(("", f"Do the {made_up_word(rng)}.")), list(arguments)),
        question,
        name,
        arguments,
        tuple(RESULTS),
    )


def add_call(document: Document, call: Call) -> Document:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return document.add("<tool_call>\n").add(body, answer=True).add("\n</tool_call>")


def add_result(rng: random.Random, document: Document, call: Call) -> Document:
    """The function's result, which is text or a JSON object, and the answer that repeats it."""
    key = rng.choice(call.results)
    value = rng.choice(RESULTS[key])
    where = next((value for value in call.arguments.values() if isinstance(value, str)), "")
    answer = f"The {key} is {value}."
    if rng.random() < 0.4:
        result = f"{value}"
    elif where and rng.random() < 0.5:
        result, answer = (
            json.dumps({next(iter(call.arguments)): where, key: value}),
            f"The {key} for {where} is {value}.",
        )
    else:
        result = json.dumps({key: value})
    document.add(f"{TURN_START}tool\n{result}{TURN_END}\n{TURN_START}assistant\n")
    return document.add(answer, answer=True)


def tools_turn(lines: list[str], system: str = "") -> str:
    """The system message with the functions, as the chat template writes it."""
    functions = "\n".join(lines)
    return f"{TURN_START}system\n{system}{system and chr(10)}<tools>\n{functions}\n</tools>{TURN_END}\n"


def tool_chat(rng: random.Random) -> Document:
    """One to four functions, and turns that call one, two at once, or none."""
    calls = [made_up_call(rng) if rng.random() < 0.3 else draw_call(rng) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
    calls = list({call.name: call for call in calls}.values())
    system = rng.choice(("", "", "", "You are a helpful assistant."))
    document = Document().add(tools_turn([call.line for call in calls], system))
    turns = rng.choice((1, 1, 2, 3))
    for index in range(turns):
        is_last = index == turns - 1
        if rng.random() < 0.2:  # no call
            question, answer = capital_qa(rng) if rng.random() < 0.5 else rng.choice(SMALL_TALK)
            question, answer = sloppy(rng, expand(rng, question)), expand(rng, answer)
            document.add(f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n")
            end_turn(add_answer(document, answer), is_last)
            continue
        call = rng.choice(calls)
        asked = [call]
        question = call.question if rng.random() < 0.3 else sloppy(rng, call.question)
        if question != call.question and question.lower() == question:
            question = call.question  # values are copied as they are written
        if len(calls) > 1 and rng.random() < 0.15:
            other = rng.choice([one for one in calls if one is not call])
            asked, question = [call, other], f"{call.question} {other.question}"
        document.add(f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n")
        for number, one in enumerate(asked):
            add_call(document.add("\n" if number else ""), one)
        if len(asked) == 1 and rng.random() < 0.6:
            document.add(TURN_END + "\n")
            add_result(rng, document, call)
        end_turn(document, is_last)
    return document
