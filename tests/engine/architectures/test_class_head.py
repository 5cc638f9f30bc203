"""Classifiers in float32: probabilities of transformers' sequence classifiers, and of the answers yes and no."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.features import Embedding, find
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.request import Request, SamplingParams

PROMPTS = [[i * 7 % 90 + length for i in range(length)] for length in (1, 5, 16, 40, 70)]


@pytest.fixture
def classifier(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """classifier("llama", 1) → directory and model of a random sequence classifier with one class."""

    def make(architecture: str, num_labels: int) -> tuple[Path, Any]:
        base = checkpoint(architecture)
        config = transformers.AutoConfig.from_pretrained(base, num_labels=num_labels)
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
        path = tmp_path / architecture
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base / name, path)
        return path, model

    return make


def vector(seq: Sequence) -> bytes:
    found = find(Embedding, seq)
    assert found is not None
    return found.vector


def probabilities(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    seqs = [
        engine.new_sequence(str(i), Request(prompt=one, sampling=SamplingParams(max_tokens=1, embed=True)))
        for i, one in enumerate(prompts)
    ]
    for seq in seqs:
        engine.add(seq)
    waiting: list[Sequence] = [*seqs]
    while waiting:
        engine.step()
        for seq in [seq for seq in waiting if vector(seq)]:
            waiting.remove(seq)
            engine.remove(seq)
    assert engine.pool.num_held == 0
    return [torch.frombuffer(bytearray(vector(seq)), dtype=torch.float32) for seq in seqs]


@pytest.mark.parametrize(("architecture", "num_labels"), [("llama", 1), ("qwen3", 1), ("qwen3", 3), ("gemma2", 1)])
def test_equals_transformers(architecture: str, num_labels: int, classifier: Callable[..., tuple[Path, Any]]) -> None:
    path, model = classifier(architecture, num_labels)
    engine = Engine(EngineConfig(model=str(path), dtype="float32", num_blocks=64, max_num_batched_tokens=32))
    for _ in range(2):  # the second time with prefix hits
        for prompt, found in zip(PROMPTS, probabilities(engine, PROMPTS), strict=True):
            with torch.inference_mode():
                # The last token is pooled: it must not look like padding.
                logits = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits[0]
            expected = logits.sigmoid() if num_labels == 1 else logits.softmax(dim=0)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match="generates nothing"):
        engine.new_sequence("r", Request(prompt=[1], sampling=SamplingParams(max_tokens=1)))
    with pytest.raises(SetupError, match="leave out --pooling mean"):
        Engine(EngineConfig(model=str(path), pooling="mean", num_blocks=8))


def test_yes_and_no(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base, path = checkpoint("qwen3"), tmp_path / "model"
    with pytest.raises(SetupError, match="the tokens yes and no"):
        Engine(EngineConfig(model=str(base), pooling="yes-no", num_blocks=8))
    shutil.copytree(base, path)
    text = (path / "tokenizer.json").read_text().replace("<|user|>", "yes").replace("<|assistant|>", "no")
    (path / "tokenizer.json").write_text(text)
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    engine = Engine(EngineConfig(model=str(path), dtype="float32", pooling="yes-no", num_blocks=64))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for prompt, found in zip(PROMPTS, probabilities(engine, PROMPTS), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        expected = logits[[ids["no"], ids["yes"]]].softmax(dim=0)[1:]
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
