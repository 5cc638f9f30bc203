"""Sends requests at their times, whatever the server does (open loop), and records what came of each."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.tools.bench.events import read_answer
from pdserve.tools.bench.http_client import HttpClient
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.bench.vocabulary import write


@dataclass(frozen=True)
class Target:
    """Server that requests go to, and the fields that all of them share."""

    url: str  # scheme, host and port
    path: str
    chat: bool
    model: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    words: tuple[str, ...]
    run: str  # begins the ids of requests, which a router of ours takes over
    seed: int = 0
    max_concurrency: int | None = None
    think_time: float = 0.0


@dataclass
class Load:
    """Plays requests against a server.

    Args:
        begin: `time.perf_counter()` of time 0.
        on_sample: called with each request that has ended.
    """

    target: Target
    begin: float
    on_sample: Callable[[Sample], None]
    in_flight: int = 0
    _later: dict[int, list[Request]] = field(default_factory=lambda: defaultdict(list))
    _continued: set[int] = field(default_factory=set)
    _said: dict[int, list[tuple[str, str]]] = field(
        default_factory=dict
    )  # turns up to and with a request, if continued

    async def play(self, requests: Sequence[Request], stop: asyncio.Event) -> int:
        """Send all requests and wait for their ends, or until `stop`. Returns the number that it interrupted."""
        for one in requests:
            if one.after is not None:
                self._later[one.after].append(one)
                if one.continues:
                    self._continued.add(one.after)
        limit = self.target.max_concurrency
        places = asyncio.Semaphore(limit) if limit else None
        http = HttpClient(self.target.url, self.target.headers)
        sending = asyncio.create_task(self._send_all([one for one in requests if one.after is None], http, places))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
        interrupted = self.in_flight
        sending.cancel()
        stopping.cancel()
        await asyncio.gather(sending, stopping, return_exceptions=True)
        http.close()
        if sending.done() and not sending.cancelled() and (error := sending.exception()):
            raise error
        return interrupted

    async def _send_all(self, roots: list[Request], http: HttpClient, places: asyncio.Semaphore | None) -> None:
        async with asyncio.TaskGroup() as group:
            for one in sorted(roots, key=lambda root: root.at or 0.0):
                due = self.begin + (one.at or 0.0)
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._converse(one, one.at or 0.0, http, places, group))

    async def _converse(
        self,
        request: Request,
        due: float,
        http: HttpClient,
        places: asyncio.Semaphore | None,
        group: asyncio.TaskGroup,
    ) -> None:
        """Send one request at its time, and then the turns that wait for its answer."""
        if (wait := self.begin + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        sample = await self._send(request, due, http, places)
        if request.continues and request.after is not None:
            self._said.pop(request.after, None)
        self.on_sample(sample)
        for turn in self._later.get(request.index, ()):
            if sample.ok:
                at = max(turn.at or 0.0, sample.ended + self.target.think_time)
                group.create_task(self._converse(turn, at, http, places, group))
            else:
                self._give_up(turn, sample.ended)

    def _give_up(self, request: Request, now: float) -> None:
        """Record a turn, and those after it, whose previous turn had no answer."""
        error = "the previous turn failed"
        self.on_sample(Sample(request.index, now, sent=now, ended=now, error=error, key=request.key))
        for turn in self._later.get(request.index, ()):
            self._give_up(turn, now)

    async def _send(self, request: Request, due: float, http: HttpClient, places: asyncio.Semaphore | None) -> Sample:
        name = f"{self.target.run}-{request.index}"
        sample = Sample(request.index, due, input_tokens=request.input_tokens, request_id=name, key=request.key)
        self.in_flight += 1
        try:
            if places is not None:
                arrived = self._now()
                await places.acquire()
                sample.queued = self._now() - arrived
            try:
                body = self._body(request)
                sample.sent = self._now()
                sample.status, pieces = await http.post(self.target.path, body, name)
            finally:
                if places is not None:
                    places.release()
            sample.ended = self._now()
            read_answer(sample, [(at - self.begin, piece) for at, piece in pieces])
            if request.index in self._continued:
                self._said[request.index][-1] = (self._said[request.index][-1][0], sample.text)
        except OSError as error:
            sample.ended = self._now()
            sample.error = f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1
        return sample

    def _now(self) -> float:
        return time.perf_counter() - self.begin

    def _body(self, request: Request) -> bytes:
        target = self.target
        blocks = (write(target.words, target.seed, name, tokens) for name, tokens in request.blocks)
        prompt = request.text + "".join(blocks)
        before = self._said.get(request.after, []) if request.continues and request.after is not None else []
        said = [*before, (prompt, "")]
        if request.index in self._continued:
            self._said[request.index] = said
        body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
        if target.chat:
            messages = [
                {"role": role, "content": text}
                for turn in said
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            body |= {"messages": messages[:-1], "max_completion_tokens": request.output_tokens}
        else:
            text = "".join(question + answer for question, answer in said)
            body |= {"prompt": text, "max_tokens": request.output_tokens}
        return json.dumps(body | target.body).encode()
