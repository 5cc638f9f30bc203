"""Masks of compiled grammars, computed by a mask worker per grammar: the engine thread sends outputs and waits for the masks.

When a mask takes too long, its worker is killed. The sequence to blame fails, and if other sequences have the same grammar, a
new worker follows their outputs from the beginning. Other grammars have workers of their own.
"""

import itertools
import json
import logging
import socket
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.errors import RequestError
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.limits import MAX_MASK_CPU_S, GrammarTooComplex, mask_budget_s
from pdserve.grammars.mask_worker import BROKEN, EXPENSIVE, LENGTH_BYTES, LOADED

log = logging.getLogger(__name__)


class LoadedGrammar:
    """A compiled grammar in a mask worker, which ends with this object.

    Args:
        grammar: the grammar in Lark's syntax.

    Raises:
        RequestError: the compile server, which forks the worker, does not start.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: bytes) -> None:
        self._compiler = compiler
        self.grammar = grammar
        self.worker = self._start_worker()

    def restart(self) -> None:
        """Replace the worker, which has been killed."""
        self.worker = self._start_worker()

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self._compiler.fork_mask_worker())
        worker.load(self.grammar)
        return worker


@dataclass(eq=False)
class Follower:
    """A sequence whose output follows a grammar.

    Attributes:
        failure: why the grammar cannot be followed any further, if so.
        worker: the one that follows its output, and `num_sent` how many tokens of the output that has.
    """

    grammar: LoadedGrammar
    failure: RequestError | None = None
    worker: "_Worker | None" = None
    number: int = 0
    num_sent: int = 0


@dataclass(frozen=True)
class MaskRow:
    """A request for the mask after `output`, which is written to `mask_W`."""

    follower: Follower
    output: list[int]
    mask_W: torch.Tensor


def fill_masks(rows: list[MaskRow]) -> None:
    """Fill each mask, or set the failure of its follower."""
    by_grammar: dict[LoadedGrammar, list[MaskRow]] = {}
    for row in rows:
        by_grammar.setdefault(row.follower.grammar, []).append(row)
    for grammar, wanted in by_grammar.items():
        grammar.worker.send(wanted)
    for grammar, wanted in by_grammar.items():
        left = wanted[grammar.worker.receive(wanted) :]
        while left:
            _blame(left.pop(0))
            try:
                grammar.restart()
            except RequestError as error:
                for row in left:
                    row.follower.failure = error
                break
            grammar.worker.send(left)
            left = left[grammar.worker.receive(left) :]


class _Worker:
    """The connection to a mask worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._new_number = itertools.count().__next__
        self._ended: deque[int] = deque()  # followers that are gone; filled in any thread

    def load(self, grammar: bytes) -> None:
        try:
            self._send(grammar)
            if self._answers.read(1) == LOADED:
                return
        except ConnectionError:
            pass
        raise RequestError("the compiled grammar cannot be loaded", kind="internal_error")

    def send(self, rows: list[MaskRow]) -> None:
        """Ask for masks. A worker that has died is noticed by `receive`."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        wanted: list[list[Any]] = []
        for row in rows:
            follower = row.follower
            if follower.worker is not self:
                follower.worker, follower.number, follower.num_sent = self, self._new_number(), 0
                weakref.finalize(follower, self._ended.append, follower.number).atexit = False
            wanted.append([follower.number, row.output[follower.num_sent :], mask_budget_s(len(row.output) + 1)])
            follower.num_sent = len(row.output)
        with suppress(ConnectionError):
            self._send(json.dumps({"ended": ended, "rows": wanted}).encode())

    def receive(self, rows: list[MaskRow]) -> int:
        """Read the answers, and return their number: fewer than rows if the worker has died."""
        num_answered = 0
        try:
            for row in rows:
                head = self._answers.read(1 + LENGTH_BYTES)
                length = int.from_bytes(head[1:], "big")
                content = self._answers.read(length)
                if len(head) + len(content) < 1 + LENGTH_BYTES + length:
                    break
                _finish(row, head[:1], content)
                num_answered += 1
        except ConnectionError:
            pass
        return num_answered

    def _send(self, data: bytes) -> None:
        self._connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _finish(row: MaskRow, status: bytes, content: bytes) -> None:
    if status == BROKEN:
        row.follower.failure = RequestError("the output does not follow the grammar", kind="grammar_broken")
    elif status == EXPENSIVE:
        message = f"the grammar {content.decode()} for {len(row.output) + 1} tokens; simplify it"
        row.follower.failure = GrammarTooComplex(message, kind="invalid_grammar")
    else:
        row.mask_W.copy_(torch.frombuffer(bytearray(content), dtype=torch.int32))


def _blame(row: MaskRow) -> None:
    log.info("a grammar was given up after %d tokens: its next mask exceeds the limit of CPU time", len(row.output))
    message = (
        f"token {len(row.output) + 1} of the grammar takes more than {MAX_MASK_CPU_S:g} s of CPU time; simplify it"
    )
    row.follower.failure = GrammarTooComplex(message, kind="invalid_grammar")
