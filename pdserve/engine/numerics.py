"""Numerics class of an engine: the name of all that decides how 16-bit results are rounded.

Within a class, equal tokens give equal bits of KV, whichever instance computes them, and in whatever batch and phase. The
class is part of the KV's layout, so the KV of another class is never found under the same key.
"""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from pdserve.kernels import native
from pdserve.kernels.batch import Kernel


def numerics_class(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, batch_invariant: bool, ranks: int = 1
) -> str:
    """Return the class, such as `cpu-avx512-amx-kernels1f0c9a3e-torch2.13.0-transformers5.23.0`.

    "" for float32, in which rounding decides no token. The number of ranks is part of the class, because their partial sums
    are rounded one by one, and so is a digest of our own kernels' sources.

    Args:
        batch_invariant: rows have the same bits in any batch; if not, the class is called a variant.
    """
    if dtype == torch.float32:
        return ""
    versions = (f"{package}{version(package).split('+')[0]}" for package in ("torch", "transformers"))
    degree = (f"{ranks}ranks",) if ranks > 1 else ()
    kernels = f"kernels{_digest(device.type)}"
    return "-".join((*_hardware(kernel, device, batch_invariant), kernels, *degree, *versions))


@cache
def _digest(device_type: str) -> str:
    """Return a digest of the sources of our kernels for a device, of what takes the place of torch's functions on CPUs, and
    of the compiler's flags."""
    gpu = sorted((Path(native.__file__).parent / "gpu").glob("*.py"))
    functions = Path(__file__).parent / "cpu_fusion" / "row_products.py"
    files, flags = ([*native.SOURCES, *native.HEADERS, functions], native.FLAGS) if device_type == "cpu" else (gpu, [])
    digest = hashlib.blake2b(digest_size=4)
    for part in (*(path.read_text() for path in files), *flags):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _hardware(kernel: Kernel, device: torch.device, batch_invariant: bool) -> tuple[str, ...]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", f"sm{major}{minor}", kernel.NAME
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    if kernel.CAPABILITIES.instructions is None:
        return "cpu", instructions, kernel.NAME
    products = kernel.CAPABILITIES.instructions()
    return "cpu", instructions, products if batch_invariant else f"{products}-variant"
