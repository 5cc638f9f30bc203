"""A kernel of another package: the reference kernel, which counts its calls and refuses GPUs."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from pdserve.kernels import reference
from pdserve.kernels.attention import KernelUnavailable
from pdserve.kernels.batch import Capabilities

calls = Counter[str]()


def load(device: torch.device, batch_invariant: bool) -> Any:
    if device.type != "cpu":
        raise KernelUnavailable("the loud kernel runs on CPUs")

    def attend(*args: Any) -> torch.Tensor:
        calls["attend"] += 1
        return reference.attend(*args)

    functions = {
        name: getattr(reference, name) for name in ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks")
    }
    return SimpleNamespace(NAME="loud", CAPABILITIES=Capabilities(latent=True), attend=attend, **functions)
