"""Recurrent layers: what their kernels are given. What they compute is compared in other tests, over all architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.kernels import states
from pdserve.request import Request, SamplingParams


@pytest.mark.parametrize("architecture", ["lfm2", "jamba"])
def test_weights_of_convolutions_are_not_converted_in_each_step(
    architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, convolve = list[torch.dtype](), states.convolve

    def record(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        given.extend(one.dtype for one in (weight_CK, bias_C) if one is not None)
        return convolve(x_TC, weight_CK, bias_C, *rest)

    monkeypatch.setattr(states, "convolve", record)
    path = str(checkpoint(architecture, dtype="bfloat16"))
    engine = Engine(EngineConfig(model=path, dtype="bfloat16", device="cpu", num_blocks=16))
    engine.add(engine.new_sequence("", Request(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=1))))
    engine.step()
    assert set(given) == {torch.float32}
