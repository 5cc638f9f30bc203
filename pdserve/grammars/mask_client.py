"""Masks of compiled grammars, computed by mask workers while the engine goes on.

There is a worker per grammar and tenant (`mask_turns.py` decides which of them compute). When a mask takes too long, its
worker is killed. The sequence to blame fails, and if other sequences want masks of the same grammar, a new worker follows
their outputs from the beginning. So it does if a worker ends for no limit; of the sequence that it served, once.
"""

import itertools
import json
import logging
import os
import select
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import RequestError
from pdserve.grammars.compiler import GrammarCompiler, invalid_grammar
from pdserve.grammars.limits import EXCEEDED, MAX_MASK_CPU_S, GrammarTooComplex, check_grammar, mask_budget_s
from pdserve.grammars.mask_turns import Line, MaskTurns, Spending
from pdserve.grammars.mask_worker import BROKEN, EXPENSIVE, HEAD, INVALID, LATER, LENGTH_BYTES, LOADED, MASK
from pdserve.priority import cpu_seconds, lower
from pdserve.request import NO_TENANT, Tenant

log = logging.getLogger(__name__)

MIN_WORKERS = 2  # that may compute at once for one tenant
QUICK_LOAD_S = 0.03  # CPU time for which a worker compiles its grammar at the priority of models
HANG_S = 60.0  # elapsed time after which a worker that answers nothing is given up
IDLE_S = 1.0  # after which the thread that collects masks ends
SHORT_MEMORY = 4  # masks by which the wait for the next one is forecast


class LoadedGrammar(Line):
    """A grammar and its worker, which compiles it within the limits, and ends with this object.

    Args:
        spec: its specification.
        tenant: whose sequences follow it.

    Attributes:
        delay_s: elapsed time from asking for a mask until it is there, of late; 0: unknown.

    Raises:
        GrammarTooComplex: it exceeds a limit.
        BadRequest: it is invalid, or llguidance cannot hold it.
        RequestError: the compile server, which forks the worker, does not start, or the worker ends for no limit.
    """

    def __init__(self, compiler: GrammarCompiler, spec: str, tenant: Tenant = NO_TENANT) -> None:
        super().__init__(tenant=tenant)
        check_grammar(spec)
        self._compiler = compiler
        self.spec = spec
        self.delay_s = 0.0
        self.worker: _Worker | None = None
        self.start_worker()

    def start_worker(self) -> None:
        """Start a worker, the first one or in place of one that has ended; another one if it ends for no limit."""
        for is_second in (False, True):
            connection, pid = self._compiler.fork_mask_worker()
            worker = _Worker(connection)
            if worker.load(self.spec, pid, self._compiler.limits.elapsed_s):
                self.worker = worker
                return
            if not worker.is_lost:
                raise self._compiler.too_complex(self.spec)
            error = self._compiler.worker_lost()
            if is_second:
                raise error

    def worker_lost(self) -> RequestError:
        """Count a worker that has ended or hangs for no limit, and return the error for a sequence that it followed."""
        return self._compiler.worker_lost()

    def record_delay(self, seconds: float) -> None:
        self.delay_s += (seconds - self.delay_s) / SHORT_MEMORY if self.delay_s else seconds


@dataclass(eq=False)
class Budget:
    """CPU time of the masks of one request, whose choices share it.

    Attributes:
        cpu_s: that its masks have taken.
        num_tokens: of all outputs, the next ones included.
    """

    cpu_s: float = 0.0
    num_tokens: int = 0


@dataclass(eq=False)
class Follower:
    """A sequence whose output follows a grammar. All but `output` changes in any thread.

    Attributes:
        output: its tokens, from where the grammar begins.
        mask: which tokens may be next, a bit each; None: not there yet.
        behind_drafts: the same behind each of the drafts that were tried out, as far as it is there.
        failure: why the grammar cannot be followed any further, if so.
        worker: the one that follows its output, and `num_sent` how many tokens of the output that has.
        has_begun: its first mask was asked for.
        has_lost_worker: a worker ended at its mask, for no limit: another one follows it.
        has_ended: no mask is wanted any more.
    """

    grammar: LoadedGrammar
    budget: Budget = field(default_factory=Budget)
    output: "array[int]" = field(default_factory=lambda: array("I"))
    mask: bytes | None = None
    behind_drafts: list[bytes] = field(default_factory=list)
    failure: RequestError | None = None
    worker: "_Worker | None" = None
    number: int = 0
    num_sent: int = 0
    has_begun: bool = False
    has_lost_worker: bool = False
    has_ended: bool = False

    @property
    def is_late(self) -> bool:
        """True while its mask is neither there, nor will never be."""
        return self.mask is None and self.failure is None


@dataclass(eq=False)
class _Wanted:
    """A mask that is wanted, or those behind some drafts.

    Attributes:
        num_before: tokens of the output that the worker had when it was asked.
        limit_s: CPU time that a mask may take.
        num_due: answers that have not come.
    """

    follower: Follower
    drafts: list[int] | None = None
    asked_at: float = field(default_factory=time.monotonic)
    num_before: int = 0
    limit_s: float = 0.0
    num_due: int = 1

    @property
    def is_void(self) -> bool:
        """True if nobody needs the answer: of drafts, if their step is over."""
        follower = self.follower
        return follower.has_ended or follower.failure is not None or (self.drafts is not None and follower.mask is None)


class MaskService:
    """Asks mask workers, and collects their answers. Its methods may be called in any thread; `wait` alone waits for a mask.

    Args:
        on_arrival: called, in any thread, when a mask arrives for which `notify` was called.

    Attributes:
        cpu_s: CPU time of all masks.
        num_given_up: sequences that failed because their masks exceed a limit.
    """

    def __init__(self, on_arrival: Callable[[], None] = lambda: None) -> None:
        self._on_arrival = on_arrival
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._spending = Spending()
        self._turns = MaskTurns(max(MIN_WORKERS, (os.cpu_count() or 1) // 2), self._is_high)
        self._poll = select.epoll()
        self._computing: dict[int, _Turn] = {}  # by the descriptor of the worker's connection
        self._thread: threading.Thread | None = None
        self._awaited: set[Follower] = set()
        self._notified: set[Follower] = set()
        self.cpu_s = 0.0
        self.num_given_up = 0

    def follow(self, follower: Follower, tokens: Sequence[int]) -> None:
        """Append tokens to the output of a sequence, and ask for the mask behind them."""
        with self._lock:
            follower.budget.num_tokens += len(tokens) + (not follower.has_begun)
            follower.output.extend(tokens)
            follower.has_begun, follower.mask, follower.behind_drafts = True, None, []
            self._turns.add(follower.grammar, _Wanted(follower))
            self._take_turns()

    def try_out(self, follower: Follower, drafts: list[int]) -> None:
        """Ask for the masks behind each of some tokens that may be next. Their CPU time counts for no limit."""
        with self._lock:
            follower.behind_drafts = []
            self._turns.add(follower.grammar, _Wanted(follower, drafts, limit_s=MAX_MASK_CPU_S, num_due=len(drafts)))
            self._take_turns()

    def wait(self, followers: Collection[Follower], timeout_s: float) -> None:
        """Wait until the masks of some sequences are there, but not for long."""
        with self._lock:
            self._awaited = {follower for follower in followers if follower.is_late}
            self._arrived.wait_for(lambda: not self._awaited, timeout_s)
            self._awaited = set()

    def notify(self, followers: Collection[Follower]) -> None:
        """Call `on_arrival` when the mask of any of these sequences arrives; at once if one is there already."""
        with self._lock:
            self._notified = {follower for follower in followers if follower.is_late}
            if len(self._notified) < len(followers):
                self._on_arrival()

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _is_high(self, tenant: Tenant) -> bool:
        return self._spending.is_high(tenant, time.monotonic())

    def _take_turns(self) -> None:
        while (next_turn := self._turns.take()) is not None:
            grammar, wanted = next_turn
            assert isinstance(grammar, LoadedGrammar)
            self._begin(grammar, wanted)

    def _begin(self, grammar: LoadedGrammar, wanted: list[_Wanted]) -> None:
        """Ask a grammar's worker, after starting another one if it has died."""
        worker = grammar.worker
        asked = deque(one for one in wanted if not one.is_void and self._has_budget(one))
        if not asked:
            self._turns.end(grammar, [])
            return
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = _started("masks", self._collect)
            if worker is None or not worker.send(asked, self._is_high(grammar.tenant)):
                grammar.worker = None
                _started("mask-worker", self._restart, grammar, [*asked])
                return
        except RuntimeError as error:  # there are as many threads as there may be; it is not the engine's end
            self._end_turn(grammar, asked, _not_started(error))
            return
        self._computing[worker.fileno()] = _Turn(grammar, worker, asked)
        self._poll.register(worker.fileno(), select.EPOLLIN)

    def _has_budget(self, wanted: _Wanted) -> bool:
        """Return whether the next mask of a sequence may take CPU time. If it may not, the sequence fails."""
        follower, budget = wanted.follower, wanted.follower.budget
        if wanted.drafts is not None:
            return True
        left_s = mask_budget_s(budget.num_tokens) - budget.cpu_s
        wanted.limit_s = min(left_s, MAX_MASK_CPU_S)
        if left_s <= 0:
            self._give_up(follower, f"took {budget.cpu_s:.1f} s of CPU time for {budget.num_tokens} tokens")
        return left_s > 0

    def _give_up(self, follower: Follower, reason: str) -> None:
        log.info("a grammar was given up after %d tokens of an output: it %s", len(follower.output), reason)
        self.num_given_up += 1
        self._fail(follower, GrammarTooComplex(f"the grammar {reason}; simplify it", kind="invalid_grammar"))

    def _fail(self, follower: Follower, error: RequestError) -> None:
        follower.failure = error
        self._arrive(follower)

    def _end_turn(self, grammar: LoadedGrammar, wanted: Iterable[_Wanted], error: RequestError) -> None:
        """End the turn of a grammar that has no worker, with its sequences."""
        for one in wanted:
            self._fail(one.follower, error)
        self._turns.end(grammar, [])

    def _arrive(self, follower: Follower) -> None:
        if follower in self._awaited:
            self._awaited.discard(follower)
            self._arrived.notify_all()
        if follower in self._notified:
            self._notified.discard(follower)
            self._on_arrival()

    def _read(self, turn: "_Turn") -> None:
        """Take the answers that have come. The turn ends with the last one, or with its worker."""
        worker, asked, left = turn.worker, turn.asked, turn.left
        for status, seconds, content in worker.receive():
            wanted = asked[0]
            turn.grammar.used_s += seconds
            self.cpu_s += seconds
            self._spending.add(turn.grammar.tenant, seconds, time.monotonic())
            if status == LATER:
                wanted.follower.num_sent = wanted.num_before
                left.append(asked.popleft())
                continue
            self._take_answer(wanted, status, seconds, content)
            wanted.num_due -= 1
            if not wanted.num_due:
                asked.popleft()
        if asked and (worker.has_died or time.monotonic() - turn.began_at > HANG_S):
            first = asked.popleft()
            if worker.is_lost and not first.follower.has_lost_worker:
                first.follower.has_lost_worker = True
                first.follower.grammar.worker_lost()
                left.append(first)
            else:
                self._blame(first, worker)
            left.extend(asked)
            asked.clear()
            turn.grammar.worker = None
        if not asked:
            self._poll.unregister(worker.fileno())
            del self._computing[worker.fileno()]
            self._turns.end(turn.grammar, [one for one in left if one.drafts is None])

    def _take_answer(self, wanted: _Wanted, status: bytes, seconds: float, content: bytes) -> None:
        """Take a mask, or why there is none."""
        follower = wanted.follower
        if wanted.drafts is not None:
            if status == MASK and not wanted.is_void:
                follower.behind_drafts.append(content)
            return
        follower.budget.cpu_s += seconds
        follower.grammar.record_delay(time.monotonic() - wanted.asked_at)
        if status == BROKEN:
            self._fail(follower, RequestError("the output does not follow the grammar", kind="grammar_broken"))
        elif status == EXPENSIVE:
            self._give_up(follower, f"{content.decode()} for {len(follower.output) + 1} tokens")
        else:
            follower.mask = content
            self._arrive(follower)

    def _blame(self, wanted: _Wanted, worker: "_Worker") -> None:
        """Fail the sequence at whose mask a worker died, or hangs. Drafts are nobody's fault."""
        if wanted.drafts is not None:
            return
        follower, budget = wanted.follower, wanted.follower.budget
        if worker.is_lost or not worker.has_died:
            self._fail(follower, follower.grammar.worker_lost())
        elif wanted.limit_s < MAX_MASK_CPU_S:
            seconds = mask_budget_s(budget.num_tokens)
            self._give_up(follower, f"took more than {seconds:.1f} s of CPU time for {budget.num_tokens} tokens")
        else:
            token = len(follower.output) + 1
            self._give_up(follower, f"takes more than {MAX_MASK_CPU_S:g} s of CPU time for token {token}")

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take answers, until none are due for a while."""
        while True:
            events = self._poll.poll(IDLE_S)
            with self._lock:
                if not (events or self._computing):
                    self._thread = None
                    return
                for turn in [*self._computing.values()]:
                    self._read(turn)
                self._take_turns()

    def _restart(self, grammar: LoadedGrammar, wanted: list[_Wanted]) -> None:
        """Start another worker of a grammar, which follows the outputs from the beginning."""
        try:
            grammar.start_worker()
        except Exception as error:  # noqa: BLE001 — whatever it is, these sequences wait
            failure = error if isinstance(error, RequestError) else _not_started(error)
            with self._lock:
                self._end_turn(grammar, wanted, failure)
                self._take_turns()
            return
        with self._lock:
            self._begin(grammar, wanted)
            self._take_turns()


def _started(name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Return a thread that has been started. Raises RuntimeError if none can be."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def _not_started(error: Exception) -> RequestError:
    """Log why no worker serves a grammar, and return the error for its sequences."""
    log.error("a mask worker was not started", exc_info=error)
    return RequestError(f"a mask worker cannot be started: {error}", kind="internal_error")


@dataclass
class _Turn:
    """What a worker computes.

    Attributes:
        asked: what it has not answered yet.
        left: what it has not come to.
    """

    grammar: LoadedGrammar
    worker: "_Worker"
    asked: deque[_Wanted]
    left: list[_Wanted] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)


class _Worker:
    """The connection to a mask worker.

    Attributes:
        has_died: its end of the connection is closed.
        is_lost: that is for no limit.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._new_number = itertools.count().__next__
        self._ended: deque[int] = deque()  # followers that are gone; filled in any thread
        self.fileno = connection.fileno
        self.has_died = self.is_lost = False

    def load(self, spec: str, pid: int, elapsed_s: float) -> bool:
        """Have a specification compiled; return False if that fails. Raises BadRequest if it is invalid.

        Requests wait for it, so it has their priority as long as it takes as little CPU time as most.
        """
        connection = self._connection
        with suppress(OSError):  # the worker has died, or hangs
            self._send(spec.encode())
            deadline, readable = time.monotonic() + elapsed_s, select.poll()
            readable.register(connection, select.POLLIN)
            while not readable.poll(QUICK_LOAD_S * 1e3) and time.monotonic() < deadline:
                if cpu_seconds(pid) >= QUICK_LOAD_S:
                    lower(pid)
                    break
            connection.settimeout(max(1.0, deadline - time.monotonic()))
            status = connection.recv(1)
            if status == INVALID:
                with connection.makefile("rb") as stream:
                    raise invalid_grammar(stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big")))
            connection.settimeout(None)
            self.is_lost = not status
            return status == LOADED
        self.is_lost = True
        return False

    def send(self, asked: Collection[_Wanted], beside: bool) -> bool:
        """Ask for masks, from now on beside models. Returns False if the worker has died."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        rows: list[list[Any]] = []
        for one in asked:
            follower = one.follower
            if follower.worker is not self:
                follower.worker, follower.number, follower.num_sent = self, self._new_number(), 0
                weakref.finalize(follower, self._ended.append, follower.number).atexit = False
            one.num_before = follower.num_sent
            rows.append([follower.number, follower.output[follower.num_sent :].tolist(), one.limit_s, one.drafts])
            follower.num_sent = len(follower.output)
        try:
            self._send(json.dumps({"ended": ended, "beside": beside, "rows": rows}).encode())
        except ConnectionError:
            return False
        return True

    def receive(self) -> Iterator[tuple[bytes, float, bytes]]:
        """Yield the answers that have come: status, CPU seconds, and mask or message."""
        with suppress(BlockingIOError):
            try:
                while data := self._connection.recv(1 << 20, socket.MSG_DONTWAIT):
                    self._received += data
            except ConnectionError:
                pass
            self.has_died = True
        start, received = 0, self._received
        while len(received) >= start + HEAD.size and received[start] not in EXCEEDED:
            status, seconds, length = HEAD.unpack_from(received, start)
            begin, end = start + HEAD.size, start + HEAD.size + length
            if len(received) < end:
                break
            yield status, seconds, bytes(received[begin:end])
            start = end
        del received[:start]
        self.is_lost = self.has_died and not (received and received[0] in EXCEEDED)

    def _send(self, data: bytes) -> None:
        self._connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)
