"""The one entry point of paged attention: writes new K and V into the pool and attends over cached plus new tokens.

The batch says which kernel does it (`choose` picks one at start-up); nothing here is global.
"""

import logging
from dataclasses import dataclass

import torch

from pdserve.kernels import cpu, reference
from pdserve.kernels.batch import Kernel, PagedBatch

log = logging.getLogger(__name__)


class KernelUnavailable(Exception):
    """The kernel that was asked for cannot run here; the text says why."""


@dataclass(frozen=True)
class AttentionOptions:
    """Per-layer settings.

    Attributes:
        scale: multiplies q·k.
        window: a token sees itself and the window - 1 tokens before it; None sees all.
        softcap: scores become softcap · tanh(score / softcap); None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


def paged_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' KV, [T, H, D] in the dtype of the query."""
    cache_N2GBD = batch.layer(layer)
    batch.kernel.write_kv(cache_N2GBD, k_TGD, v_TGD, batch.slots_T)
    return batch.kernel.attend(q_THD, cache_N2GBD, batch, options.scale, options.window, options.softcap)


def choose(name: str, device: torch.device) -> Kernel:
    """The kernel of that name: reference, cpu, triton, or auto, the fastest that runs here (a warning says why not).

    Raises:
        KernelUnavailable: a kernel asked for by name cannot run here.
    """
    if name == "reference":
        return reference
    wanted = name if name != "auto" else "cpu" if device.type == "cpu" else "triton"
    try:
        return _cpu(device) if wanted == "cpu" else _triton(device)
    except KernelUnavailable as error:
        if name != "auto":
            raise
        log.warning("attention runs on the slower reference kernel: %s", error)
        return reference


def _cpu(device: torch.device) -> Kernel:
    if device.type != "cpu":
        raise KernelUnavailable(f"the cpu kernel needs its pool on the CPU, not on {device}")
    try:
        cpu.library()
    except cpu.CannotBuild as error:
        raise KernelUnavailable(f"the cpu kernel could not be built: {error}") from error
    return cpu


def _triton(device: torch.device) -> Kernel:
    try:
        from pdserve.kernels.gpu import triton_kernels
    except ImportError as error:
        raise KernelUnavailable(f"the triton kernel needs triton: {error}") from error
    if device.type == "cpu" and not triton_kernels.INTERPRETED:
        raise KernelUnavailable("on the CPU the triton kernel runs only with TRITON_INTERPRET=1")
    return triton_kernels
