"""Structured output through llguidance: tokens that would break a grammar are masked.

A grammar arrives as a specification (`grammars/specification.py`). A process of its own (`grammars/mask_worker.py`)
compiles it within limits, and computes its masks, since what takes too long can only be stopped there. A sequence asks for
its next mask as soon as it has a token, and takes part in no step until the mask has come, so a slow grammar delays nobody
else. The allowed tokens are a function of the output alone, so a sequence may be preempted or migrate to another instance.

Shape legend: R rows with a grammar, V vocabulary, W 32-bit words of a bit mask over the vocabulary.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError
from pdserve.grammars.cache import BoundedCache
from pdserve.grammars.compiler import GrammarCompiler, start_early
from pdserve.grammars.mask_client import Budget, Follower, LoadedGrammar, MaskService
from pdserve.keys import Tokens
from pdserve.request import Tenant

log = logging.getLogger(__name__)

COMPILE_THREADS = 2
SLOW_S = 0.005  # elapsed time of a mask
LOADED_ENTRIES = 32  # mask workers that wait for another sequence with their grammar
LOADED_BYTES = 2**20


class GrammarConstraint:
    """The grammar of one sequence.

    Args:
        budget: that it shares with the other choices of its request.
    """

    def __init__(self, compiled: "Future[LoadedGrammar]", masks: MaskService, budget: Budget | None = None) -> None:
        self._compiled, self._masks = compiled, masks
        self._budget = budget or Budget()
        self._compile_error: RequestError | None = None
        self.follower: Follower | None = None

    def sibling(self) -> "GrammarConstraint":
        """Return that of another choice of the request."""
        return GrammarConstraint(self._compiled, self._masks, self._budget)

    @property
    def is_late(self) -> bool:
        """True while the next token cannot be sampled: the grammar is being compiled, or its mask is not there."""
        if self.follower is None:
            return self._compile_error is None
        return self.follower.is_late

    @property
    def failure(self) -> RequestError | None:
        """Why the grammar cannot be compiled or followed any further, if so."""
        return self.follower.failure if self.follower else self._compile_error

    def follow(self, output: Tokens) -> None:
        """Ask for the mask behind the tokens from where the grammar begins, once it is compiled."""
        if self.follower is None and self._compiled.done() and self._compile_error is None:
            error = self._compiled.exception()
            if error is None:
                self.follower = Follower(self._compiled.result(), self._budget)
            elif isinstance(error, RequestError):
                self._compile_error = error
            else:
                self._compile_error = RequestError(f"the grammar cannot be compiled: {error}", kind="rejected")
        follower = self.follower
        if follower is not None and (len(output) > len(follower.output) or not follower.has_begun):
            self._masks.follow(follower, output[len(follower.output) :])

    def try_out(self, drafts: list[int]) -> None:
        """Ask for the masks behind each of some drafts."""
        if self.follower is not None and self.follower.failure is None:
            self._masks.try_out(self.follower, drafts)

    def mask(self, num_tokens: int) -> bytes | None:
        """Return the mask behind so many tokens of the grammar, drafts included; None if it is not there yet."""
        if self.follower is None:
            return None
        ahead = num_tokens - len(self.follower.output)
        if not ahead:
            return self.follower.mask
        known = self.follower.behind_drafts
        return known[ahead - 1] if ahead <= len(known) else None

    def end(self) -> None:
        """Have no more masks computed."""
        if self.follower is not None:
            self.follower.has_ended = True


class GrammarBackend:
    """Compiles grammars for one model. The compile server is started by `start`, or with the first grammar.

    Args:
        on_progress: called, in any thread, when a sequence may have become schedulable.

    Attributes:
        compiler: of all grammars.
        masks: of all sequences.
    """

    def __init__(
        self, model: str, vocab_size: int, eos_token_ids: frozenset[int], on_progress: Callable[[], None]
    ) -> None:
        self.compiler = GrammarCompiler(model, vocab_size, eos_token_ids)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._running: dict[str, Future[LoadedGrammar]] = {}  # compilations by tenant and specification
        # Those that no thread has begun, by the tenant: the one whose turn it is comes first.
        self._queued: dict[Tenant, deque[tuple[Future[LoadedGrammar], str]]] = {}
        self._loaded = BoundedCache[Future[LoadedGrammar]](LOADED_ENTRIES, LOADED_BYTES)
        self.masks = MaskService(on_progress)

    def start(self) -> None:
        """Start the compile server in another thread."""
        self._threads.submit(start_early, self.compiler)

    def compile(self, spec: str, tenant: Tenant) -> GrammarConstraint:
        """Start compiling a specification, unless it is cached for this tenant. Tenants take turns at the threads."""
        key = f"{tenant.id} {spec}"
        with self._lock:
            compiled = self._loaded.get(key) or self._running.get(key)
            is_new = compiled is None
            if compiled is None:
                compiled = self._running[key] = Future()
                self._queued.setdefault(tenant, deque()).append((compiled, spec))
        if is_new:
            compiled.add_done_callback(lambda done: self._keep(key, done))
            with suppress(RuntimeError):  # no thread can be started: another one takes it, now or with the next grammar
                self._threads.submit(self._compile_next)
        compiled.add_done_callback(lambda _: self._on_progress())
        return GrammarConstraint(compiled, self.masks)

    def _keep(self, key: str, compiled: "Future[LoadedGrammar]") -> None:
        """Cache a compilation that has ended well."""
        with self._lock:
            del self._running[key]
            if compiled.exception() is None:
                self._loaded.put(key, compiled, len(compiled.result().spec))

    def _compile_next(self) -> None:
        with self._lock:
            tenant = next(iter(self._queued))
            waiting = self._queued.pop(tenant)
            compiled, spec = waiting.popleft()
            if waiting:
                self._queued[tenant] = waiting  # behind the others
        try:
            loaded = LoadedGrammar(self.compiler, spec, tenant)
        except RequestError as error:
            compiled.set_exception(error)
        except Exception as error:
            log.exception("a grammar was not compiled")
            compiled.set_exception(error)
        else:
            compiled.set_result(loaded)


def follow_grammar(seq: Sequence) -> None:
    """Ask for the mask of a sequence's next token; of the first one of its answer while it reasons."""
    output = seq.output
    assert output.constraint is not None
    start = len(output.tokens) if output.answer_start is None else output.num_prompt + output.answer_start
    output.constraint.follow(output.tokens[start:])


def has_slow_masks(seq: Sequence) -> bool:
    """Return whether the masks of a sequence's grammar, if it has one, take too long for masks of drafts."""
    constraint = seq.output.constraint
    return constraint is not None and constraint.follower is not None and constraint.follower.grammar.delay_s > SLOW_S


def has_mask(seq: Sequence) -> bool:
    """Return whether it is known which tokens the grammar of a sequence allows next, if it has one, and that has begun."""
    return not seq.output.is_constrained or _mask(seq) is not None


def apply_grammars(rows: list[tuple[torch.Tensor, Sequence]]) -> None:
    """Mask in place the tokens that each row's grammar does not allow next, of rows [V] of the logits and their sequences.

    All tokens are allowed where a grammar has failed: the request ends then.
    """
    vocab, device = len(rows[0][0]), rows[0][0].device
    mask_RW = torch.full((len(rows), -(-vocab // 32)), -1, dtype=torch.int32)
    for row, (_, seq) in enumerate(rows):
        mask = _mask(seq)
        if mask is not None:
            mask_RW[row] = torch.frombuffer(bytearray(mask), dtype=torch.int32)
        else:
            assert seq.output.constraint is not None and seq.output.constraint.failure is not None, (
                "not scheduled before"
            )
    for (logits_V, _), banned_V in zip(rows, _banned(mask_RW.to(device), vocab), strict=True):
        logits_V.masked_fill_(banned_V, float("-inf"))


def _mask(seq: Sequence) -> bytes | None:
    output = seq.output
    assert output.constraint is not None and output.answer_start is not None
    return output.constraint.mask(output.num_generated - output.answer_start)


def _banned(mask_RW: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return where the bit of a token, from the lowest of each word on, is not set. Bool [R, V], on the mask's device."""
    if mask_RW.device.type == "cpu":
        bits_RV = np.unpackbits(~mask_RW.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(bits_RV).view(torch.bool)
    shifts = torch.arange(32, device=mask_RW.device, dtype=torch.int32)
    return ((mask_RW[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab] == 0
