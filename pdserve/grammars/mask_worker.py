"""A mask worker: follows one grammar for the sequences of an instance, and is killed when a mask takes too long.

It is forked from a compile server (`compile_server.py`) and serves one connection, until that is closed. First it receives
the length of the grammar in 4 bytes, and the grammar in Lark's syntax, and answers LOADED. A request is the length of its
text in 4 bytes, and the text as JSON:

    ended  followers, one per sequence, that are gone
    rows   [follower, new tokens, CPU seconds that its masks may take in all] for each mask

The answer has for each row, in their order, a status, a length in 4 bytes and the mask or a message. A row that exceeds its
CPU time ends the process, so the first row without an answer is the one to blame.
"""

import json
import signal
import socket
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.grammars.limits import MAX_MASK_CPU_S

LOADED, MASK, BROKEN, EXPENSIVE = b"l", b"+", b"-", b"!"
LENGTH_BYTES = 4


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of an output. `is_error` tells whether the grammar is invalid."""
    limits = LLParserLimits(max_items_in_row=20_000, step_max_items=1_000_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def serve_masks(connection: socket.socket, tokenizer: LLTokenizer, load_cpu_s: float) -> None:
    """Serve requests until the connection is closed. Loading the grammar may take `load_cpu_s` of CPU time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    followed: dict[int, _Followed] = {}
    with connection.makefile("rb") as stream:

        def receive() -> bytes:
            return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))

        grammar = receive().decode()
        signal.setitimer(signal.ITIMER_PROF, load_cpu_s)
        beginning = new_matcher(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if beginning.is_error():
            return
        connection.sendall(LOADED)
        while text := receive():
            request = json.loads(text)
            for number in request["ended"]:
                followed.pop(number, None)
            for number, tokens, budget_s in request["rows"]:
                if number not in followed:
                    followed[number] = _Followed(beginning, tokenizer.vocab_size)
                status, content = followed[number].follow(tokens, budget_s)
                connection.sendall(status + len(content).to_bytes(LENGTH_BYTES, "big") + content)


class _Followed:
    """Position of one sequence in the grammar."""

    def __init__(self, beginning: LLMatcher, vocab_size: int) -> None:
        self._matcher = beginning.deep_copy()
        self._mask_bytes = -(-vocab_size // 32) * 4  # llguidance's masks may have a word more
        self._cpu_s = 0.0

    def follow(self, tokens: list[int], budget_s: float) -> tuple[bytes, bytes]:
        """Return MASK and the mask after these tokens, BROKEN, or EXPENSIVE and what exceeds the limits."""
        if self._cpu_s > budget_s:
            return EXPENSIVE, f"took {self._cpu_s:.1f} s of CPU time".encode()
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(1e-6, min(budget_s - self._cpu_s, MAX_MASK_CPU_S)))
        # The mask of a matcher that exceeds a limit of llguidance has the tokens that end an output.
        follows = all(map(self._matcher.consume_token, tokens))
        mask = self._matcher.compute_bitmask()[: self._mask_bytes] if follows else b""
        has_failed = self._matcher.is_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._cpu_s += time.process_time() - started
        if not follows:
            return BROKEN, b""
        if has_failed:
            return EXPENSIVE, b"has too many readings"
        return (MASK, mask) if mask.strip(b"\0") else (BROKEN, b"")
