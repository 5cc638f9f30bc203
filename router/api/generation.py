"""The token streams of one request, as text: its choices, run side by side.

`Generation` owns them. However it ends (the answer complete, an error, the client gone), `close` cancels what still runs,
so that no instance works for nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from pdserve.errors import Unavailable
from pdserve.request import TokenLogprobs
from pdserve.router.api.requests import ParsedRequest
from pdserve.router.backend import Backend, Chunk, TokenStream
from pdserve.router.text.detokenizer import TextStream
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.text.tool_calls import CallPart, Parts, ToolCalls

Json = dict[str, object]


@dataclass(slots=True)
class Delta:
    """What is new in one choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs]  # one for each id, if they were asked for
    starts: list[int]  # where in the choice's text each token begins, in characters
    calls: list[CallPart]  # of tools; what is in them is not in the text


Emit = Callable[[Iterable[Delta]], Awaitable[None]]  # takes all of them, which are of one choice


@dataclass
class Choice:
    index: int
    stream: TokenStream
    text: TextStream
    echo: str = ""  # goes before the text
    tools: ToolCalls | None = None
    tokens: int = 0

    @property
    def generated(self) -> int:
        """Tokens so far, those included that nobody has read if it was cut short."""
        return self.tokens if self.text.finish_reason else max(self.tokens, self.stream.timeline.output_tokens)

    async def run(self, emit: Emit) -> None:
        """Emits until the end of the choice, which a stop string may bring before the end of its tokens."""
        async for chunks in self.stream:
            await emit(self._deltas(chunks))
            if self.text.finish_reason is not None:
                if chunks[-1].finish_reason is None:
                    self.stream.cancel(self.text.finish_reason)
                return
        raise Unavailable("the tokens ended without a reason", kind="incomplete_stream")

    def _deltas(self, chunks: list[Chunk]) -> Iterator[Delta]:
        """One for each chunk up to the end; tokens are counted as they are taken."""
        for chunk in chunks:
            text, token_ids = self.text.push(chunk)
            text, self.echo = self.echo + text, ""
            self.tokens += len(token_ids)
            logprobs, starts = chunk.logprobs[: len(token_ids)], self.text.starts
            parts, reason = self._divided(text)
            yield Delta(self.index, parts.text, token_ids, reason, logprobs, starts, parts.calls)
            if self.text.finish_reason is not None:
                return

    def _divided(self, text: str) -> tuple[Parts, str | None]:
        """The text and the tool calls in it, and why the choice ends, if it does."""
        reason = self.text.finish_reason
        if self.tools is None:
            return Parts(text), reason
        parts = self.tools.push(text)
        if reason is not None:
            parts.text += self.tools.finish().text
        return parts, "tool_calls" if reason == "stop" and self.tools.calls else reason


class Generation:
    """The choices of one request, from the moment that the backend has accepted them all.

    `leave` is called once or more when it is over, with the tokens of its prompts and of its choices, or 0 if it was refused.
    """

    def __init__(
        self, parsed: ParsedRequest, tokenizer: Tokenizer, backend: Backend, leave: Callable[[int], None]
    ) -> None:
        """Raises RequestError, with nothing left running, if the backend refuses one of them."""
        self.parsed = parsed
        self._leave = leave
        self.tokenizer = tokenizer
        self.choices: list[Choice] = []
        try:
            for index, request in enumerate(parsed.requests):
                min_tokens = request.sampling.min_tokens
                text = TextStream(
                    tokenizer,
                    parsed.stops,
                    include_stop=parsed.include_stop,
                    min_tokens=min_tokens,
                    starts=parsed.logprobs,
                )
                echo = parsed.echo[index * len(parsed.echo) // len(parsed.requests)] if parsed.echo else ""
                tools = (
                    ToolCalls(parsed.tools.format, parsed.tools.names, parsed.tools.single) if parsed.tools else None
                )
                self.choices.append(Choice(index, backend.open(request), text, echo, tools))
        except BaseException:
            leave(0)
            self.close()
            raise

    async def run(self, emit: Emit) -> None:
        """Emits what the choices bring, in the order in which it comes. The first error ends all of them."""
        if len(self.choices) == 1:
            return await self.choices[0].run(emit)
        tasks = [asyncio.create_task(choice.run(emit)) for choice in self.choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel_all(tasks)

    def close(self) -> None:
        """Cancels the choices that are not over."""
        for choice in self.choices:
            if choice.text.finish_reason is None:
                choice.stream.cancel()
        self._leave(self.prompt_tokens + sum(choice.generated for choice in self.choices))

    @property
    def prompt_tokens(self) -> int:
        """The prompt of several choices counts once."""
        return sum(map(len, self.parsed.prompts))

    @property
    def completion_tokens(self) -> int:
        """So far."""
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> Json:
        """Tokens so far; as cached count only those of a prompt that none of its choices computed."""
        prompts, choices = self.parsed.prompts, self.choices
        n = len(choices) // len(prompts)
        cached = 0
        for i in range(len(prompts)):
            cached += min(choice.stream.timeline.cached_tokens for choice in choices[i * n : (i + 1) * n])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels what runs and waits for it; the errors are the caller's, who has them from the first that failed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
