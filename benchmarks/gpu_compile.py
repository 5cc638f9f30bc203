"""Registers, spills and shared memory of the attention kernel's variants, compiled ahead of time: no GPU is needed.

    .venv/bin/python benchmarks/gpu_compile.py --json benchmarks/results/DATE-gpu-compile.json

A row is the most that any variant of a phase takes, by compute capability, dtype and head size; `too much` counts variants
that do not fit, or spill more than tests/kernels/gpu/test_compilation.py allows, where the variants are listed.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

Case = tuple[int, str, int]
TESTS = Path(__file__).parents[1] / "tests" / "kernels" / "gpu" / "test_compilation.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument(
        "--processors", type=int, nargs="+", help="compute capabilities, such as 90; default: all tested"
    )
    options = parser.parse_args()
    module = tests()
    processors = options.processors or list(module.SHARED_KIB)
    cases = list(itertools.product(processors, module.DTYPES, module.SIZES))
    rows = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        for of_case in pool.map(compile_variants, cases):
            for row in of_case:
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        described = {"triton": module.triton.__version__, "machine": platform.machine(), "rows": rows}
        options.json.write_text(json.dumps(described, indent=1) + "\n")


@cache
def tests() -> ModuleType:
    """Return the module of the tests, which is in no package."""
    spec = importlib.util.spec_from_file_location("test_compilation", TESTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_variants(case: Case) -> list[dict[str, Any]]:
    """Return a row for each phase of a case."""
    (processor, dtype, size), module = case, tests()
    phases: dict[str, list[Any]] = {}
    for variant in module.variants(dtype):
        phase = "invariant" if variant.get("invariant") else "decode" if variant["decode"] else "prefill"
        phases.setdefault(phase, []).append(module.attend(processor, size, dtype=dtype, **variant))
    return [
        {
            "capability": processor,
            "dtype": dtype,
            "head_size": size,
            "phase": phase,
            "variants": len(kernels),
            "registers": max(kernel.registers for kernel in kernels),
            "stack_bytes": max(kernel.stack_bytes for kernel in kernels),
            "shared_bytes": max(kernel.shared_bytes for kernel in kernels),
            "too much": sum(not _passes(kernel, processor) for kernel in kernels),
        }
        for phase, kernels in phases.items()
    ]


def _passes(kernel: Any, processor: int) -> bool:
    try:
        kernel.check(processor)
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    main()
