"""Attacks by bodies of requests: large, of wrong types, unfinished, or costly to read."""

import json
import random
import string
import time
from contextlib import ExitStack, suppress
from typing import Any

from attacking.target import ENDED, Target

LARGEST = 4 * 1024 * 1024 - 1024  # bytes, below the default of --max-body-bytes
UNFINISHED = 30  # bodies at once
MANY_CHOICES: list[dict[str, Any]] = [{"n": 16, "max_tokens": 400, "stream": True}] * 4  # of requests at once
INJECTION = "\x1b[2J\r\nWARNING pdserve: forged"
REFUSED = {400, 413, 422, 429}
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(850):
    NESTED = {"type": "array", "items": NESTED}
LONG_NAMES: dict[str, Any] = {str(i * 7919 % 10007) * 4: {"type": "integer"} for i in range(900)}

LISTS = {  # fields that are lists or objects, by path
    "/v1/completions": ("prompt", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"),
    "/v1/chat/completions": ("messages", "tools", "stop", "logit_bias", "allowed_token_ids"),
    "/v1/messages": ("messages", "system", "tools", "stop_sequences"),
    "/v1/responses": ("input", "tools", "metadata"),
    "/tokenize": ("messages",),
    "/detokenize": ("tokens",),
    "/v1/embeddings": ("input",),
}


def wrong_types(target: Target) -> None:
    """A list of wrong items that fills a body, in a random field; an object with as many names in half of the cases."""
    path = random.choice(list(LISTS))
    field = random.choice(LISTS[path])
    size = random.choice([30_000, LARGEST])
    wrong = f"[{','.join(['{}'] * (size // 3))}]"
    if random.random() < 0.3:
        wrong = json.dumps({str(number): [] for number in range(size // 16)})
    target.ask(target.post(path, f'{{"{field}":{wrong}}}'.encode()), {*REFUSED, 404})


def detokenize(target: Target) -> None:
    """As many ids as a body holds."""
    target.ask(target.post("/detokenize", {"tokens": [7] * (LARGEST // 3)}), {200, *REFUSED})


def unfinished_bodies(target: Target) -> None:
    """Bodies whose last byte does not come."""
    with ExitStack() as stack, suppress(*ENDED):
        for _ in range(UNFINISHED):
            connection = stack.enter_context(target.connect())
            connection.sendall(target.post("/v1/completions", b" " * LARGEST)[:-1])
        time.sleep(1)


def long_names(target: Target) -> None:
    """A long name where a short one is meant: a variable of the chat template."""
    name = "".join(random.choices(string.ascii_letters, k=32)) + "a" * random.choice([20_000, LARGEST // 2])
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    target.ask(target.post("/v1/chat/completions", body), REFUSED)


def many_bad_words(target: Target) -> None:
    target.ask(target.completion(bad_words=["xyz " * 4] * 5_000), REFUSED)


def all_log_probabilities(target: Target) -> None:
    """As many log probabilities as a request may ask for, of all its choices."""
    prompt = "one two three four " * 200
    target.ask(target.completion(prompt=prompt, n=64, max_tokens=1, prompt_logprobs=20), {200, *REFUSED})
    target.ask(target.completion(prompt="one", n=64, max_tokens=900, logprobs=20), {200, *REFUSED})


def deep_bodies(target: Target) -> None:
    target.ask(target.post("/v1/completions", b'{"prompt":' + b"[" * 100_000), REFUSED)


def grammar_bombs(target: Target) -> None:
    number = str(random.random())  # not in the cache
    chain = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}, "type": "array"} for i in range(1_000)}
    bombs: list[dict[str, Any]] = [
        {"guided_json": json.dumps({"title": number, **NESTED})},
        {"guided_json": {"title": number, "$ref": "#/$defs/0", "$defs": {**chain, "1000": {}}}},
        {"guided_regex": f"{number}{'a?' * 20_000}"},
        {"guided_grammar": f"root ::= {number}"},
        {"guided_grammar": f'root ::= "{number}" s\ns ::= s s s | s s | [a-z]'},  # takes all of its CPU time
        {"guided_json": {"title": number, "properties": LONG_NAMES, "additionalProperties": {}}, "max_tokens": 1},
    ]
    for bomb in bombs:
        target.ask(target.completion(**bomb), {200, 400, 429})


def new_grammars(target: Target) -> None:
    """As many grammars as users have them, each a new one."""
    for words in range(6):
        fields = {f"{random.random()}": {"type": "string", "maxLength": 10} for _ in range(1 + words)}
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        target.ask(target.completion(guided_json=schema, max_tokens=16), {200, 429})


def slow_masks(target: Target) -> None:
    """Words by grammars whose masks take longer with each token, and pass for quick ones before."""
    _leave_words(target, "s\ns ::= s s | [a-z]")


def quick_masks(target: Target) -> None:
    """The same streams by grammars as users have them, left as soon."""
    _leave_words(target, "[a-z]+")


def _leave_words(target: Target, word: str) -> None:
    with ExitStack() as stack:
        for body in MANY_CHOICES:
            connection = stack.enter_context(target.connect())
            grammar = f'root ::= "{random.random()}" {word}'  # not in the cache
            connection.sendall(target.completion(guided_grammar=grammar, **body))
        time.sleep(5)


def log_injection(target: Target) -> None:
    target.ask(target.completion(model=INJECTION), {404, 429})
    target.ask(target.completion(guided_regex=f"({INJECTION}"), {400, 429})
    target.ask(target.completion(prompt=f"<|im_end|>{INJECTION}<|im_start|>", max_tokens=1), {200, 429})
