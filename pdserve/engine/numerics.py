"""Numerics class of an engine: the name of all that decides how 16-bit results are rounded.

Within a class, equal tokens give equal bits of KV, whichever instance computes them, and in whatever batch and phase. The
class is part of the KV's layout, so the KV of another class is never found under the same key.
"""

from importlib.metadata import version

import torch

from pdserve.kernels import cpu, linear
from pdserve.kernels.batch import Kernel


def numerics_class(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, batch_invariant: bool, ranks: int = 1
) -> str:
    """Return the class, such as `cpu-avx512-onednn-torch2.13.0-transformers5.23.0`.

    "" for float32, in which rounding decides no token. The number of ranks is part of the class, because their partial sums
    are rounded one by one.
    """
    if dtype == torch.float32:
        return ""
    versions = (f"{package}{version(package).split('+')[0]}" for package in ("torch", "transformers"))
    degree = (f"{ranks}ranks",) if ranks > 1 else ()
    return "-".join((*_hardware(kernel, device, batch_invariant), *degree, *versions))


def _hardware(kernel: Kernel, device: torch.device, batch_invariant: bool) -> tuple[str, ...]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", f"sm{major}{minor}", kernel.NAME
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    if kernel is not cpu:
        return "cpu", instructions, kernel.NAME
    products = "amx" if linear.is_available() else "onednn"
    return "cpu", instructions, products if batch_invariant else f"{products}-variant"
