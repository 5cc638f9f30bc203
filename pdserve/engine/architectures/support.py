"""The check that the engine supports a model's architecture: each layer must write its KV through the attention interface."""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.paged_model import UnsupportedAttention
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.errors import SetupError
from pdserve.kernels.batch import Kernel
from pdserve.keys import token_array
from pdserve.request import SamplingParams

if TYPE_CHECKING:
    from pdserve.engine.model_runner import ModelRunner


@torch.inference_mode()
def attention_window(runner: "ModelRunner") -> int | None:
    """Run two tokens through the model, and check that every layer writes KV for them.

    Returns:
        The longest attention window in tokens, the token itself included; None if some layer attends to all tokens.

    Raises:
        SetupError: a layer keeps state outside of the KV, or needs attention that the kernels do not support.
    """
    size = runner.block_size
    blocks = block_table(range(-(-2 // size)))
    probe = Sequence.new("probe", token_array([0, 0]), 2, 2, SamplingParams(temperature=0), b"", size, block_ids=blocks)
    unsupported = f"architecture {type(runner.checkpoint.model).__name__} is not supported"
    windows: list[int | None] = []  # of each layer

    def attend(*args: Any) -> torch.Tensor:
        windows.append(args[4])
        return runner.kernel.attend(*args)

    spy = cast(Kernel, SimpleNamespace(write_kv=runner.kernel.write_kv, attend=attend))
    with runner.scratch_pool(len(blocks)) as pool_NL2GBD:
        pool_NL2GBD.fill_(float("nan"))
        inputs = runner.inputs(StepPlan({probe: 2}), [1])
        try:
            runner.forward(replace(inputs, batch=replace(inputs.batch, kernel=spy)))
        except (UnsupportedAttention, TypeError) as error:
            if isinstance(error, TypeError) and "paged" not in str(error):
                raise  # a defect, not a model that rejects the `paged` argument
            raise SetupError(f"{unsupported}: {error}") from error
        if pool_NL2GBD[..., :2, :].isnan().any():
            raise SetupError(f"{unsupported}: not all of its layers use the attention interface")
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None
