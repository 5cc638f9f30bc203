"""CPU kernels that were compiled beforehand, for several instruction sets: for images without a compiler.

    python -m pdserve.kernels.prebuilt FOLDER

compiles them into FOLDER. A process with PDSERVE_KERNELS=FOLDER takes the first one that its processor can run.
"""

import platform
import sys
from pathlib import Path

VARIABLE = "PDSERVE_KERNELS"
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Name → flags of the compiler, and what /proc/cpuinfo must list; the fastest first.
TARGETS = {
    "amx": (
        ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
        _V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    "avx512bf16": (["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"], _V4 | {"avx512_bf16", "avx512_vnni"}),
    "avx512": (["-march=x86-64-v4"], _V4),
    "avx2": (["-march=x86-64-v3"], _V3),
}


def find(folder: Path, sources: str, features: set[str]) -> Path | None:
    """Return the first library of the folder that a processor with these features can run, or None.

    Args:
        sources: hash of the sources of which it must have been made.
    """
    for name, (_, needed) in TARGETS.items():
        file = folder / f"{name}-{sources}.so"
        if needed <= features and file.exists():
            return file
    return None


def main() -> None:
    from pdserve.kernels import native  # which itself looks for libraries with `find`

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if platform.machine() != "x86_64":
        print(f"nothing to compile beforehand for {platform.machine()}: a compiler is needed where the kernels run")
        return
    for name, (flags, _) in TARGETS.items():
        native.compile_library(folder / f"{name}-{native.sources_hash()}.so", ["-O3", *flags, *native.COMMON_FLAGS])
        print(f"compiled for {name}")


if __name__ == "__main__":
    main()
