"""Adapters in PEFT's format: what they add, by content; and what is refused, in a sentence."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, load_file, save_file

from pdserve.adapters.checkpoint import CONFIG, WEIGHTS, AdapterError, local_folder, parse_adapter, read_files
from tests.low_rank import ALL, make_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"


@pytest.fixture
def make(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """make(name, **settings) → the folder of an adapter of the llama."""
    base = checkpoint("llama", dtype="float32")
    return lambda name, **settings: make_adapter(tmp_path / name, base, **settings)


def change(path: Path, **settings: Any) -> Path:
    file = path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return path


def test_matrices_and_scales(make: Callable[..., Path]) -> None:
    adapter = parse_adapter(read_files(make("a", rank=4, alpha=6)), 64)
    assert len(adapter.layers) == 3 * len(ALL) and adapter.rank == 4
    layer = adapter.layers[Q]
    tensors = load_file(Path(make("b", rank=4, alpha=6)) / WEIGHTS)
    assert torch.equal(layer.a_RK, tensors[f"base_model.model.{Q}.lora_A.weight"])
    assert torch.equal(layer.b_RN, tensors[f"base_model.model.{Q}.lora_B.weight"].T)
    assert layer.scale == 6 / 4 and adapter.num_bytes == sum(one.nbytes for one in tensors.values())


def test_patterns_and_rank_stabilised_scales(make: Callable[..., Path]) -> None:
    """The first pattern that matches the end of a name counts; rsLoRA divides by the square root of that rank."""
    ranks = {"layers.0.self_attn.q_proj": 16, "down_proj": 2}
    path = make("a", rank=4, alpha=6, ranks=ranks, alpha_pattern={r"layers\.[02]\..*_proj": 3, "q_proj": 5})
    layers = parse_adapter(read_files(path), 64).layers
    assert [layers[name].scale for name in (Q, DOWN, Q.replace("0", "1"))] == [3 / 16, 3 / 2, 5 / 4]
    layers = parse_adapter(read_files(change(path, use_rslora=True)), 64).layers
    assert [layers[name].scale for name in (Q, DOWN)] == [3 / 4, 3 / math.sqrt(2)]


def test_the_digest_is_that_of_what_changes_the_sum(make: Callable[..., Path]) -> None:
    def digest(path: Path) -> bytes:
        return parse_adapter(read_files(path), 64).digest

    first = digest(make("first"))
    same = digest(change(make("other name"), lora_dropout=0.5, task_type="CAUSAL_LM", base_model_name_or_path="x"))
    unmatched = digest(change(make("part of a name"), alpha_pattern={"proj": 3}))  # of q_proj, for example
    assert len(first) == 16 and same == unmatched == first
    others = [
        digest(make("alpha", alpha=17)),
        digest(make("weights", seed=1)),
        digest(make("layers", targets=("q_proj",))),
        digest(make("dtype", dtype=torch.bfloat16)),
        digest(change(make("rslora"), use_rslora=True)),
        digest(change(make("pattern"), alpha_pattern={"layers.0.self_attn.q_proj": 3})),
        digest(make("rank", ranks={"down_proj": 2})),
    ]
    assert len({first, *others}) == 1 + len(others)
    again = make("the same bytes", dtype=torch.bfloat16)
    tensors = load_file(again / WEIGHTS)
    save_file({name: tensor.view(torch.float16) for name, tensor in tensors.items()}, again / WEIGHTS)
    assert digest(again) not in {first, *others}, "the numbers are others"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules that are saved whole"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "here are no weights of experts or routers of that name"),
        ({"target_parameters": "experts"}, "must be a list of names"),
        ({"alora_invocation_tokens": ["a"]}, "must be a list of token ids"),
        ({"init_lora_weights": "pissa"}, "initialised by 'pissa', it is of other base weights"),
        ({"a_later_setting": 3}, "the setting a_later_setting is not supported"),
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', and only LORA is supported"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 4}, "has rank 4 by adapter_config.json, and matrices of"),
        ({"rank_pattern": {"q_proj": 0}}, "cannot be read"),
        ({"alpha_pattern": {"(": 1}}, "cannot be read"),
        ({"alpha_pattern": {"q_proj": "nan"}}, "the scale is nan"),
        ({"lora_alpha": math.inf}, "the scale is inf"),
        ({"lora_alpha": 1e300}, "the scale is 1.25e[+]299"),
    ],
)
def test_settings_that_are_refused(make: Callable[..., Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message) as refused:
        parse_adapter(read_files(change(make("a"), **settings)), 64)
    assert "\n" not in str(refused.value)


def test_settings_without_effect_are_none(make: Callable[..., Path]) -> None:
    parse_adapter(
        read_files(change(make("a"), use_dora=False, modules_to_save=None, a_later_setting={}, rank_pattern=None)), 64
    )


def test_a_version_of_many_digits(make: Callable[..., Path]) -> None:
    """Python converts at most 4,300 of them to an integer."""
    parse_adapter(read_files(change(make("a"), peft_version=f"0.{'9' * 5000}")), 64)


def test_ranks_that_are_too_high(make: Callable[..., Path]) -> None:
    with pytest.raises(AdapterError, match="has rank 16, and --max-lora-rank is 8"):
        parse_adapter(read_files(make("a", ranks={"q_proj": 16})), 8)


def test_files_that_are_incomplete(make: Callable[..., Path], tmp_path: Path) -> None:
    def refuse(path: Path, message: str) -> None:
        with pytest.raises(AdapterError, match=message) as refused:
            parse_adapter(read_files(path), 64)
        assert "\n" not in str(refused.value)

    refuse(tmp_path, "adapter_config.json cannot be read")
    path = make("a")
    file = path / WEIGHTS
    data = file.read_bytes()
    tensors = load(data)  # no views of the file, which is written anew
    file.write_bytes(data[: len(data) // 2])
    refuse(path, "adapter_model.safetensors cannot be read")
    file.unlink()
    refuse(path, "adapter_model.safetensors cannot be read")
    key = f"base_model.model.{Q}.lora_B.weight"
    for wrong, message in (
        ({name: one for name, one in tensors.items() if name != key}, "only one of the two matrices of model.layers.0"),
        ({**tensors, key: tensors[key] * math.inf}, "numbers that are not finite"),
        ({**tensors, key: tensors[key].int()}, "is in torch.int32"),
        ({**tensors, key: tensors[key][:, :4].contiguous()}, "has rank 8 by"),
        ({**tensors, "base_model.model.lm_head.weight": tensors[key].clone()}, "lm_head.weight is no matrix of LoRA"),
        ({**tensors, f"base_model.model.{Q}.lora_B.default.weight": tensors[key] + 1}, "under another name as well"),
        ({}, "has no matrices"),
    ):
        save_file(wrong, file)
        refuse(path, message)
    (path / CONFIG).write_text("[1]")
    refuse(path, "only LORA is supported")


def test_adapters_of_the_hub(make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no folder, and may be an id, is looked up there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--owner--sql"
    snapshot = Path(shutil.copytree(made := make("a"), cached / "snapshots" / "0123"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    assert local_folder("owner/sql") == snapshot
    assert [local_folder(name) for name in (str(made), "sql", "./a/b")] == [made, Path("sql"), Path("a/b")]
    with pytest.raises(AdapterError, match="owner/other is no folder, and the hub download failed: ") as refused:
        local_folder("owner/other")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_written_anew_while_its_numbers_are_in_use(make: Callable[..., Path]) -> None:
    path = make("a")
    layer = parse_adapter(read_files(path), 64).layers[Q]
    before = layer.a_RK.clone()
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(layer.a_RK, before)
