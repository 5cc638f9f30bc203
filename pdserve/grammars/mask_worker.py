"""A mask worker: follows one grammar for the sequences of an instance, and is killed when a mask takes too long.

It is forked from a compile server (`compile_server.py`) and serves one connection, until that is closed. First it receives
the length of the compiled grammar in 4 bytes, and the grammar as xgrammar's JSON, and answers LOADED. A request is the length
of its text in 4 bytes, and the text as JSON:

    ended  followers, one per sequence, that are gone
    rows   [follower, new tokens, CPU seconds that its masks may take in all] for each mask

The answer has for each row, in their order, a status, a length in 4 bytes and the mask or a message. A row that exceeds its
CPU time ends the process, so the first row without an answer is the one to blame.
"""

import json
import signal
import socket
import time
from typing import Any

from pdserve.grammars.limits import MAX_MASK_CPU_S

LOADED, MASK, BROKEN, EXPENSIVE = b"l", b"+", b"-", b"!"
LENGTH_BYTES = 4


def serve_masks(connection: socket.socket, info: Any) -> None:
    """Serve requests until the connection is closed.

    Args:
        info: xgrammar's `TokenizerInfo`.
    """
    from xgrammar import CompiledGrammar

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    followed: dict[int, _Followed] = {}
    with connection.makefile("rb") as stream:

        def receive() -> bytes:
            return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))

        compiled = CompiledGrammar.deserialize_json(receive().decode(), info)
        connection.sendall(LOADED)
        while text := receive():
            request = json.loads(text)
            for number in request["ended"]:
                followed.pop(number, None)
            for number, tokens, budget_s in request["rows"]:
                if number not in followed:
                    followed[number] = _Followed(compiled, info.vocab_size)
                status, content = followed[number].follow(tokens, budget_s)
                connection.sendall(status + len(content).to_bytes(LENGTH_BYTES, "big") + content)


class _Followed:
    """Position of one sequence in the grammar."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        from xgrammar import GrammarMatcher, allocate_token_bitmask

        self._matcher = GrammarMatcher(compiled)
        self._mask_1W = allocate_token_bitmask(1, vocab_size)
        self._cpu_s = 0.0

    def follow(self, tokens: list[int], budget_s: float) -> tuple[bytes, bytes]:
        """Return MASK and the mask after these tokens, BROKEN, or EXPENSIVE and the CPU seconds, which exceed the budget."""
        if self._cpu_s < budget_s:
            started = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, min(budget_s - self._cpu_s, MAX_MASK_CPU_S))
            follows = all(not self._matcher.is_terminated() and self._matcher.accept_token(token) for token in tokens)
            self._mask_1W.fill_(-1)
            if follows and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(self._mask_1W, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._cpu_s += time.process_time() - started
            if not follows:
                return BROKEN, b""
        if self._cpu_s > budget_s:
            return EXPENSIVE, f"{self._cpu_s:.1f}".encode()
        return MASK, self._mask_1W.numpy().tobytes()
