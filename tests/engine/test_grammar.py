"""Structured output: outputs follow their grammars, and other sequences in the batch are not affected."""

import json
import math
import os
import re
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import COMPILE_THREADS, GrammarBackend
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.grammars import mask_client
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.formats import specified, tag
from pdserve.grammars.limits import GrammarTooComplex
from pdserve.grammars.mask_client import MaskService
from pdserve.request import Request, SamplingParams, Tenant
from tests.waiting import wait_until

SCHEMA = {
    "type": "object",
    "properties": {
        "open": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "list": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    },
    "required": ["open", "kind"],
}
SPECS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"[ab]{3,7}-\d{4}"},
    {"choice": ["Paris", 'Bonn "am\nRhein" é']},
    {"grammar": 'root ::= "x" | "(" inner ")"\ninner ::= "y" | "[z]"'},
    {"format": tag("<tool_call>\n", specified({"json": {"type": "boolean"}}), "\n</tool_call>")},
]
NESTED: dict[str, Any] = {}
for _ in range(850):
    NESTED = {"type": "array", "items": NESTED}
VALID: list[Callable[[str], object]] = [
    lambda text: set(json.loads(text)) >= {"open", "kind"} and json.loads(text)["open"] in (True, False),
    lambda text: re.fullmatch(r"[ab]{3,7}-\d{4}", text),
    lambda text: text in SPECS[2]["choice"],
    lambda text: text in ("x", "(y)", "([z])"),
    lambda text: re.fullmatch(r"<tool_call>\n(true|false)\n</tool_call>", text),
]


grammar_ready = threading.Event()  # set by the engine of these tests


def sampling(i: int, spec: dict[str, Any] | None) -> SamplingParams:
    text = "" if spec is None else json.dumps(spec)
    return SamplingParams(max_tokens=200, seed=i, temperature=float(i % 2), grammar=text)


def run(engine: Engine, seqs: list[Sequence], accepted: list[int] | None = None) -> list[list[int]]:
    """Run sequences to their ends, and return their outputs. `accepted` gets the number of accepted drafts of each step."""
    for seq in seqs:
        if seq not in engine.constrained:
            engine.add(seq)
    unfinished = set(seqs)
    while unfinished:
        result = engine.step()
        if accepted is not None:
            accepted += [count for _, count in result.drafted]
        for seq in [
            seq
            for seq in result.sampled
            if seq.output.finish_reason() or (seq.output.constraint and seq.output.constraint.failure)
        ]:
            engine.remove(seq)
            unfinished.remove(seq)
        if result.idle and unfinished:
            assert grammar_ready.wait(600)
            grammar_ready.clear()
    assert engine.pool.num_held == 0
    return [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs]


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    config = EngineConfig(model=str(checkpoint("llama")), num_blocks=200, dtype="bfloat16")
    return Engine(config, on_grammar_ready=grammar_ready.set)


def text_of(engine: Engine, path: Path, ids: list[int]) -> str:
    from pdserve.router.text.tokenizer import Tokenizer

    assert ids[-1] in engine.checkpoint.eos_token_ids, "the grammar determines the end"
    return Tokenizer(path).decode(ids)


def test_outputs_follow_their_grammars_before_and_after_migration(
    engine: Engine, checkpoint: Callable[..., Path]
) -> None:
    specs = [None, *SPECS, None, *SPECS]

    def new(i: int, output: Tokens[int] = ()) -> Sequence:
        return engine.new_sequence(str(i), Request(prompt=[7, i], sampling=sampling(i, specs[i])), output=output)

    outputs = run(engine, [new(i) for i in range(len(specs))])
    for i, spec in enumerate(specs):
        if spec is not None:
            text = text_of(engine, checkpoint("llama"), outputs[i])
            assert VALID[SPECS.index(spec)](text), text
    assert run(engine, [new(0), new(6)]) == [outputs[0], outputs[6]], "sequences without a grammar"
    migrated = [new(i, outputs[i][:-1][: 1 + i % 5]) for i, spec in enumerate(specs) if spec is not None]
    assert run(engine, migrated) == [outputs[i] for i, spec in enumerate(specs) if spec is not None]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"json": {"type": "foo"}}, 'the grammar cannot be used: "type" ["foo"], which is not a type, at the top'),
        ({"json": {"items": NESTED}}, "the grammar is nested too deeply"),
        ({"regex": "[a"}, "the grammar cannot be used: unclosed character class"),
        ({"grammar": "nothing"}, "the grammar cannot be used: a rule must begin with its name and ::= (line 1)"),
    ],
)
def test_invalid_grammar_is_reported(engine: Engine, spec: dict[str, Any], message: str) -> None:
    seq = engine.new_sequence("r", Request(prompt=[7], sampling=sampling(0, spec)))
    run(engine, [seq])
    assert seq.output.constraint is not None and str(seq.output.constraint.failure).startswith(message)


def test_output_that_breaks_the_grammar_fails(engine: Engine) -> None:
    seq = engine.new_sequence("r", Request(prompt=[7], sampling=sampling(0, SPECS[1])), output=[200, 200])
    run(engine, [seq])
    assert seq.output.constraint is not None and "does not follow the grammar" in str(seq.output.constraint.failure)


def test_slow_compilation_does_not_delay_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, proceed = threading.Event(), threading.Event()
    load = mask_client.LoadedGrammar

    def slow(compiler: GrammarCompiler, spec: str, tenant: Tenant) -> mask_client.LoadedGrammar:
        compiling.set()
        assert proceed.wait(600)
        return load(compiler, spec, tenant)

    run(engine, [engine.new_sequence("q", Request(prompt=[7], sampling=sampling(1, SPECS[1])))])
    monkeypatch.setattr("pdserve.engine.grammar.LoadedGrammar", slow)
    late = engine.new_sequence("r", Request(prompt=[7], sampling=sampling(0, {"choice": ["compiled late"]})))
    cached = engine.new_sequence("s", Request(prompt=[7], sampling=sampling(1, SPECS[1])))
    plain = engine.new_sequence("t", Request(prompt=[7], sampling=sampling(1, None)))
    try:
        assert compiling.wait(600)
        engine.add(late)
        run(engine, [cached, plain])
        assert cached.output.num_generated > 0 and plain.output.num_generated > 0 and late.output.num_generated == 0
    finally:
        proceed.set()
        engine.remove(late)


@pytest.fixture
def stopped(engine: Engine) -> Iterator[Callable[[], None]]:
    """Stops all mask workers, whose masks are late until `resume` is called, or the test ends."""
    pids: list[int] = []

    def stop(*, resume: bool = False) -> None:
        server = engine.grammars.compiler.server_pid
        pids[:] = pids or map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        for pid in pids:
            with suppress(ProcessLookupError):  # its grammar is not needed any more
                os.kill(pid, signal.SIGCONT if resume else signal.SIGSTOP)

    yield stop
    stop(resume=True)


def test_a_slow_mask_delays_its_own_sequence_only(engine: Engine, stopped: Callable[..., None]) -> None:
    """The tokens are those of quick masks."""

    def new(i: int, spec: dict[str, Any] | None, max_tokens: int = 200) -> Sequence:
        params = sampling(i, spec)
        return engine.new_sequence(
            str(i), Request(prompt=[7, i], sampling=structs.replace(params, max_tokens=max_tokens, ignore_eos=not spec))
        )

    specs = [SPECS[0], SPECS[1], SPECS[4]]  # whose answers are not over so soon
    expected = run(engine, [new(i, spec) for i, spec in enumerate(specs)])
    slow = [new(i, spec) for i, spec in enumerate(specs)]
    for seq in slow:
        engine.add(seq)
    while any(constraint.is_late for constraint in engine.constrained.values()):  # none is over before the others begin
        for constraint in engine.constrained.values():
            constraint.follow(array("I"))
        time.sleep(0.001)
    while not all(seq.output.num_generated for seq in slow):
        engine.step()
    stopped()
    lengths = [len(seq) for seq in slow]
    num_late = engine.num_late
    plain = new(100, None, max_tokens=50)
    engine.add(plain)
    for count in range(1, 51):
        assert plain in engine.step().sampled and plain.output.num_generated == count
    engine.remove(plain)
    assert all(len(seq) <= before + 2 for seq, before in zip(slow, lengths, strict=True)), "masks that were there"
    assert engine.num_late >= num_late + 50 and all(seq.kv.block_ids for seq in slow)
    stopped(resume=True)
    assert run(engine, slow) == expected


def test_drafts_are_accepted_as_far_as_their_masks_are_there(
    checkpoint: Callable[..., Path], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(
        engine,
        [
            engine.new_sequence(str(i), Request(prompt=[7, i], sampling=sampling(i, spec)))
            for i, spec in enumerate(SPECS)
        ],
    )

    class Oracle(Drafter):
        def propose(self, plan: StepPlan) -> dict[Sequence, list[int]]:
            answers = {seq: expected[int(seq.request_id)] for seq in plan.counts if plan.takes_drafts(seq)}
            return {seq: [*answer[seq.output.num_generated :][:3], 5] for seq, answer in answers.items()}

    config = EngineConfig(model=str(checkpoint("llama")), num_blocks=200, dtype="bfloat16")
    drafting = Engine(config, on_grammar_ready=grammar_ready.set)
    drafting.drafter = Oracle()
    monkeypatch.setattr("pdserve.engine.grammar.SLOW_S", math.inf)  # masks may be late on a busy machine
    for name in ("MIN_MASK_WAIT_S", "MAX_MASK_WAIT_S"):
        monkeypatch.setattr(f"pdserve.engine.engine.{name}", 10.0)
    for is_known in (True, False):
        accepted = list[int]()
        if not is_known:
            monkeypatch.setattr(MaskService, "try_out", lambda *_: None)
        seqs = [
            drafting.new_sequence(str(i), Request(prompt=[7, i], sampling=sampling(i, spec)))
            for i, spec in enumerate(SPECS)
        ]
        assert run(drafting, seqs, accepted) == expected
        assert any(accepted) or not is_known
        assert set(accepted) <= {0, 1} or is_known, "the first of them needs the mask that is there"


def test_a_grammar_whose_masks_are_too_expensive_fails_its_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_client, "mask_budget_s", lambda num_tokens: -1.0 if num_tokens > 2 else 1e9)
    seq = engine.new_sequence("r", Request(prompt=[7], sampling=sampling(0, SPECS[1])))
    run(engine, [seq])
    assert seq.output.constraint is not None and isinstance(seq.output.constraint.failure, GrammarTooComplex)
    assert "of CPU time for 3 tokens" in str(seq.output.constraint.failure)


def test_a_grammar_is_compiled_once_while_it_is_cached(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    load = mask_client.LoadedGrammar

    def record(compiler: GrammarCompiler, spec: str, tenant: Tenant) -> mask_client.LoadedGrammar:
        compiled.append(spec)
        return load(compiler, spec, tenant)

    monkeypatch.setattr("pdserve.engine.grammar.LoadedGrammar", record)
    spec = {"choice": ["compiled once"]}
    for _ in range(2):
        run(engine, [engine.new_sequence(str(i), Request(prompt=[7], sampling=sampling(i, spec))) for i in range(3)])
    assert compiled == [json.dumps(spec)]


def test_a_grammar_does_not_wait_for_all_that_another_tenant_has_sent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the other has sent before, and however long each takes to compile."""
    begun, gate = list[str](), threading.Semaphore(0)

    def compile_slowly(compiler: GrammarCompiler, spec: str, tenant: Tenant) -> None:
        begun.append(spec)
        assert gate.acquire(timeout=600)
        raise GrammarTooComplex("too slow", kind="invalid_grammar")

    monkeypatch.setattr("pdserve.engine.grammar.LoadedGrammar", compile_slowly)
    backend = GrammarBackend("demo", 2, frozenset([0]), lambda: None)
    constraints = [backend.compile(f"mallory's {number}", Tenant(1)) for number in range(8)]
    wait_until(lambda: len(begun) == COMPILE_THREADS)
    constraints.append(backend.compile("alice's", Tenant(2)))
    for count in (COMPILE_THREADS + 1, COMPILE_THREADS + 2):  # one by one: a thread may be late to tell what it begins
        gate.release()
        wait_until(partial(lambda count: len(begun) == count, count))
    assert "alice's" in begun
    gate.release(len(constraints) - 2)
    while any(one.is_late for one in constraints):
        for one in constraints:
            one.follow(array("I"))
    assert len(begun) == 9
    assert all(isinstance(one.failure, GrammarTooComplex) for one in constraints)


def test_a_grammar_for_which_no_further_thread_can_be_started_is_compiled_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the engine, in whose thread it is asked for, goes on."""
    gate, begun = threading.Event(), list[str]()

    def compile_slowly(compiler: GrammarCompiler, spec: str, tenant: Tenant) -> None:
        begun.append(spec)
        assert gate.wait(600)
        raise GrammarTooComplex("too slow", kind="invalid_grammar")

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("pdserve.engine.grammar.LoadedGrammar", compile_slowly)
    backend = GrammarBackend("demo", 2, frozenset([0]), lambda: None)
    constraints = [backend.compile("first", Tenant(1))]
    wait_until(lambda: begun == ["first"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        constraints.append(backend.compile("second", Tenant(1)))
    gate.set()
    while any(one.is_late for one in constraints):
        for one in constraints:
            one.follow(array("I"))
    assert begun == ["first", "second"]
