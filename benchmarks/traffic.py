"""Clients of the chaos benchmark: each sends requests continuously, and compares the answers with those without faults."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from pdserve.lines.event_stream import read_events_async

if TYPE_CHECKING:
    from chaos import Settings

WHOLE = ("stop", "length")


@dataclass
class Case:
    """One request, with its answer in the run without faults: finish reason, tokens, and their log probabilities."""

    body: dict[str, Any]
    end: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """The result of one request: outcome (a finish reason, `cancelled`, or a status and its reason), tokens, their log
    probabilities if they were asked for, and the longest pause between two events of a stream in seconds.
    """

    end: str = "broken off"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pause: float = 0.0

    def add(self, choice: dict[str, Any]) -> None:
        """Add what a body or an event says."""
        self.tokens += choice.get("token_ids") or []
        self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []


class Traffic:
    """Requests of many kinds, and their results.

    Attributes:
        ends: number of answers by outcome: a finish reason, or a status with the error's code and message.
        defects: descriptions of violations.
        seconds: durations of complete answers.
        pauses: longest pause of each complete stream, by request id.
    """

    def __init__(self, url: str, model: str, settings: "Settings") -> None:
        self.ends: Counter[str] = Counter()
        self.defects: list[str] = []
        self.seconds: list[float] = []
        self.pauses: dict[str, float] = {}
        self._url, self._settings = url, settings
        self._cases = _cases(model, settings)
        self._numbers = itertools.count()

    async def learn(self) -> None:
        """Send every request without faults, and keep the answers as reference."""

        async def ask(case: Case) -> None:
            while case.end not in WHOLE:  # on a busy machine a request may fail even without faults
                answer = await _ask(http, case.body)
                case.end, case.tokens, case.logprobs = answer.end, answer.tokens, answer.logprobs

        async with self._http() as http, asyncio.TaskGroup() as group:
            for case in self._cases:
                group.create_task(ask(case))

    async def run(self, over: asyncio.Event) -> None:
        """Send requests until the given time, and wait for the last one."""
        async with self._http() as http, asyncio.TaskGroup() as group:
            for number in range(self._settings.clients):
                drawn = random.Random(f"client {number} {self._settings.seed}")
                group.create_task(self._client(http, drawn, over))

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=None, limits=httpx.Limits(max_connections=None))

    async def _client(self, http: httpx.AsyncClient, drawn: random.Random, over: asyncio.Event) -> None:
        while not over.is_set():
            case, streams = drawn.choice(self._cases), drawn.random() < 0.6
            stay = drawn.choice([0.05, 0.2, 0.8]) if drawn.random() < 0.2 else None
            name, body = f"chaos-{next(self._numbers)}", {**case.body, "stream": streams}
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._settings.deadline):
                    answer = await _ask(http, body, name, stay)
            except TimeoutError:
                answer = Answer(f"no end within {self._settings.deadline:g} s")
            except httpx.HTTPError as error:
                answer = Answer(f"broken off: {error!r}")
            gave_up = answer.end.startswith(("503", "429"))
            self.ends[answer.end] += 1
            right = answer.tokens == case.tokens[: len(answer.tokens)]
            right &= answer.logprobs == case.logprobs[: len(answer.logprobs)]
            if answer.end in WHOLE:
                right &= (answer.end, len(answer.tokens)) == (case.end, len(case.tokens))
                self.seconds.append(time.monotonic() - started)
                self.pauses |= {name: answer.pause} if streams else {}
            else:
                right &= gave_up or answer.end == "cancelled"
            if not right:
                self.defects.append(f"{body} was answered {answer}; right is {case.tokens} ({case.end})")
            await asyncio.sleep(drawn.uniform(0, 2 * self._settings.pause) + 0.2 * gave_up)


def _cases(model: str, settings: "Settings") -> list[Case]:
    """Return greedy and sampled requests, many of which share a prefix."""
    drawn = random.Random(f"cases {settings.seed}")
    beginnings = [[], *([drawn.randrange(250) for _ in range(150)] for _ in range(3))]
    found = []
    names = [model, *(f"a{i}" for i in range(settings.adapters))]
    for number in range(settings.cases):
        own = [drawn.randrange(250) for _ in range(drawn.choice([1, 20, 90, 300]))]
        body = {
            "model": names[number % len(names)],
            "prompt": drawn.choice(beginnings) + own,
            "max_tokens": drawn.choice([1, 20, 80, 250]),
        }
        body |= {"ignore_eos": drawn.random() < 0.8, "temperature": float(number % 2), "seed": number}
        body |= {"logprobs": 0} if number % 4 < 2 else {}
        found.append(Case({**body, "return_token_ids": True}))
    return found


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], name: str = "", stay: float | None = None) -> Answer:
    """Send a request. `name`: its id. `stay`: seconds until the client disconnects."""
    answer, last, finish = Answer(), 0.0, ""
    headers = {"X-Request-Id": name} if name else {}
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(stay),
            http.stream("POST", "/v1/completions", json=body, headers=headers) as reply,
        ):
            if reply.status_code != 200 or not body.get("stream"):
                whole = json.loads(await reply.aread())
                if reply.status_code != 200:
                    return Answer(_failure(reply.status_code, whole["error"]))
                answer.end = whole["choices"][0]["finish_reason"]
                answer.add(whole["choices"][0])
                return answer
            async for data in read_events_async(reply.aiter_bytes()):
                if data == "[DONE]":
                    answer.end = finish or answer.end
                    return answer
                event, now = json.loads(data), time.monotonic()
                if "error" in event:
                    status = {"service_unavailable": 503, "rate_limit_error": 429}.get(event["error"]["type"], 500)
                    answer.end = _failure(status, event["error"])
                    return answer
                answer.pause, last = max(answer.pause, now - last if last else 0.0), now
                answer.add(event["choices"][0])
                finish = event["choices"][0].get("finish_reason") or finish
            return answer
    answer.end = "cancelled"
    return answer


def _failure(status: int, error: dict[str, str]) -> str:
    return f"{status} {error['code']}: {error['message']}"
