"""Structured output: outputs follow their grammars, and other sequences in the batch are not affected."""

import json
import re
import threading
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.grammars import mask_client
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.formats import specified, tag
from pdserve.grammars.limits import GrammarTooComplex
from pdserve.request import SamplingParams

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


def run(engine: Engine, seqs: list[Sequence]) -> list[list[int]]:
    for seq in seqs:
        engine.add(seq)
    unfinished = set(seqs)
    while unfinished:
        result = engine.step()
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
        return engine.new_sequence(str(i), [7, i], sampling(i, specs[i]), output=output)

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
    seq = engine.new_sequence("r", [7], sampling(0, spec))
    run(engine, [seq])
    assert seq.output.constraint is not None and str(seq.output.constraint.failure).startswith(message)


def test_output_that_breaks_the_grammar_fails(engine: Engine) -> None:
    seq = engine.new_sequence("r", [7], sampling(0, SPECS[1]), output=[200, 200])
    run(engine, [seq])
    assert seq.output.constraint is not None and "does not follow the grammar" in str(seq.output.constraint.failure)


def test_slow_compilation_does_not_delay_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, proceed = threading.Event(), threading.Event()
    compile_grammar = GrammarCompiler.compile

    def slow(compiler: GrammarCompiler, spec: str) -> bytes:
        compiling.set()
        assert proceed.wait(600)
        return compile_grammar(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    late = engine.new_sequence("r", [7], sampling(0, {"choice": ["compiled late"]}))
    cached = engine.new_sequence("s", [7], sampling(1, SPECS[1]))
    plain = engine.new_sequence("t", [7], sampling(1, None))
    try:
        assert compiling.wait(600)
        engine.add(late)
        run(engine, [cached, plain])
        assert cached.output.num_generated > 0 and plain.output.num_generated > 0 and late.output.num_generated == 0
    finally:
        proceed.set()
        engine.remove(late)


def test_a_grammar_whose_masks_are_too_expensive_fails_its_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_client, "mask_budget_s", lambda num_tokens: -1.0 if num_tokens > 2 else 1e9)
    seq = engine.new_sequence("r", [7], sampling(0, SPECS[1]))
    run(engine, [seq])
    assert seq.output.constraint is not None and isinstance(seq.output.constraint.failure, GrammarTooComplex)
    assert "of CPU time for 3 tokens" in str(seq.output.constraint.failure)


def test_a_grammar_is_compiled_once_while_it_is_cached(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = GrammarCompiler.compile

    def record(compiler: GrammarCompiler, spec: str) -> bytes:
        compiled.append(spec)
        return compile_grammar(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "compile", record)
    spec = {"choice": ["compiled once"]}
    for _ in range(2):
        run(engine, [engine.new_sequence(str(i), [7], sampling(i, spec)) for i in range(3)])
    assert compiled == [json.dumps(spec)]
