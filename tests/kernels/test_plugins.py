"""A kernel from another package: found by its entry point, asked for its capabilities, and used."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve import plugins
from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.kernels.attention import KernelUnavailable, explain_kernels, select_kernel
from pdserve.request import Request, SamplingParams


@pytest.fixture
def loud(
    tmp_path: Path, install_connectors: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, int]]:
    """Install the package, and return how often its functions were called."""
    module = Path(__file__).parent / "loud_kernel.py"
    names = {"loud": "load", "broken": "missing"}
    install_connectors(tmp_path, "loud_package", module, names, group="pdserve.kernels")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.names.cache_clear()
    yield importlib.import_module("loud_package").calls
    del sys.modules["loud_package"]
    plugins.names.cache_clear()


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_it_serves_a_model(
    architecture: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., Any],
    prompts: list[list[int]],
    loud: dict[str, int],
) -> None:
    path = checkpoint(architecture, dtype="float32")
    engine = Engine(EngineConfig(model=str(path), kernel="loud", num_blocks=200))
    seqs = [
        engine.new_sequence(
            str(i), Request(prompt=prompt, sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        )
        for i, prompt in enumerate(prompts[:6])
    ]
    for seq in seqs:
        engine.add(seq)
    before = loud["attend"]
    while any(seq.output.finish_reason() is None for seq in seqs):
        engine.step()
    assert loud["attend"] > before
    assert [seq.output.tokens[seq.output.num_prompt :].tolist() for seq in seqs] == generate(path, prompts[:6], 8)
    assert engine.runner.kernel.NAME == "loud" and engine.runner.graphs is None


def test_names(loud: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"--kernel must be auto, reference, cpu, triton or flash, or of a package, not no"
    ):
        EngineConfig(kernel="no")
    EngineConfig(kernel="loud")
    with pytest.raises(KernelUnavailable, match=r"the kernel broken of pdserve.kernels cannot be imported: .*missing"):
        select_kernel("broken", torch.device("cpu"))
    with pytest.raises(KernelUnavailable, match="the loud kernel runs on CPUs"):
        select_kernel("loud", torch.device("cuda"))
    assert explain_kernels(torch.device("cuda"))["loud"] == "the loud kernel runs on CPUs"
