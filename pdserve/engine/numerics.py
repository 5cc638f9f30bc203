"""Numerics class of an engine: the name of all that decides how 16-bit results are rounded.

Within a class, equal tokens give equal bits of KV, whichever instance computes them, and in whatever batch and phase. The
class is part of the KV's layout, so the KV of another class is never found under the same key.
"""

from importlib.metadata import version

import torch

from pdserve.kernels import cpu, linear
from pdserve.kernels.batch import Kernel


def numerics_class(kernel: Kernel, device: torch.device, dtype: torch.dtype, batch_invariant: bool) -> str:
    """Return the class, such as `cpu-avx512-onednn-torch2.13.0-transformers5.23.0`.

    "" for float32, in which rounding decides no token.
    """
    if dtype == torch.float32:
        return ""
    versions = (f"{package}{version(package).split('+')[0]}" for package in ("torch", "transformers"))
    return "-".join((*_hardware(kernel, device, batch_invariant), *versions))


def _hardware(kernel: Kernel, device: torch.device, batch_invariant: bool) -> tuple[str, ...]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", f"sm{major}{minor}", kernel.NAME
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    if kernel is not cpu:
        return "cpu", instructions, kernel.NAME
    products = "amx" if linear.is_available() else "onednn"
    return "cpu", instructions, products if batch_invariant else f"{products}-variant"
