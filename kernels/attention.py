"""Selection of the attention kernel at start-up. It is part of each batch; there is no global state."""

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

import torch

from pdserve.kernels import cpu, native, reference
from pdserve.kernels.batch import Capabilities, Kernel, KVFormat

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pdserve.kernels"
# Whether a row has the same bits in any batch and phase, unless the flag --batch-invariant says so. By kind of device:
# the CPU kernel has no other way, and on GPUs it costs time.
BATCH_INVARIANT = {"cpu": True, "cuda": False}


class KernelUnavailable(Exception):
    """The requested kernel cannot run on this machine; the message gives the reason."""


def is_batch_invariant(setting: str, device: torch.device) -> bool:
    """Return what the flag `--batch-invariant` means on a device."""
    return BATCH_INVARIANT[device.type] if setting == "auto" else setting == "on"


def select_kernel(name: str, device: torch.device, batch_invariant: str = "auto", kv: KVFormat | None = None) -> Kernel:
    """Return the kernel of a name: reference, cpu, triton, flash, one of a package, or auto, the fastest on `device`.

    With auto, a fallback to the reference kernel is logged with its reason. On GPUs, auto takes flash-attn for the
    phases that it can compute, unless rows must have the same bits in any batch.

    Args:
        kv: what the kernel will attend over, without which flash is not chosen.

    Raises:
        KernelUnavailable: a kernel requested by name cannot run here, or none that is batch-invariant if that is "on".
    """
    if name == "reference":
        if batch_invariant == "on":
            raise KernelUnavailable(
                "--batch-invariant on: not with the reference kernel, whose rounding depends on the batch"
            )
        return reference
    invariant = is_batch_invariant(batch_invariant, device)
    try:
        if name == "flash" or (name == "auto" and device.type == "cuda" and kv is not None and not invariant):
            flash = _loader("flash")(device, invariant, kv, required=name == "flash")
            return cast(Kernel, flash)
        return _load(name if name != "auto" else default_kernel(device), device, invariant)
    except KernelUnavailable as error:
        if name != "auto" or batch_invariant == "on":
            raise
        log.warning("attention falls back to the slower reference kernel: %s", error)
        return reference


def fused_layers(name: str, device: torch.device) -> str:
    """Return which fused layers suit a kernel: `cpu`, `gpu`, `packed` (only the weights, on CPUs), or `none`."""
    if name == "reference":
        return "packed" if device.type == "cpu" else "none"
    return "gpu" if device.type == "cuda" or name == "triton" else "cpu"  # in Triton's interpreter as on a GPU


def _load(name: str, device: torch.device, batch_invariant: bool) -> Kernel:
    return cast(Kernel, _loader(name)(device, batch_invariant))


def _loader(name: str) -> Callable[..., object]:
    """Return what loads a kernel: the CPU's, or that of an entry of the group `pdserve.kernels`, as those for GPUs are."""
    if name in _LOADERS:
        return _LOADERS[name]
    try:
        [load, *_] = [entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)]
    except (ImportError, AttributeError, ValueError) as error:
        raise KernelUnavailable(f"the kernel {name} of {ENTRY_POINT_GROUP} cannot be imported: {error}") from error
    return cast("Callable[..., object]", load)


def default_kernel(device: torch.device) -> str:
    """Return the kernel that `auto` tries first on a device."""
    return "cpu" if device.type == "cpu" else "triton"


def explain_kernels(device: torch.device) -> dict[str, str]:
    """Return for each kernel why it cannot run on a device; empty for one that can."""
    reasons = {}
    for name in (*_LOADERS, *sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - {"flash"})):
        try:
            _load(name, device, is_batch_invariant("auto", device))
            reasons[name] = ""
        except KernelUnavailable as error:
            reasons[name] = str(error)
    return {**reasons, "reference": ""}


def capabilities(name: str, device: torch.device) -> Capabilities:
    """Return what a kernel can do that runs on a device."""
    return reference.CAPABILITIES if name == "reference" else _load(name, device, False).CAPABILITIES


def _cpu_kernel(device: torch.device, batch_invariant: bool) -> Kernel:
    if device.type != "cpu":
        raise KernelUnavailable(f"the cpu kernel needs its pool on the CPU, not on {device}")
    try:
        native.library()
    except native.BuildError as error:
        raise KernelUnavailable(f"the cpu kernel could not be built: {error}") from error
    return cpu


_LOADERS = {"cpu": _cpu_kernel}
