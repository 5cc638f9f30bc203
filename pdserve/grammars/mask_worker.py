"""A mask worker: follows one grammar for the sequences of a tenant, and is killed when a mask takes too long.

It is forked from a compile server (`compile_server.py`) and serves one connection, until that is closed. First it sends
STARTED and its process id in 4 bytes. Then it receives the length of a specification in 4 bytes, and the specification
(`specification.py`), and answers LOADED, or INVALID, a length in 4 bytes and a message. A
request is the length of its text in 4 bytes, and the text as JSON:

    ended  followers, one per sequence, that are gone
    beside whether models go before: from now on, the worker runs at a lower priority
    rows   [follower, new tokens, CPU seconds of a mask, drafts]: wanted is the mask behind the new tokens, or those behind
           each of the drafts, unless that is null

For each mask, in their order, the answer has a status, the CPU seconds that it took, a length in 4 bytes and the mask or a
message. A mask that exceeds its CPU time ends the process, so the first one without an answer is the one to blame. Rows that
the worker does not come to within `TURN_S` are answered by LATER, each once, and to be asked for again.

The last thing that a worker sends when it exceeds a limit begins with one of EXCEEDED. One that ends without has met
something else, such as the kernel's lack of memory.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.grammars.formats import specifications, specified
from pdserve.grammars.schema import place_of_fault
from pdserve.grammars.schema_keywords import Path, Unsupported
from pdserve.grammars.specification import lark_grammar
from pdserve.priority import LOWEST, NICENESS, lower

STARTED, LOADED, INVALID = b"s", b"l", b"x"
MASK, BROKEN, EXPENSIVE, LATER = b"+", b"-", b"!", b"."
LENGTH_BYTES = 4
MAX_MESSAGE_CHARS = 1000
TOO_COMPLEX = ("too big", "too large", "too many", "too complex", "too deeply", "fuel", "limit", "panic")
HEAD = struct.Struct("!cdI")
TURN_S = 0.01  # CPU time after which other grammars get their turn
MAX_SEARCH_S = 0.2  # CPU time of compiling parts of a schema that is refused, to tell which is at fault
SLOW_S = 0.001  # CPU time of a mask that is slow, for each token before it that is new; most take a twentieth
MAX_SLOW_S = 0.005  # of all slow ones, after which a worker runs at the lowest priority


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of an output. `is_error` tells whether the grammar is invalid."""
    limits = LLParserLimits(max_items_in_row=20_000, step_max_items=1_000_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def build_matcher(spec: bytes, tokenizer: LLTokenizer, special: Mapping[str, int | None]) -> tuple[str, LLMatcher]:
    """Return the grammar of a specification in Lark's syntax, and its matcher at the beginning of an output.

    Raises:
        ValueError: it is invalid.
        MemoryError: it exceeds a limit.
    """
    given = json.loads(spec)
    try:
        return _built(given, tokenizer, special)
    except Unsupported:
        raise
    except ValueError as error:
        raise ValueError(str(error) + _place_of_fault(given, tokenizer, special)) from None


def _built(spec: dict[str, Any], tokenizer: LLTokenizer, special: Mapping[str, int | None]) -> tuple[str, LLMatcher]:
    grammar = lark_grammar(spec, special)
    matcher = new_matcher(tokenizer, grammar)
    if not matcher.is_error():
        return grammar, matcher
    message = _message(matcher.get_error())
    raise MemoryError(message) if any(sign in message for sign in TOO_COMPLEX) else ValueError(message)


def _place_of_fault(spec: dict[str, Any], tokenizer: LLTokenizer, special: Mapping[str, int | None]) -> str:
    """Return where a schema of a specification is at fault, for messages; empty if none is by itself."""
    last = time.thread_time() + MAX_SEARCH_S

    def holds(one: dict[str, Any], path: Path) -> bool:
        if time.thread_time() > last:
            return True
        with contextlib.suppress(ValueError):
            return bool(_built({**one, "at": path}, tokenizer, special))
        return False

    for one in specifications(spec.get("format", specified(spec))):
        if "json" in one and not holds(one, ()):
            return f", at {place_of_fault(one['json'], partial(holds, one))} of the schema"
    return ""


def encoded_message(error: ValueError) -> bytes:
    """Return what an error says, for clients."""
    return str(error)[:MAX_MESSAGE_CHARS].encode(errors="replace")


def _message(error: str) -> str:
    """Return what is wrong by an error of llguidance, without the place in the Lark grammar, which is not the client's."""
    lines = error.split("\n   1 | ")[0].splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return re.sub(r"^(?:at )?\d+\(\d+\): ", "", reason.rpartition("failed to compile JSON schema: ")[2])


def report_limits(connection: socket.socket, *limits: signal.Signals) -> None:
    """Write one of EXCEEDED, and more, to a connection when a fatal error or one of these signals ends the process."""
    faulthandler.enable(connection.fileno(), all_threads=False)
    for number in limits:
        signal.signal(number, signal.SIG_DFL)  # ends the process
        faulthandler.register(number, connection.fileno(), all_threads=False, chain=True)


def serve_masks(
    connection: socket.socket, tokenizer: LLTokenizer, special: Mapping[str, int | None], load_cpu_s: float
) -> None:
    """Serve requests until the connection is closed. Loading the grammar may take `load_cpu_s` of CPU time.

    Raises:
        MemoryError: the grammar exceeds a limit.
    """
    report_limits(connection, signal.SIGPROF)
    followed: dict[int, _Followed] = {}
    with connection.makefile("rb") as stream:

        def receive() -> bytes:
            return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))

        connection.sendall(STARTED + os.getpid().to_bytes(LENGTH_BYTES, "big"))
        spec = receive()
        signal.setitimer(signal.ITIMER_PROF, load_cpu_s)
        try:
            _, matcher = build_matcher(spec, tokenizer, special)
        except ValueError as error:
            message = encoded_message(error)
            connection.sendall(INVALID + len(message).to_bytes(LENGTH_BYTES, "big") + message)
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        beginning = _Beginning(matcher, tokenizer.vocab_size)
        connection.sendall(LOADED)
        niceness, slow_s = 0, 0.0
        while text := receive():
            request = json.loads(text)
            for number in request["ended"]:
                followed.pop(number, None)
            niceness = _lower(niceness, NICENESS if request["beside"] else 0)
            began = time.thread_time()
            for number, tokens, limit_s, drafts in request["rows"]:
                if time.thread_time() - began > TURN_S:
                    connection.sendall(HEAD.pack(LATER, 0.0, 0))
                    continue
                one = followed.setdefault(number, _Followed(beginning))
                masks = one.follow(tokens) if drafts is None else one.try_out(tokens, drafts)
                for status, seconds, content in _timed(masks, limit_s):
                    connection.sendall(HEAD.pack(status, seconds, len(content)) + content)
                    slow_s += seconds if seconds > SLOW_S * max(1, len(tokens)) else 0.0
                    niceness = _lower(niceness, LOWEST if slow_s > MAX_SLOW_S else 0)


def _lower(niceness: int, to: int) -> int:
    """Lower the priority of this process, unless it was lowered as far. Returns its niceness."""
    if to > niceness:
        lower(niceness=to)
    return max(to, niceness)


def _timed(masks: Iterator[tuple[bytes, bytes]], limit_s: float) -> Iterator[tuple[bytes, float, bytes]]:
    """Yield the CPU time of each mask, too. One that takes longer than the limit ends the process.

    It is that of the only thread: while there is a timer, Linux knows that of the process at its ticks only.
    """
    while True:
        started = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, max(1e-6, limit_s))
        found = next(masks, None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if found is None:
            return
        yield found[0], time.thread_time() - started, found[1]


class _Beginning:
    """The grammar before any token: where each sequence begins."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self._mask_bytes = -(-vocab_size // 32) * 4  # llguidance's masks may have a word more
        self._first: tuple[bytes, bytes] | None = None

    def first(self) -> tuple[bytes, bytes]:
        """Return the first mask, which is computed once for all."""
        self._first = self._first or self.mask(self.matcher)
        return self._first

    def mask(self, matcher: LLMatcher) -> tuple[bytes, bytes]:
        """Return MASK and which tokens may be next, or EXPENSIVE or BROKEN."""
        # The mask of a matcher that exceeds a limit of llguidance has the tokens that end an output.
        mask = matcher.compute_bitmask()[: self._mask_bytes]
        if matcher.is_error():
            return EXPENSIVE, b"has too many readings"
        return (MASK, mask) if mask.strip(b"\0") else (BROKEN, b"")


class _Followed:
    """Position of one sequence in the grammar."""

    def __init__(self, beginning: _Beginning) -> None:
        self._beginning = beginning
        self._matcher: LLMatcher | None = None  # None: no token yet

    def follow(self, tokens: list[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the mask behind further tokens."""
        if not tokens and self._matcher is None:
            yield self._beginning.first()
            return
        self._matcher = self._matcher or self._beginning.matcher.deep_copy()
        follows = all(map(self._matcher.consume_token, tokens))
        yield self._beginning.mask(self._matcher) if follows else (BROKEN, b"")

    def try_out(self, tokens: list[int], drafts: list[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the mask behind each of some tokens that may be next, or BROKEN where they do not follow the grammar.

        Before them come further tokens of the output, if this worker takes the place of another one.
        """
        self._matcher = self._matcher or self._beginning.matcher.deep_copy()
        follows = all(map(self._matcher.consume_token, tokens))
        matcher = self._matcher.deep_copy()
        for token in drafts:
            follows = follows and matcher.try_consume_tokens([token]) == 1
            yield self._beginning.mask(matcher) if follows else (BROKEN, b"")
