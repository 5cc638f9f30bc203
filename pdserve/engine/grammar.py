"""Grammars that an output follows, through xgrammar (`pip install 'pdserve[structured]'`): a token that would break one is
never drawn.

A grammar travels as JSON with one of `json` (a schema), `regex`, `choice` (a list of strings) and `grammar` (EBNF), and may
have text around it in `begin` and `end`. It is compiled in a thread; its sequence joins the batch when that is done. Which
tokens may follow is a function of the output so far, so a sequence may be preempted, or go on elsewhere.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pdserve.engine.sequence import Sequence
from pdserve.errors import BadRequest, RequestError
from pdserve.model_path import resolve_model

COMPILE_S = 20.0  # a grammar that takes longer is refused
THREADS = 2
WHERE = re.compile(r"^\[[\d:]+\] \S+: ")  # in xgrammar's own source


class Constraint:
    """The grammar of one sequence. `failure`: why it can be followed no further."""

    def __init__(self, compiled: "Future[Any]", deadline: float) -> None:
        self.failure: RequestError | None = None
        self._compiled = compiled
        self._deadline = deadline
        self._matcher: Any = None
        self._accepted = 0

    @property
    def ready(self) -> bool:
        return self._compiled.done() or time.monotonic() >= self._deadline

    def allow(self, output: list[int], mask_SW: torch.Tensor, row: int) -> None:
        """Sets one row of xgrammar's bit mask to the tokens that may follow, or `failure`."""
        if self._matcher is None:
            self.failure = self._start()
        for token in output[self._accepted :]:
            if self.failure is None and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
                self.failure = RequestError("the output does not follow the grammar", kind="grammar_broken")
        self._accepted = len(output)
        if self.failure is None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask_SW, row)

    def _start(self) -> RequestError | None:
        from xgrammar import GrammarMatcher

        if not self._compiled.done():
            message = f"the grammar takes longer than {COMPILE_S:.0f} s to compile; a simpler one may do"
            return BadRequest(message, kind="invalid_grammar")
        error = self._compiled.exception()
        if error is not None:
            reason = WHERE.sub("", str(error)).strip()
            return BadRequest(f"the grammar cannot be used: {reason}", kind="invalid_grammar")
        self._matcher = GrammarMatcher(self._compiled.result())
        return None


class Grammars:
    """Compiles for one model. The tokenizer is read at the first grammar."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._lock = threading.Lock()
        self._compiler: Any = None

    def start(self, spec: str, when_ready: Callable[[], None]) -> Constraint:
        """Begins to compile. `when_ready` is called in another thread once the constraint is `ready`."""
        timer = threading.Timer(COMPILE_S + 0.1, when_ready)
        timer.daemon = True
        timer.start()
        compiled = self._threads.submit(self._compile, spec)
        compiled.add_done_callback(lambda _: timer.cancel())
        compiled.add_done_callback(lambda _: when_ready())
        return Constraint(compiled, time.monotonic() + COMPILE_S)

    def _compile(self, spec: str) -> Any:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._new_compiler()
        return self._compiler.compile_grammar(grammar_of(json.loads(spec)))

    def _new_compiler(self) -> Any:
        from transformers import AutoTokenizer
        from xgrammar import GrammarCompiler, TokenizerInfo

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(self._model))
        stops = sorted(self._eos_token_ids)
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops)
        return GrammarCompiler(info, max_threads=1)


def constrain(logits_SV: torch.Tensor, seqs: Rows[Sequence]) -> None:
    """Takes from each row the tokens that its grammar does not allow next."""
    rows = [i for i, seq in enumerate(seqs) if seq.constraint is not None]
    if not rows:
        return
    from xgrammar import allocate_token_bitmask, apply_token_bitmask_inplace

    mask_SW = allocate_token_bitmask(len(seqs), logits_SV.shape[1])
    for row in rows:
        seq = seqs[row]
        assert seq.constraint is not None
        seq.constraint.allow(seq.tokens[seq.num_prompt :], mask_SW, row)
    apply_token_bitmask_inplace(logits_SV, mask_SW.to(logits_SV.device), indices=rows)


def grammar_of(spec: dict[str, Any]) -> Any:
    """xgrammar's `Grammar`. Raises RuntimeError where it does not understand it."""
    from xgrammar import Grammar

    if "json" in spec:  # white space as json.dumps writes it: nothing that could go on for ever
        grammar = Grammar.from_json_schema(json.dumps(spec["json"]), any_whitespace=False)
    elif "regex" in spec:
        grammar = Grammar.from_regex(spec["regex"])
    elif "choice" in spec:
        grammar = Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, spec['choice']))}")
    else:
        grammar = Grammar.from_ebnf(spec["grammar"])
    around = [
        Grammar.from_ebnf(f"root ::= {_literal(spec[side])}") if side in spec else None for side in ("begin", "end")
    ]
    parts = [part for part in (around[0], grammar, around[1]) if part is not None]
    return Grammar.concat(*parts) if len(parts) > 1 else grammar


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
