"""Logits processors of other packages, found by entry point: they change the tokens of their own requests only."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pdserve import logits_processors, plugins
from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.errors import BadRequest
from pdserve.request import Request, SamplingParams

PLUGIN = """
def make(arguments):
    if "ids" not in arguments:
        raise ValueError("ids is missing")
    arguments["ids"][0] + 0
    def process(prompt, output, logits_V):
        if len(output) == arguments.get("fails_after"):
            raise RuntimeError("broken")
        logits_V[arguments["ids"]] = float("-inf")
    return process
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "ban_plugin.py").write_text(PLUGIN)
    info = tmp_path / "ban_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ban-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{logits_processors.ENTRY_POINT_GROUP}]\nban = ban_plugin:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()
    yield
    plugins.names.cache_clear()


def sampling(**arguments: Any) -> SamplingParams:
    spec = json.dumps({"ban": arguments}) if arguments else ""
    return SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logits_processors=spec)


def test_they_change_their_own_requests_only(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=60))

    def run(*each: SamplingParams) -> list[Any]:
        seqs = [engine.new_sequence(str(i), Request(prompt=[*range(20)], sampling=one)) for i, one in enumerate(each)]
        for seq in seqs:
            engine.add(seq)
        while engine.has_work:
            for seq in engine.step().sampled:
                if seq.output.finish_reason() or seq.output.failure:
                    engine.remove(seq)
        return seqs

    (plain,) = run(sampling())
    expected = plain.output.tokens[20:].tolist()
    banned, other, broken = run(sampling(ids=expected[:1]), sampling(), sampling(ids=[1], fails_after=3))
    assert expected[0] not in banned.output.tokens[20:] and other.output.tokens[20:].tolist() == expected
    assert (
        isinstance(broken.output.failure, BadRequest)
        and "broken" in str(broken.output.failure)
        and broken.output.num_generated == 4
    )


def test_one_that_fails_amid_a_beam_search_ends_it(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=60))
    params = structs.replace(sampling(ids=[1], fails_after=3), beam_width=2, num_answers=2)
    seq = engine.new_sequence("0", Request(prompt=[*range(20)], sampling=params))
    engine.add(seq)
    assert seq.group is not None
    while seq.output.fault is None and not seq.group.search.is_over:
        engine.step()
    assert "broken" in str(seq.output.fault) and seq.group.search.num_steps == 3
    engine.remove(seq)
    assert engine.pool.num_held == 0


@pytest.mark.parametrize("grammar", ["", '{"choice": ["zz"]}'])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_request_for_which_no_token_is_left_fails(
    grammar: str, temperature: float, checkpoint: Callable[..., Path]
) -> None:
    ready = threading.Event()
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), num_blocks=60), on_grammar_ready=ready.set)
    banned = [i for i in range(engine.checkpoint.vocab_size) if i != 7 or not grammar]  # 7 is no z
    params = structs.replace(sampling(ids=banned), temperature=temperature, grammar=grammar, ignore_eos=not grammar)
    seq = engine.new_sequence("0", Request(prompt=[*range(20)], sampling=params))
    engine.add(seq)
    while seq.output.failure is None and not seq.output.finish_reason():
        if engine.step().idle:
            assert ready.wait(600)
    expected = "the logits processors leave no token" + (" that the grammar allows" if grammar else "")
    assert isinstance(seq.output.failure, BadRequest) and str(seq.output.failure) == expected


def test_wrong_names_and_arguments_are_refused() -> None:
    with pytest.raises(BadRequest, match="there are: ban"):
        logits_processors.make_processors('{"bam": {}}')
    with pytest.raises(BadRequest, match=r"logits_processors\.ban: ids is missing"):
        logits_processors.make_processors('{"ban": {}}')
    for ids, error in (("null", "TypeError"), ("[]", "IndexError")):
        with pytest.raises(
            BadRequest, match=rf"logits_processors\.ban: {error}"
        ):  # of a package that expects better ones
            logits_processors.make_processors(f'{{"ban": {{"ids": {ids}}}}}')
