"""Adapters on several ranks: mixed batches give what merged weights give, and all ranks have the same adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.adapters.checkpoint import AdapterError
from pdserve.engine.engine import Engine
from pdserve.errors import RequestError
from pdserve.request import Request, SamplingParams
from tests.low_rank import Made, make_adapter, make_stacked_adapter, merge, modules, six_adapters

TOKENS = 12


def run(engine: Engine, work: list[tuple[str, list[int]]], max_tokens: int = TOKENS) -> list[list[int]]:
    """Answer prompts, each with an adapter or with the base, as far as there are slots at once."""
    assert engine.adapters is not None
    digests = {one.name: one.digest for one in engine.adapters.listing()} | {
        "": b""
    }  # and not one that has lost its name
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    seqs = [
        engine.new_sequence(str(i), Request(prompt=prompt, sampling=sampling, adapter=digests[name]))
        for i, (name, prompt) in enumerate(work)
    ]
    waiting = [*seqs]
    while waiting or engine.has_work:
        for seq in [*waiting]:
            if seq.adapter is None or engine.adapters.acquire(seq):
                waiting.remove(seq)
                engine.add(seq)
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    return [seq.output.generated.tolist() for seq in seqs]


@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [("llama", 2), ("phi3", 2), pytest.param("qwen3", 4, marks=pytest.mark.slow)],
)
def test_mixed_batches_equal_merged_weights(
    architecture: str,
    ranks: int,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    generate: Any,
    ranked_engine: Callable[..., Engine],
    tmp_path: Path,
) -> None:
    """With fewer slots than adapters. Phi-3 has q, k and v in one weight; two of four ranks share a KV head."""
    base, chosen = checkpoint(architecture, dtype="float32"), [*prompts[2:6], *prompts[12:14]]
    adapters = six_adapters(tmp_path / "adapters", base, architecture)
    settings = {"lora_modules": modules(adapters), "max_loras": 4, "max_num_batched_tokens": 256}
    engine = ranked_engine(base, ranks, num_blocks=400, **settings)
    work = [(name, prompt) for prompt in chosen for name in ("", *adapters)]
    got, plain = run(engine, work), generate(base, chosen, TOKENS)
    assert got[:: 1 + len(adapters)] == plain
    for i, (name, made) in enumerate(adapters.items(), 1):
        expected = generate(merge(tmp_path / name, base, *made), chosen, TOKENS)
        assert got[i :: 1 + len(adapters)] == expected, name
        assert not any(one == other for one, other in zip(expected, plain, strict=True)), name
    assert run(engine, [("", chosen[0])]) == plain[:1]


def test_adapters_that_come_and_go(
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    generate: Any,
    ranked_engine: Callable[..., Engine],
    tmp_path: Path,
) -> None:
    """The other ranks forget those that are gone; one that comes back is loaded again. What is refused changes nothing."""
    base, chosen = checkpoint("qwen3_moe", dtype="float32"), prompts[3]
    engine = ranked_engine(base, num_blocks=100, lora_folder=str(tmp_path), max_loras=1)
    adapters: Any = engine.adapters
    made = [
        make_adapter(tmp_path / f"{i}", base, targets=("q_proj", "o_proj"), size=3, seed=i, alpha=16) for i in range(7)
    ]
    expected = [generate(merge(tmp_path / f"merged {i}", base, made[i], {"": 2.0}), [chosen], 8)[0] for i in range(2)]
    for i, path in enumerate((*made, made[0])):
        adapters.add("x", adapters.read(path))
        if i in (0, 1, 7):
            assert run(engine, [("x", chosen), ("", chosen)], 8) == [
                expected[i % 7],
                *generate(base, [chosen], 8),
            ]
    first = adapters.listing()[0].digest
    for path, message in (
        (
            make_adapter(tmp_path / "experts", base, targets=("gate_proj",)),
            "adapters of experts and routers need one device",
        ),
        (make_stacked_adapter(tmp_path / "stacked", base), "no weights of experts or routers"),
        (
            make_adapter(tmp_path / "llama", checkpoint("phi3", dtype="float32"), targets=("qkv_proj",)),
            "here is no such",
        ),
    ):
        with pytest.raises(AdapterError, match=message) as refused:
            adapters.read(path)
        assert "\n" not in str(refused.value)
    with pytest.raises(RequestError):
        adapters.find(bytes(16))
    assert run(engine, [("x", chosen)], 8) == expected[:1] and adapters.listing()[0].digest == first


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_bits_do_not_depend_on_the_mix(
    dtype: str,
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    ranked_engine: Callable[..., Engine],
    tmp_path: Path,
) -> None:
    base = checkpoint("llama", dtype=dtype)
    adapters = six_adapters(tmp_path / "adapters", checkpoint("llama", dtype="float32"), "llama")
    some = {name: Made(*adapters[name]) for name in ("small", "large", "patterns")}
    work = [(name, prompt) for prompt in prompts[3:7] for name in ("", *some)]
    together = run(ranked_engine(base, num_blocks=200, lora_modules=modules(some)), work)
    alone = ranked_engine(base, num_blocks=200, lora_modules=modules(some), max_num_batched_tokens=32)
    assert [run(alone, [one])[0] for one in work] == together
