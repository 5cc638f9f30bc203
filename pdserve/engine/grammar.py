"""Structured output through xgrammar (`pip install 'pdserve[structured]'`): tokens that would break a grammar are masked.

A grammar arrives as a specification (`grammars/specification.py`) and is compiled in another process, within limits; its
sequence joins the batch afterwards. Compiled grammars are cached, within bounds. The allowed tokens are a function of the
output alone, so a sequence may be preempted or migrate to another instance.

Shape legend: S sequences, V vocabulary, W 32-bit words of a bit mask over the vocabulary.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError
from pdserve.grammars.cache import BoundedCache
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.limits import GrammarTooComplex, mask_budget_s

COMPILE_THREADS = 2
CACHE_ENTRIES = 1024  # compiled grammars
CACHE_BYTES = 128 * 2**20


class GrammarConstraint:
    """The grammar of one sequence and its matcher state.

    Attributes:
        failure: why the grammar cannot be compiled or followed any further, if so.
    """

    def __init__(self, compiled: "Future[Any]") -> None:
        self.failure: RequestError | None = None
        self._compiled = compiled
        self._matcher: Any = None
        self._num_accepted = 0
        self._cpu_s = 0.0

    @property
    def is_ready(self) -> bool:
        """True once compilation has ended."""
        return self._compiled.done()

    def fill_bitmask(self, output: list[int], mask_SW: torch.Tensor, row: int) -> None:
        """Set one row of xgrammar's bit mask to the tokens that may follow `output`, or set `failure`."""
        started = time.thread_time()
        if self._matcher is None:
            self.failure = self._create_matcher()
        for token in output[self._num_accepted :]:
            if self.failure is None and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
                self.failure = RequestError("the output does not follow the grammar", kind="grammar_broken")
        self._num_accepted = len(output)
        if self.failure is None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask_SW, row)
        self._cpu_s += time.thread_time() - started
        if self.failure is None and self._cpu_s > mask_budget_s(len(output) + 1):
            message = f"the grammar took {self._cpu_s:.1f} s of CPU time for {len(output) + 1} tokens; simplify it"
            self.failure = GrammarTooComplex(message, kind="invalid_grammar")

    def _create_matcher(self) -> RequestError | None:
        from xgrammar import GrammarMatcher

        assert self._compiled.done()
        error = self._compiled.exception()
        if error is None:
            self._matcher = GrammarMatcher(self._compiled.result())
            return None
        if isinstance(error, RequestError):
            return error
        return RequestError(f"the compiled grammar cannot be read: {error}", kind="rejected")


class GrammarBackend:
    """Compiles grammars for one model. The compile server is started with the first grammar."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._compiler = GrammarCompiler(model, vocab_size, eos_token_ids)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._lock = threading.Lock()
        self._running: dict[str, Future[Any]] = {}  # compilations by specification
        self._compiled = BoundedCache[Future[Any]](CACHE_ENTRIES, CACHE_BYTES)
        self._tokenizer_info: Any = None

    def compile(self, spec: str, on_ready: Callable[[], None]) -> GrammarConstraint:
        """Start compiling a specification, unless it is cached. `on_ready` is called, in any thread, once that has ended."""
        with self._lock:
            compiled = self._compiled.get(spec) or self._running.get(spec)
            is_new = compiled is None
            if compiled is None:
                compiled = self._running[spec] = self._threads.submit(self._compile, spec)
        if is_new:  # not under the lock, which `_keep` takes at once if compiling has ended already
            compiled.add_done_callback(lambda done: self._keep(spec, done))
        compiled.add_done_callback(lambda _: on_ready())
        return GrammarConstraint(compiled)

    def _keep(self, spec: str, compiled: "Future[Any]") -> None:
        """Cache a compilation that has ended well."""
        with self._lock:
            del self._running[spec]
            if compiled.exception() is None:
                self._compiled.put(spec, compiled, compiled.result().memory_size_bytes)

    def _compile(self, spec: str) -> Any:
        from xgrammar import CompiledGrammar, TokenizerInfo

        serialized = self._compiler.compile(spec).decode()
        if self._tokenizer_info is None:
            self._tokenizer_info = TokenizerInfo.deserialize_json(self._compiler.tokenizer_info())
        return CompiledGrammar.deserialize_json(serialized, self._tokenizer_info)


def apply_grammars(logits_SV: torch.Tensor, seqs: list[Sequence]) -> None:
    """Mask in place the tokens that each row's grammar does not allow next; logits_SV[i] belongs to seqs[i]."""
    rows = [i for i, seq in enumerate(seqs) if seq.constraint is not None]
    if not rows:
        return
    from xgrammar import allocate_token_bitmask, apply_token_bitmask_inplace

    mask_SW = allocate_token_bitmask(len(seqs), logits_SV.shape[1])
    for row in rows:
        seq = seqs[row]
        assert seq.constraint is not None
        seq.constraint.fill_bitmask(seq.tokens[seq.num_prompt :], mask_SW, row)
    apply_token_bitmask_inplace(logits_SV, mask_SW.to(logits_SV.device), indices=rows)
