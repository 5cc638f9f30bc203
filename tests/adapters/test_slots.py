"""Adapters in one engine: mixed batches give what merged weights give one by one, and slots go round."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.adapters.checkpoint import WEIGHTS, AdapterError
from pdserve.adapters.slot_table import MAX_OVERTAKEN
from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError, SetupError
from pdserve.request import Request, SamplingParams
from tests.low_rank import Made, make_adapter, make_stacked_adapter, merge, modules, six_adapters, with_settings

TOKENS = 12
CHANGED = 0.95  # of the answers, by each adapter


class Work(NamedTuple):
    """A request for an engine: an adapter's name, or "" for the base."""

    adapter: str
    prompt: list[int]


@pytest.fixture(scope="session")
def six(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Made]]:
    """six(architecture) → `six_adapters` of it."""

    @cache
    def make(architecture: str) -> dict[str, Made]:
        folder = tmp_path_factory.mktemp(f"{architecture}-adapters")
        return six_adapters(folder, checkpoint(architecture, dtype="float32"), architecture)

    return make


def digests(engine: Engine) -> dict[str, bytes]:
    assert engine.adapters is not None
    return {one.name: one.digest for one in engine.adapters.listing()}


def run(engine: Engine, work: list[Work], max_tokens: int = TOKENS) -> list[list[int]]:
    """Answer all at once, as far as there are slots."""
    of_name = {"": b"", **digests(engine)}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    seqs = [
        engine.new_sequence(str(i), Request(prompt=one.prompt, sampling=sampling, adapter=of_name[one.adapter]))
        for i, one in enumerate(work)
    ]
    waiting = [*seqs]
    while waiting or engine.has_work:
        for seq in [*waiting]:
            if seq.adapter is None or (engine.adapters is not None and engine.adapters.acquire(seq)):
                waiting.remove(seq)
                engine.add(seq)
        for seq in engine.step().sampled:
            if seq.output.finish_reason():
                engine.remove(seq)
    return [seq.output.generated.tolist() for seq in seqs]


@pytest.fixture
def make_engine(checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    def make(architecture: str, adapters: dict[str, Made], dtype: str = "float32", **settings: Any) -> Engine:
        base = str(checkpoint(architecture, dtype=dtype))
        settings = {"num_blocks": 400, "max_num_batched_tokens": 256, **settings}
        return Engine(EngineConfig(model=base, dtype=dtype, lora_modules=modules(adapters), **settings))

    return make


def mixed(adapters: dict[str, Made], prompts: list[list[int]]) -> list[Work]:
    """Each prompt with the base and each adapter, in an order in which no two beside each other have one."""
    return [Work(name, prompt) for prompt in prompts for name in ("", *adapters)]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3_moe", "mixtral", "gpt_oss", "gpt2"])
def test_mixed_batches_equal_merged_weights(
    architecture: str,
    six: Callable[[str], dict[str, Made]],
    make_engine: Callable[..., Engine],
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    generate: Any,
    tmp_path: Path,
) -> None:
    """Fused modules, such as qkv_proj, transposed ones (GPT-2), and experts of mixtures, too."""
    adapters, base = six(architecture), checkpoint(architecture, dtype="float32")
    chosen = [*prompts[2:8], *prompts[12:14]]
    got = run(make_engine(architecture, adapters), mixed(adapters, chosen))
    plain = generate(base, chosen, TOKENS)
    assert got[:: 1 + len(adapters)] == plain
    for i, (name, made) in enumerate(adapters.items(), 1):
        expected = generate(merge(tmp_path / name, base, *made), chosen, TOKENS)
        changed = sum(one != other for one, other in zip(expected, plain, strict=True)) / len(chosen)
        assert changed >= CHANGED, f"{name} changes {changed:.0%} of the answers"
        assert got[i :: 1 + len(adapters)] == expected, name


@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization"),
    [
        ("llama", "bfloat16", "none"),
        pytest.param("llama", "float16", "none", marks=pytest.mark.slow),
        ("qwen3_moe", "bfloat16", "none"),
        pytest.param("mixtral", "float16", "none", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bfloat16", "none", marks=pytest.mark.slow),
        ("qwen3_moe", "bfloat16", "int4"),
        ("gpt_oss", "float16", "int8"),
    ],
)
def test_bits_do_not_depend_on_the_mix(
    architecture: str,
    dtype: str,
    quantization: str,
    six: Callable[[str], dict[str, Made]],
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
) -> None:
    """Log probabilities are compared, not tokens only. Those of the base are as on an engine without adapters."""
    adapters = six(architecture)
    settings = {"dtype": dtype, "quantization": quantization}
    work = mixed(adapters, prompts[3:7])

    def scores(engine: Engine, work: list[Work]) -> list[list[float]]:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
        of_name, found = {"": b"", **(digests(engine) if engine.adapters else {})}, dict[Sequence, list[float]]()
        for i, one in enumerate(work):
            seq = engine.new_sequence(
                str(i), Request(prompt=one.prompt, sampling=sampling, salt=str(i), adapter=of_name[one.adapter])
            )
            assert seq.adapter is None or (engine.adapters is not None and engine.adapters.acquire(seq))
            found[seq] = []
            engine.add(seq)
        while engine.has_work:
            for seq, accepted in engine.step().outcome.items():
                found[seq] += [value for one in accepted.logprobs for value in (one.logprob, one.top[1][1])]
                if seq.output.finish_reason():
                    engine.remove(seq)
        return [*found.values()]

    together = scores(make_engine(architecture, adapters, **settings), work)
    alone = make_engine(architecture, adapters, **settings)
    for one, expected in zip(work, together, strict=True):
        assert scores(alone, [one]) == [expected], one.adapter
    assert len({str(one) for one in together}) == len(work)
    plain = make_engine(architecture, {}, **settings)
    assert scores(plain, [one for one in work if not one.adapter]) == together[:: 1 + len(adapters)]


def test_steps_of_the_base_alone_are_as_without_adapters(
    six: Callable[[str], dict[str, Made]], make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    """No layer adds anything in them, and recorded steps of both kinds are replayed."""
    engine = make_engine("llama", six("llama"))
    runner: Any = engine.runner
    layers = [module for module in runner.checkpoint.model.modules() if hasattr(module, "delta")]
    plain_graphs = runner.graphs
    run(engine, [Work("", prompts[3])] * 3)
    assert layers and not any(layer.delta for layer in layers) and runner.graphs is plain_graphs
    replayed = plain_graphs.num_replayed
    assert replayed
    first = run(engine, [Work("small", prompts[3]), Work("", prompts[3])])
    assert all(layer.delta for layer in layers) and plain_graphs.num_replayed == replayed
    assert runner.graphs is not plain_graphs and runner.graphs.num_replayed
    assert run(engine, [Work("", prompts[3]), Work("large", prompts[3])])[0] == first[1]
    assert run(engine, [Work("small", prompts[3]), Work("large", prompts[3])])[0] == first[0]


@pytest.fixture
def tiny(
    make_engine: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """tiny(max_loras) → an engine with the adapters a, b and c."""
    base = checkpoint("llama", dtype="float32")
    made = {name: Made(make_adapter(tmp_path / name, base, rank=4, seed=i), {}) for i, name in enumerate("abc")}
    yield lambda max_loras, **settings: make_engine("llama", made, max_loras=max_loras, **settings)


def new(engine: Engine, adapter: str, prompt: list[int] | None = None) -> Sequence:
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return engine.new_sequence(
        "", Request(prompt=prompt or [1, 2, 3], sampling=sampling, adapter=digests(engine)[adapter])
    )


def test_slots(tiny: Callable[..., Engine]) -> None:
    """Those that sequences use stay; of the others, the one used least recently goes. The oldest that waits comes first."""
    engine = tiny(2)
    adapters: Any = engine.adapters
    a, b, c, d, e = (new(engine, name) for name in "abcbc")
    assert adapters.acquire(a) and adapters.acquire(a) and adapters.acquire(b)
    assert not adapters.acquire(c) and not adapters.acquire(c)
    assert adapters.acquire(d), "it has a slot, so it does not wait"
    adapters.release(b)
    assert not adapters.acquire(e) and not adapters.acquire(c), "its slot is still used by another"
    adapters.release(d)
    assert not adapters.acquire(e), "an older one waits for the slot"
    assert adapters.acquire(c) and adapters.acquire(e)
    for seq in (a, c, e):
        adapters.release(seq)
    f = new(engine, "b")
    assert adapters.acquire(f), "in the place of a, which was used least recently"
    g, h = new(engine, "c"), new(engine, "a")
    assert adapters.acquire(g) and not adapters.acquire(h)
    adapters.release(h)  # it is cancelled, and no longer in the way
    adapters.release(f)
    i, sibling = new(engine, "a"), new(engine, "a")
    assert adapters.acquire(i, sibling)
    adapters.release(i)
    adapters.release(g)
    assert adapters.acquire(new(engine, "b")) and not adapters.acquire(new(engine, "c")), "another choice still uses it"


def test_an_adapter_that_is_used_again_stays(tiny: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one gives way, though it came later."""
    engine, filled = tiny(2), list[bytes]()
    adapters: Any = engine.adapters
    monkeypatch.setattr(adapters, "_fill", lambda slot, adapter: filled.append(adapter.digest))
    for name in "abaca":
        seq = new(engine, name)
        assert adapters.acquire(seq)
        adapters.release(seq)
    assert filled == [digests(engine)[name] for name in "abc"]


def test_what_waits_is_not_overtaken_for_ever(tiny: Callable[..., Engine]) -> None:
    engine = tiny(1)
    adapters: Any = engine.adapters
    seqs = [new(engine, "a")]
    assert adapters.acquire(seqs[0])
    waits = new(engine, "b")
    assert not adapters.acquire(waits)
    for _ in range(MAX_OVERTAKEN):
        seqs.append(new(engine, "a"))
        assert adapters.acquire(seqs[-1])
    late = new(engine, "a")
    assert not adapters.acquire(late)
    for seq in seqs:
        assert not adapters.acquire(waits)
        adapters.release(seq)
    assert not adapters.acquire(late) and adapters.acquire(waits)
    later = [new(engine, "b") for _ in range(MAX_OVERTAKEN + 2)]
    assert all(adapters.acquire(seq) for seq in later[:2]), "late, which is before these, is overtaken from now on"
    assert [adapters.acquire(seq) for seq in later[2:]] == [True] * (MAX_OVERTAKEN - 2) + [False] * 2
    for seq in (waits, *later):
        adapters.release(seq)
    assert adapters.acquire(late)


def test_more_adapters_than_slots(tiny: Callable[..., Engine], prompts: list[list[int]]) -> None:
    work = [Work(name, prompt) for prompt in prompts[2:6] for name in ("a", "", "b", "c")]
    expected = run(tiny(3), work)
    assert len({str(one) for one in expected}) == len(work)
    assert run(tiny(1), work) == run(tiny(2), work) == expected


def test_a_slot_has_nothing_of_the_adapter_before(
    make_engine: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    """A slot that is reused keeps no layer of the adapter before, which had more layers."""
    base = checkpoint("llama", dtype="float32")
    made = {"all": Made(make_adapter(tmp_path / "all", base), {})}
    made["one"] = Made(make_adapter(tmp_path / "one", base, targets=("q_proj",), size=3), {})
    [expected] = run(make_engine("llama", made, max_loras=2), [Work("one", prompts[3])])
    engine = make_engine("llama", made, max_loras=1)
    other, plain = (run(engine, [Work(name, prompts[3])]) for name in ("all", ""))
    assert run(engine, [Work("one", prompts[3])]) == [expected] and expected not in (*other, *plain)


def test_keys_are_those_of_the_weights(tiny: Callable[..., Engine], prompts: list[list[int]]) -> None:
    """No block is shared by two adapters, nor with the base, and all are with the same one under another name."""
    engine, prompt = tiny(3), prompts[9]
    adapters: Any = engine.adapters
    for adapter in ("", "a", "b"):
        before = engine.scheduler.prefix_hits
        run(engine, [Work(adapter, prompt)])
        assert engine.scheduler.prefix_hits == before, f"{adapter or 'the base'} finds blocks of another"
    path = Path(adapters.listing()[0].path)
    adapters.add("a, too", adapters.read(path))
    run(engine, [Work("a, too", prompt)])
    assert engine.scheduler.prefix_hits >= len(prompt) // 16 * 16 - 16


def test_a_name_with_other_weights(
    tiny: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    """A running sequence keeps the weights with which it began; those of another alpha are others."""
    engine, base = tiny(3), checkpoint("llama", dtype="float32")
    adapters: Any = engine.adapters
    path = Path(adapters.listing()[0].path)
    [expected] = run(engine, [Work("a", prompts[9])])
    old = digests(engine)["a"]
    seq = new(engine, "a", prompts[9])
    assert adapters.acquire(seq)
    engine.add(seq)
    engine.step()
    adapters.add("a", adapters.read(with_settings(tmp_path / "new", path, lora_alpha=40)))
    assert digests(engine)["a"] != old
    hits = engine.scheduler.prefix_hits
    [other] = run(engine, [Work("a", prompts[9])])
    assert other != expected and engine.scheduler.prefix_hits == hits
    assert seq.output.generated.tolist() == expected[:4]
    assert adapters.find(old).digest == old, "requests that began with it may still move here"
    for i in range(8):
        adapters.add("b", adapters.read(make_adapter(tmp_path / f"{i}", base, rank=4, seed=100 + i)))
    adapters.remove("c")
    with pytest.raises(RequestError, match="not on this instance"):
        adapters.find(digests(tiny(1))["b"])


def test_preemption(tiny: Callable[..., Engine], prompts: list[list[int]]) -> None:
    work = [Work(name, prompt) for prompt in prompts[4:8] for name in ("a", "", "b")]
    expected = run(tiny(2), work, 40)
    small = tiny(2, num_blocks=16, max_model_len=80)
    assert run(small, work, 40) == expected and small.scheduler.num_preemptions


def test_speculation(tiny: Callable[..., Engine], prompts: list[list[int]]) -> None:
    """Drafts are rows of their sequence, so they have its adapter."""
    work = [Work(name, prompt * 3) for prompt in prompts[2:6] for name in ("a", "", "b")]
    engine = tiny(2, speculate="ngram")
    assert run(engine, work, 40) == run(tiny(2), work, 40)


def test_adapters_that_cannot_be_used(
    make_engine: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base, other = checkpoint("llama", dtype="float32"), checkpoint("gpt2", dtype="float32")
    wide = make_adapter(tmp_path / "wide", base, targets=("q_proj",))
    head = make_adapter(tmp_path / "head", base, targets=("lm_head",))
    of_gpt2 = make_adapter(tmp_path / "gpt2", other, targets=("c_attn",))
    for path, message in {
        of_gpt2: "is of another base: transformer.h.0.attn.c_attn maps .* no such linear layer",
        head: "is of another base: lm_head maps",
        tmp_path: "adapter_config.json cannot be read",
    }.items():
        with pytest.raises(SetupError, match=f"--lora-modules x: .*{message}") as refused:
            make_engine("llama", {"x": Made(path, {})})
        assert "\n" not in str(refused.value)
    engine = make_engine("gemma4", {})
    assert engine.adapters is None
    with pytest.raises(RequestError, match="no adapters"):
        engine.new_sequence("", Request(prompt=[1], sampling=SamplingParams(), adapter=bytes(16)))
    with pytest.raises(SetupError, match="--max-lora-rank is 4"):
        make_engine("llama", {"x": Made(wide, {})}, max_lora_rank=4)
    with pytest.raises(SetupError, match="not supported with --async-scheduling on"):
        make_engine("llama", {"x": Made(wide, {})}, async_scheduling="on")
    for value in ("x", "=y", "x=", "x=y,x=z", "m=y"):
        with pytest.raises(ValueError, match="write name=folder"):
            EngineConfig(model="m", lora_modules=value)


def test_other_bases_are_told_apart(
    tiny: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    adapters: Any = tiny(1).adapters
    path = make_adapter(tmp_path / "x", checkpoint("qwen3_moe", dtype="float32"), targets=("gate",))
    with pytest.raises(AdapterError, match=r"layers.0.mlp.gate maps 64 → 4, and here is no such linear layer"):
        adapters.read(path)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_routers_of_mixtures(
    architecture: str,
    make_engine: Callable[..., Engine],
    checkpoint: Callable[..., Path],
    prompts: list[list[int]],
    generate: Any,
    tmp_path: Path,
) -> None:
    """Named as layers or as parameters. DeepSeek's computes in float32 amid 16-bit layers; no bit depends on the mix."""
    base, name = checkpoint(architecture, dtype="float32"), "router" if architecture == "gpt_oss" else "gate"
    made = {key: make_adapter(tmp_path / key, base, targets=(name,), seed=i, size=3) for i, key in enumerate("ab")}
    settings: Any = {"target_modules": [], "target_parameters": [f"{name}.weight"]}
    made["parameter"] = with_settings(tmp_path / "parameter", made["a"], **settings)
    adapters = {key: Made(path, {"": 2.0}) for key, path in made.items()}
    got = run(make_engine(architecture, adapters), mixed(adapters, prompts[2:8]))
    expected = [
        generate(merge(tmp_path / f"of {key}", base, made[key], {"": 2.0}), prompts[2:8], TOKENS) for key in "ab"
    ]
    assert [got[i::4] for i in range(4)] == [generate(base, prompts[2:8], TOKENS), *expected, expected[0]]
    assert expected[0] != expected[1] and got[::4] not in expected
    engine = make_engine(architecture, adapters, "bfloat16")
    together = run(engine, mixed(adapters, prompts[2:8]))
    alone = make_engine(architecture, adapters, "bfloat16")
    assert [run(alone, [one])[0] for one in mixed(adapters, prompts[2:8])] == together


def test_adapters_of_other_experts(
    make_engine: Callable[..., Engine], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint("qwen3_moe", dtype="float32")
    adapters: Any = make_engine("qwen3_moe", {"good": Made(make_stacked_adapter(tmp_path / "good", base), {})}).adapters

    def refuse(path: Path, message: str) -> None:
        with pytest.raises(AdapterError, match=message) as refused:
            adapters.read(path)
        assert "\n" not in str(refused.value)

    one = make_adapter(tmp_path / "one", base, targets=("layers.1.mlp.experts.3.up_proj",))
    tensors, name = load_file(one / WEIGHTS), "base_model.model.model.layers.1.mlp.experts.3.up_proj"

    def with_tensors(folder: str, of: dict[str, torch.Tensor], **config: Any) -> Path:
        path = with_settings(tmp_path / folder, one, **config)
        save_file({key: tensor.contiguous() for key, tensor in of.items()}, path / WEIGHTS)
        return path

    renamed = {key.replace("experts.3", "experts.4"): tensor for key, tensor in tensors.items()}
    refuse(with_tensors("number", renamed), "names model.layers.1.mlp.experts.4.up_proj, and here are 4 experts")
    renamed = {key.replace("up_proj", "w9"): tensor for key, tensor in tensors.items()}
    refuse(with_tensors("layer", renamed), "experts.3.w9 maps 64 → 64, and here is no such linear layer")
    cut = {**tensors, f"{name}.lora_B.weight": tensors[f"{name}.lora_B.weight"][:32]}
    refuse(with_tensors("shape", cut), "experts.3.up_proj maps 64 → 32, and here is one of 64 → 64")
    both = tensors | {key.replace("up_proj", "w3"): tensor.clone() for key, tensor in tensors.items()}
    refuse(with_tensors("both", both), "has matrices of .*experts.3.w3 under two names")
    of_router = load_file(make_adapter(tmp_path / "gate", base, targets=("layers.1.mlp.gate",)) / WEIGHTS)
    both = of_router | {key.replace("mlp.gate", "moe.gate"): tensor.clone() for key, tensor in of_router.items()}
    refuse(with_tensors("routers", both), "has matrices of .*moe.gate under two names")

    stacked = make_stacked_adapter(tmp_path / "stacked", base)
    refuse(
        with_settings(tmp_path / "norm", stacked, target_parameters=["norm.weight"]), "'norm.weight', and here are no"
    )
    refuse(
        with_settings(tmp_path / "part", stacked, target_parameters=["experts.down_proj"]),
        "experts.base_layer has rank 8 by .*, and matrices",
    )
    refuse(
        with_settings(tmp_path / "rank", stacked, r=4), "4 experts, 64 → 64.* has rank 4 by adapter_config.json, and"
    )
    other = make_stacked_adapter(tmp_path / "other", checkpoint("mixtral", dtype="float32"))
    refuse(other, "experts.down_proj .4 experts, 64 → 64. has rank 8 by adapter_config.json, and matrices of")
    refuse(make_stacked_adapter(tmp_path / "high", base, rank=65), "has rank 65, and --max-lora-rank is 64")


@pytest.mark.parametrize(
    ("architecture", "layer", "dtype", "message"),
    [
        ("llama4", "router", "float32", "router maps .* no such linear layer"),
        ("jamba", "dt_proj", "bfloat16", "dt_proj maps .* no such linear layer"),
        (
            "jamba",
            "dt_proj",
            "float32",
            "JambaForCausalLM does not run with it: 'Linear' object has no attribute 'weight'",
        ),
    ],
)
def test_layers_that_are_more_than_their_product_are_refused(
    architecture: str,
    layer: str,
    dtype: str,
    message: str,
    make_engine: Callable[..., Engine],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A router of Llama 4 chooses experts, too; Jamba multiplies the weight of its projection itself.

    The model is then what it was, and takes other adapters.
    """
    base = checkpoint(architecture, dtype=dtype)
    path = make_adapter(tmp_path / "x", base, targets=(layer,))
    with pytest.raises(SetupError, match=message):
        make_engine(architecture, {"x": Made(path, {})}, dtype)
    engine = make_engine(
        architecture, {"good": Made(make_adapter(tmp_path / "good", base, targets=("o_proj",)), {})}, dtype
    )
    adapters: Any = engine.adapters
    work = [Work(name, [1, 2, 3]) for name in ("good", "")]
    expected = run(engine, work)
    with pytest.raises(AdapterError, match=message):
        adapters.add("x", adapters.read(path))
    assert run(engine, work) == expected and expected[0] != expected[1] and digests(engine).keys() == {"good"}
