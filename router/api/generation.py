"""Runs the choices of one HTTP request side by side and turns their token streams into text.

`Generation` owns the streams. However it ends (complete, with an error, or because the client disconnected), `close` cancels
those still running, so that no instance generates tokens that nothing reads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from pdserve.output import Output
from pdserve.request import TokenLogprobs
from pdserve.router.api.beams import answer_streams
from pdserve.router.backend import Backend, TokenStream
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.detokenizer import TextStream
from pdserve.router.text.parsers.output import ParsedOutput, ToolCallDelta
from pdserve.router.text.parsers.output_parser import OutputParser
from pdserve.router.text.tokenizer import Tokenizer

SLICE_TOKENS = 256  # that become text one by one without a pause: some milliseconds
Json = dict[str, object]


@dataclass(slots=True)
class Delta:
    """An increment of one choice.

    Attributes:
        index: the number of the choice.
        logprobs: one entry per token, if the request asks for them.
        text_offsets: the character offset in the choice's text at which each token begins, if it asks for logprobs.
        tool_calls: increments of tool calls; these are not part of `text`.
        reasoning: an increment of the reasoning before the answer, which is not part of `text` either.
        prompt_logprobs: in the first delta, one entry per token of the prompt but the first, if the request asks for them;
            None in the others.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprobs]
    text_offsets: list[int]
    tool_calls: list[ToolCallDelta]
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    reasoning: str = ""


@dataclass
class Choice:
    """One running choice: its token stream and the state that turns tokens into deltas.

    Attributes:
        echo, echo_length: text to emit before the generated text, and its characters.
        echo_only: emit nothing else.
        num_tokens: tokens emitted so far.
    """

    index: int
    stream: TokenStream
    text: TextStream
    echo: str
    echo_length: int
    parser: OutputParser | None
    echo_only: bool
    num_tokens: int = 0

    def deltas(self, chunks: list[Output]) -> Iterator[Delta]:
        """Yield one delta per chunk up to the end of the choice. Tokens are counted as the iterator advances.

        A long chunk gives several, between which others can be served.
        """
        for chunk in chunks if len(chunks[0].token_ids) <= SLICE_TOKENS else _sliced(chunks):
            if self.parser is not None:
                output, token_ids = self._parse(chunk, self.parser)
            else:
                text, token_ids = self.text.push(chunk)
                output = ParsedOutput(text)
                if self.echo_only:
                    output, token_ids = ParsedOutput(), []
            reason = "length" if self.echo_only else self.text.finish_reason
            if reason == "stop" and self.parser is not None and self.parser.num_calls:
                reason = "tool_calls"
            output.text, self.echo = self.echo + output.text, ""
            self.num_tokens += len(token_ids)
            logprobs, offsets = chunk.logprobs[: len(token_ids)], self.text.text_offsets
            if self.echo_only:
                offsets = []
            if self.echo_length and logprobs:
                offsets = [self.echo_length + offset for offset in offsets]
            if self.text.finish_reason is not None and chunk.finish_reason is None:
                self.stream.cancel(self.text.finish_reason)  # before a client reads it, which may be slow, or leave
            yield Delta(
                self.index,
                output.text,
                token_ids,
                reason,
                logprobs,
                offsets,
                output.calls,
                chunk.prompt_logprobs if self.num_tokens == len(token_ids) else None,
                output.reasoning,
            )
            if self.text.finish_reason is not None:
                return

    def _parse(self, chunk: Output, parser: OutputParser) -> tuple[ParsedOutput, list[int]]:
        """Return what the chunk adds, and its token ids up to the end of the choice."""
        output, token_ids = ParsedOutput(), list[int]()
        while len(token_ids) < len(chunk.token_ids) - 1 and parser.may_reason:
            self._parse_part(Output([chunk.token_ids[len(token_ids)]]), output, token_ids)
            if self.text.finish_reason is not None:
                return output, token_ids
        self._parse_part(structs.replace(chunk, token_ids=chunk.token_ids[len(token_ids) :]), output, token_ids)
        return output, token_ids

    def _parse_part(self, part: Output, output: ParsedOutput, token_ids: list[int]) -> None:
        """Parse a part of a chunk, and append to its output and its ids up to the end of the choice."""
        assert self.parser is not None
        text, taken = self.text.push(part)
        output.extend(self.parser.push(text, len(taken), is_end=self.text.finish_reason is not None))
        token_ids += taken


def _sliced(chunks: list[Output]) -> Iterator[Output]:
    for chunk in chunks:
        last = max(0, len(chunk.token_ids) - 1) // SLICE_TOKENS * SLICE_TOKENS
        for begin in range(0, last, SLICE_TOKENS):
            end = begin + SLICE_TOKENS
            ids, scores = chunk.token_ids[begin:end], chunk.logprobs[begin:end]
            yield structs.replace(chunk, token_ids=ids, logprobs=scores, finish_reason=None)
        yield (
            structs.replace(chunk, token_ids=chunk.token_ids[last:], logprobs=chunk.logprobs[last:]) if last else chunk
        )


@dataclass(kw_only=True)
class Generation:
    """One HTTP request: what it asks for and, once `start` has returned, its choices, which run on the backend.

    Attributes:
        id: the response's id, the X-Request-Id header and the id of /debug/requests/{id}.
        prompts: token ids of each prompt.
        requests: the `n` choices of the first prompt, then those of the next.
        echo: the text of each prompt, if it is to precede the answer.
        echo_only: the answer is the echo alone; the one token that is generated nevertheless is no part of it.
        open_parser: returns the parser of a choice's text; None if there is nothing to find in it but text.
        finds_reasoning: the parser tells reasoning from the answer.
        created: when the request was parsed, in seconds since 1970.
    """

    id: str
    chat: bool = False
    model: str
    prompts: list[list[int]] = field(repr=False)
    requests: list[RoutedRequest]
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    echo_only: bool = False
    open_parser: Callable[[], OutputParser | None] | None = None
    finds_reasoning: bool = False
    created: int
    tokenizer: Tokenizer = field(init=False, repr=False)
    choices: list[Choice] = field(default_factory=list, init=False)
    _release: Callable[[int], object] = field(default=int, init=False)

    def start(self, tokenizer: Tokenizer, backend: Backend, release: Callable[[int], None]) -> None:
        """Open the token stream of each choice. The backend selects instances, checks the SLO and submits the request.

        Args:
            release: called at least once when the generation is over, with the number of tokens used (prompts and
                outputs), or 0 if the backend refused it.

        Raises:
            RequestError: the backend refuses a choice; the others have been cancelled.
        """
        self.tokenizer, self._release = tokenizer, release
        try:
            n = len(self.requests) // len(self.prompts)
            parsers: list[OutputParser | None] = [None] * len(self.requests)
            if (open_parser := self.open_parser) is not None:  # before the streams, which one that raises would leave
                parsers = [open_parser() for _ in self.requests]
            for first in range(0, len(self.requests), n):
                asked = self.requests[first : first + n]
                if asked[0].sampling.beam_width:
                    streams: Sequence[TokenStream] = answer_streams(backend.open(asked[0]), n)
                else:
                    streams = backend.open_choices(asked)
                echo = self.echo[first // n] if self.echo else ""
                for index, stream in enumerate(streams, first):
                    parser = parsers[index]
                    text = TextStream(
                        self.tokenizer,
                        self.stops,
                        include_stop=self.include_stop,
                        min_tokens=self.requests[index].sampling.min_tokens,
                        track_offsets=self.logprobs,
                        skip_special_tokens=self.skip_special_tokens,
                        replaced=parser.special_tokens if parser is not None else None,
                    )
                    self.choices.append(Choice(index, stream, text, echo, len(echo), parser, self.echo_only))
        except BaseException:
            self._release(0)
            self.close()
            raise

    async def run(self) -> AsyncIterator[Iterator[Delta]]:
        """Yield the deltas of the choices as they arrive, those of one at a time. A stop string may end one early.

        Raises:
            RequestError: a choice has failed.
        """
        running = {choice.index: choice.stream for choice in self.choices}
        async for index, outputs in read(running):
            choice = self.choices[index]
            yield choice.deltas(outputs)
            if choice.text.finish_reason is not None:
                running.pop(index, None)

    def close(self) -> None:
        """Cancel the choices that have not ended, and release the request's admission."""
        generated = 0
        for choice in self.choices:
            generated += choice.num_tokens
            if choice.text.finish_reason is None:  # cut short, so there may be tokens that were never emitted
                choice.stream.cancel()
                generated += max(0, choice.stream.timeline.output_tokens - choice.num_tokens)
        if width := self.requests[0].sampling.beam_width:  # beams that are no answer were as much work
            generated = generated * width * len(self.prompts) // len(self.requests)
        self._release(self.prompt_tokens + generated)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with several choices counts once."""
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        """Tokens emitted so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were cached. One counts only if none of its prompt's choices computed it."""
        n, cached = len(self.choices) // len(self.prompts), 0
        for first in range(0, len(self.choices), n):
            cached += min(choice.stream.timeline.cached_tokens for choice in self.choices[first : first + n])
        return cached

    def usage(self) -> Json:
        """Return OpenAI's usage object so far; tokens of reasoning are part of it if they are told from others."""
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.requests[0].prediction:
            usage["completion_tokens_details"] = {
                "reasoning_tokens": self.reasoning_tokens,
                **self._prediction_tokens(),
            }
        elif self.finds_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def _prediction_tokens(self) -> dict[str, int]:
        """Return what became of the prediction's drafts; those accepted behind a stop string are no part of the answer."""
        pairs = [(choice.num_tokens, choice.stream.timeline.predicted) for choice in self.choices]
        return {
            "accepted_prediction_tokens": sum(min(count, predicted.accepted) for count, predicted in pairs),
            "rejected_prediction_tokens": sum(predicted.rejected for _, predicted in pairs),
        }

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, over all choices."""
        return sum(choice.parser.num_reasoning_tokens for choice in self.choices if choice.parser is not None)

    def prompt_of(self, choice: int) -> list[int]:
        """Return the token ids of the prompt of a choice."""
        return self.prompts[choice * len(self.prompts) // len(self.requests)]


async def read(running: dict[int, TokenStream]) -> AsyncIterator[tuple[int, list[Output]]]:
    """Yield the outputs of numbered streams as they arrive. A stream leaves the dict with its finish reason.

    Raises:
        RequestError: a request has failed.
    """
    readable = asyncio.Event()
    for stream in running.values():
        stream.on_readable = readable.set
    while running:
        readable.clear()
        is_idle = True
        for index, stream in list(running.items()):
            if outputs := stream.take():
                is_idle = False
                if outputs[-1].finish_reason is not None:
                    del running[index]
                yield index, outputs
        if is_idle:
            await readable.wait()


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for them. Their errors are dropped: the caller already has the first one."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
