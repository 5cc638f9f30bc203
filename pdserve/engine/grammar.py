"""Structured output through xgrammar (`pip install 'pdserve[structured]'`): tokens that would break a grammar are masked.

A grammar travels as JSON with one of `json` (a schema), `regex`, `choice` (a list of strings) or `grammar` (EBNF), and
optionally literal text around it in `begin` and `end`. It is compiled in a thread; its sequence joins the batch afterwards.
The allowed tokens are a function of the output alone, so a sequence may be preempted or migrate to another instance.

Shape legend: S sequences, V vocabulary, W 32-bit words of a bit mask over the vocabulary.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pdserve.engine.sequence import Sequence
from pdserve.errors import BadRequest, RequestError
from pdserve.model_path import resolve_model

COMPILE_TIMEOUT_S = 20.0  # a grammar that takes longer is rejected
COMPILE_THREADS = 2
SOURCE_LOCATION = re.compile(r"^\[[\d:]+\] \S+: ")  # prefix of xgrammar's error messages


class GrammarConstraint:
    """The grammar of one sequence and its matcher state.

    Attributes:
        failure: why the grammar cannot be compiled or followed any further, if so.
    """

    def __init__(self, compiled: "Future[Any]", deadline: float) -> None:
        self.failure: RequestError | None = None
        self._compiled = compiled
        self._deadline = deadline
        self._matcher: Any = None
        self._num_accepted = 0

    @property
    def is_ready(self) -> bool:
        """True once compilation has ended or timed out."""
        return self._compiled.done() or time.monotonic() >= self._deadline

    def fill_bitmask(self, output: list[int], mask_SW: torch.Tensor, row: int) -> None:
        """Set one row of xgrammar's bit mask to the tokens that may follow `output`, or set `failure`."""
        if self._matcher is None:
            self.failure = self._create_matcher()
        for token in output[self._num_accepted :]:
            if self.failure is None and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
                self.failure = RequestError("the output does not follow the grammar", kind="grammar_broken")
        self._num_accepted = len(output)
        if self.failure is None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask_SW, row)

    def _create_matcher(self) -> RequestError | None:
        from xgrammar import GrammarMatcher

        if not self._compiled.done():
            message = f"the grammar takes longer than {COMPILE_TIMEOUT_S:.0f} s to compile; simplify it"
            return BadRequest(message, kind="invalid_grammar")
        error = self._compiled.exception()
        if error is not None:
            reason = SOURCE_LOCATION.sub("", str(error)).strip()
            return BadRequest(f"the grammar cannot be used: {reason}", kind="invalid_grammar")
        self._matcher = GrammarMatcher(self._compiled.result())
        return None


class GrammarBackend:
    """Compiles grammars for one model, in threads. The tokenizer is loaded with the first grammar."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._lock = threading.Lock()
        self._compiler: Any = None

    def compile(self, spec: str, on_ready: Callable[[], None]) -> GrammarConstraint:
        """Start compiling `spec`, a JSON object. `on_ready` is called in another thread once the constraint is ready."""
        timer = threading.Timer(COMPILE_TIMEOUT_S + 0.1, on_ready)
        timer.daemon = True
        timer.start()
        compiled = self._threads.submit(self._compile, spec)
        compiled.add_done_callback(lambda _: timer.cancel())
        compiled.add_done_callback(lambda _: on_ready())
        return GrammarConstraint(compiled, time.monotonic() + COMPILE_TIMEOUT_S)

    def _compile(self, spec: str) -> Any:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._create_compiler()
        return self._compiler.compile_grammar(build_grammar(json.loads(spec)))

    def _create_compiler(self) -> Any:
        from transformers import AutoTokenizer
        from xgrammar import GrammarCompiler, TokenizerInfo

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self._model))
        stops = sorted(self._eos_token_ids)
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops)
        return GrammarCompiler(info, max_threads=1)


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


def build_grammar(spec: dict[str, Any]) -> Any:
    """Return xgrammar's `Grammar` of a specification.

    Raises:
        RuntimeError: xgrammar cannot parse it.
    """
    from xgrammar import Grammar

    if "json" in spec:  # white space as json.dumps writes it: unbounded white space could go on until max_tokens
        grammar = Grammar.from_json_schema(json.dumps(spec["json"]), any_whitespace=False)
    elif "regex" in spec:
        grammar = Grammar.from_regex(spec["regex"])
    elif "choice" in spec:
        grammar = Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, spec['choice']))}")
    else:
        grammar = Grammar.from_ebnf(spec["grammar"])
    begin, end = (
        Grammar.from_ebnf(f"root ::= {_literal(spec[side])}") if side in spec else None for side in ("begin", "end")
    )
    parts = [part for part in (begin, grammar, end) if part is not None]
    return Grammar.concat(*parts) if len(parts) > 1 else grammar


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
