"""Loaders of the kernels for GPUs, found by entry point: `triton`, and `flash`."""

import logging

import torch

from pdserve.kernels.attention import KernelUnavailable
from pdserve.kernels.batch import Kernel, KVFormat

log = logging.getLogger(__name__)


def triton_kernel(device: torch.device, batch_invariant: bool) -> Kernel:
    """Return the Triton kernel. Raises `KernelUnavailable` without triton, and on CPUs outside of its interpreter."""
    try:
        from pdserve.kernels.gpu import launch, triton_kernels
    except ImportError as error:
        raise KernelUnavailable(f"the triton kernel needs triton: {error}") from error
    if device.type == "cpu" and not launch.INTERPRETED:
        raise KernelUnavailable("on the CPU the triton kernel runs only with TRITON_INTERPRET=1")
    return triton_kernels.INVARIANT if batch_invariant else triton_kernels


def flash_kernel(device: torch.device, batch_invariant: bool, kv: KVFormat | None, *, required: bool) -> Kernel:
    """Return flash-attn where it can be used, and the Triton kernel for the rest.

    Args:
        kv: what it will attend over.
        required: whether it is an error if flash-attn can compute neither phase.

    Raises:
        KernelUnavailable: as above, or rows must have the same bits in any batch.
    """
    triton = triton_kernel(device, batch_invariant)
    if batch_invariant or kv is None:
        raise KernelUnavailable(
            "the flash kernel rounds a row differently in another batch: not with --batch-invariant on"
        )
    from pdserve.kernels.gpu import flash

    chosen = flash.choose(flash.installed(), flash.capability(device), kv)
    log.info("attention on %s: prefill by %s, decode by %s", device, chosen.prefill, chosen.decode)
    for reason in chosen.reasons:
        (log.warning if required else log.debug)("attention: %s", reason)
    if chosen.prefill == chosen.decode == triton.NAME:
        if required:
            raise KernelUnavailable(f"the flash kernel can compute neither phase: {'; '.join(chosen.reasons)}")
        return triton
    return flash.FlashKernel(chosen)
