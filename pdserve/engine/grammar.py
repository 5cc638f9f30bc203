"""Structured output through llguidance: tokens that would break a grammar are masked.

A grammar arrives as a specification (`grammars/specification.py`) and is compiled in another process, within limits; its
sequence joins the batch afterwards. Masks are computed in another process, too (`grammars/mask_worker.py`), because one that
takes too long can only be stopped there. The allowed tokens are a function of
the output alone, so a sequence may be preempted or migrate to another instance.

Shape legend: R rows with a grammar, V vocabulary, W 32-bit words of a bit mask over the vocabulary.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError
from pdserve.grammars.cache import BoundedCache
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.mask_client import Follower, LoadedGrammar, MaskRow, fill_masks

log = logging.getLogger(__name__)

COMPILE_THREADS = 2
LOADED_ENTRIES = 16  # mask workers that wait for another sequence with their grammar
LOADED_BYTES = 2**20


class GrammarConstraint:
    """The grammar of one sequence."""

    def __init__(self, compiled: "Future[LoadedGrammar]") -> None:
        self._compiled = compiled
        self._compile_error: RequestError | None = None
        self._follower: Follower | None = None

    @property
    def is_ready(self) -> bool:
        """True once compilation has ended."""
        return self._compiled.done()

    @property
    def failure(self) -> RequestError | None:
        """Why the grammar cannot be compiled or followed any further, if so."""
        return self._follower.failure if self._follower else self._compile_error

    def mask_row(self, output: list[int], mask_W: torch.Tensor) -> MaskRow | None:
        """Return what `fill_masks` fills with the tokens that may follow `output`; None if there is a failure."""
        if self._follower is None and self._compile_error is None:
            assert self._compiled.done()
            error = self._compiled.exception()
            if error is None:
                self._follower = Follower(self._compiled.result())
            elif isinstance(error, RequestError):
                self._compile_error = error
            else:
                self._compile_error = RequestError(f"the grammar cannot be compiled: {error}", kind="rejected")
        if self._follower is None or self._follower.failure is not None:
            return None
        return MaskRow(self._follower, output, mask_W)


class GrammarBackend:
    """Compiles grammars for one model. The compile server is started by `start`, or with the first grammar."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._compiler = GrammarCompiler(model, vocab_size, eos_token_ids)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._lock = threading.Lock()
        self._running: dict[str, Future[LoadedGrammar]] = {}  # compilations by specification
        self._loaded = BoundedCache[Future[LoadedGrammar]](LOADED_ENTRIES, LOADED_BYTES)

    def start(self) -> None:
        """Start the compile server in another thread."""
        self._threads.submit(_start, self._compiler)

    def compile(self, spec: str, on_ready: Callable[[], None]) -> GrammarConstraint:
        """Start compiling a specification, unless it is cached. `on_ready` is called, in any thread, once that has ended."""
        with self._lock:
            compiled = self._loaded.get(spec) or self._running.get(spec)
            is_new = compiled is None
            if compiled is None:
                compiled = self._running[spec] = self._threads.submit(self._compile, spec)
        if is_new:  # not under the lock, which `_keep` takes at once if compiling has ended already
            compiled.add_done_callback(lambda done: self._keep(spec, done))
        compiled.add_done_callback(lambda _: on_ready())
        return GrammarConstraint(compiled)

    def _keep(self, spec: str, compiled: "Future[LoadedGrammar]") -> None:
        """Cache a compilation that has ended well."""
        with self._lock:
            del self._running[spec]
            if compiled.exception() is None:
                self._loaded.put(spec, compiled, len(compiled.result().grammar))

    def _compile(self, spec: str) -> LoadedGrammar:
        return LoadedGrammar(self._compiler, self._compiler.compile(spec))


def _start(compiler: GrammarCompiler) -> None:
    try:
        compiler.start()
    except RequestError as error:  # which the first request with a grammar meets again
        log.warning("structured output will fail: %s", error)


def apply_grammars(rows: list[tuple[torch.Tensor, Sequence]]) -> None:
    """Mask in place the tokens that each row's grammar does not allow next, of rows [V] of the logits and their sequences."""
    vocab, device = len(rows[0][0]), rows[0][0].device
    mask_RW = torch.full((len(rows), -(-vocab // 32)), -1, dtype=torch.int32)
    wanted = []
    for row, (_, seq) in enumerate(rows):
        assert seq.output.constraint is not None and seq.output.answer_start is not None
        output = seq.output.tokens[seq.output.num_prompt + seq.output.answer_start :]
        mask_row = seq.output.constraint.mask_row(output.tolist(), mask_RW[row])
        if mask_row is not None:
            wanted.append(mask_row)
    fill_masks(wanted)
    for (logits_V, _), banned_V in zip(rows, _banned(mask_RW.to(device), vocab), strict=True):
        logits_V.masked_fill_(banned_V, float("-inf"))


def _banned(mask_RW: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return where the bit of a token, from the lowest of each word on, is not set. Bool [R, V], on the mask's device."""
    if mask_RW.device.type == "cpu":
        bits_RV = np.unpackbits(~mask_RW.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(bits_RV).view(torch.bool)
    shifts = torch.arange(32, device=mask_RW.device, dtype=torch.int32)
    return ((mask_RW[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab] == 0
