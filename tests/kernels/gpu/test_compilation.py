"""Triton kernels compile for GPUs that this machine need not have, within what these have.

Compute capabilities differ in shared memory: 99 KiB for a block of threads on 8.6, 8.9 and 12.0, 163 on 8.0, 227 on 9.0 and
10.0. A register that is spilled to memory costs more than a smaller tile. Both phases of invariant attention compile to the
same instructions.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

MMA = r"(?:wgmma\.mma_async\.sync|mma\.sync|tcgen05\.mma)[\w.:]+"
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
WHILE_KERNELS_CHANGE = pytest.mark.until_recorded("kernels/gpu")
DTYPES, SIZES = ("bf16", "fp16", "fp32"), (32, 64, 80, 96, 128, 256, 512)
POINTERS = {
    **dict.fromkeys(("out", "q", "k", "v", "cache", "y", "x", "weight", "bias"), "*bf16"),
    **dict.fromkeys(("part_o", "part_m", "part_l", "sinks"), "*fp32"),
    **dict.fromkeys(("tables", "starts", "kv_lens", "slots"), "*i32"),
    **dict.fromkeys(("target", "target_ids", "source", "source_ids"), "*i64"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its PTX, and the registers, stack and shared memory that it takes. Spills go to the stack."""

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    dtype: str

    def check(self, processor: int) -> None:
        """In float32, whose products no tensor core computes exactly, more registers may be given up for more threads."""
        assert self.shared_bytes <= SHARED_KIB[processor] << 10
        # The assembler puts a few registers aside, at most 8 of 255, so that more threads run at a time. Tiles that are too
        # large spill kilobytes. On 12.0, prefill with heads of 128 spills 14 registers.
        spilled = 64 if self.dtype == "fp32" or processor == 120 else 32
        assert self.registers <= 255 and self.stack_bytes <= spilled, self


@pytest.fixture(autouse=True)
def kept_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what was compiled until the kernel's source, its options, or Triton change: these make its name in the cache."""
    from pdserve.kernels.gpu import launch

    if launch.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(__file__).parents[3] / ".cache" / "triton"))


def compiled(
    kernel: Any, processor: int, constants: Mapping[str, object], dtype: str = "bf16", **options: object
) -> Compiled:
    """Compile a kernel whose other arguments are those of POINTERS, or integers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{dtype}" if kind == "*bf16" else kind for name, kind in POINTERS.items()}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    # Like strides and sizes of models: multiples of 16, from which follow the widths of loads and pipelines.
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if parameter.name not in constants and not parameter.do_not_specialize
    }
    source = ASTSource(kernel, signature, constants, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(result.metadata_group[f"{result.metadata.name}.cubin"])
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return Compiled(str(result.asm["ptx"]), int(registers), int(stack), int(result.metadata.shared), dtype)


def attend(
    processor: int,
    size: int,
    *,
    decode: bool,
    split: bool,
    invariant: bool = False,
    dtype: str = "bf16",
    repeats: int = 4,
    capped: bool = False,
    windowed: bool = True,
    sinks: bool = False,
) -> Compiled:
    from pdserve.kernels.gpu import triton_kernels

    itemsize = 4 if dtype == "fp32" else 2
    padded = triton.next_power_of_2(size)
    options = triton_kernels.tuning_of(decode, invariant, repeats, padded, itemsize, SHARED_KIB[processor] << 10)
    constants = {name: options.pop(name) for name in ("ROWS", "TOKENS")} | {"DECODE": decode, "SPLIT": split}
    constants |= {"CAPPED": capped, "WINDOWED": windowed, "SINKS": sinks, "WIDEN": False, "R": repeats, "B": 16}
    constants |= {"SEQS": triton_kernels.SLOT_SEQS, "D": size, "D_PAD": padded}
    return compiled(triton_kernels._attend, processor, constants, dtype, **options)


def variants(dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of `attend` by which its variants differ."""
    for decode in (False, True):
        for capped, windowed in ((False, False), (False, True), (True, True)):
            for split in sorted({False, decode}):
                yield {"decode": decode, "split": split, "capped": capped, "windowed": windowed}
        if dtype != "fp32":  # which is invariant only by accident
            for split in (False, True):
                yield {"decode": decode, "split": split, "invariant": True}
    for repeats in (1, 8, 16, 40):
        yield {"decode": True, "split": True, "repeats": repeats}


@pytest.mark.parametrize(
    ("processor", "size"),
    [(80, 64), *(pytest.param(processor, 128, marks=WHILE_KERNELS_CHANGE) for processor in (90, 100, 120))],
)
def test_phases_of_invariant_attention_have_the_same_arithmetic(processor: int, size: int) -> None:
    from pdserve.kernels.gpu import triton_kernels

    variants = [(False, False), (True, False), (True, True), (False, True)]
    kernels = [attend(processor, size, decode=decode, split=split, invariant=True) for decode, split in variants]
    assert re.findall(MMA, kernels[0].ptx)
    assert all(re.findall(MMA, kernel.ptx) == re.findall(MMA, kernels[0].ptx) for kernel in kernels)
    constants = {"WINDOWED": True, "SINKS": False, "SEQS": triton_kernels.SLOT_SEQS, "D": size, "D_PAD": size}
    kernels.append(compiled(triton_kernels._combine, processor, constants, num_warps=1, enable_fp_fusion=False))
    for kernel in kernels:
        kernel.check(processor)
        assert "fma." not in kernel.ptx
    if processor == 90:  # why one shape of tile is needed
        fast = [attend(processor, size, decode=decode, split=False).ptx for decode in (False, True)]
        assert set(re.findall(MMA, fast[0])).isdisjoint(re.findall(MMA, fast[1]))


@pytest.mark.parametrize(
    ("processor", "instruction"),
    [
        (90, "wgmma.mma_async"),
        *(
            pytest.param(*case, marks=WHILE_KERNELS_CHANGE)
            for case in ((80, "mma.sync"), (86, "mma.sync"), (89, "mma.sync"), (100, "tcgen05.mma"), (120, "mma.sync"))
        ),
    ],
)
def test_prefill_uses_the_tensor_cores_of_its_gpu(processor: int, instruction: str) -> None:
    kernel = attend(processor, 128, decode=False, split=False, windowed=False)
    assert {found.startswith(instruction) for found in re.findall(MMA, kernel.ptx)} == {True}
    kernel.check(processor)


@pytest.mark.parametrize(
    ("dtype", "size", "decode", "invariant"),
    [
        ("bf16", 128, True, False),
        *(
            pytest.param(*case, marks=WHILE_KERNELS_CHANGE)
            for case in (
                ("bf16", 128, False, False),
                ("bf16", 128, False, True),
                ("fp16", 256, False, False),
                ("fp32", 128, False, False),
            )
        ),
    ],
)
def test_a_tile_fits_the_gpus_with_the_least_shared_memory(
    dtype: str, size: int, decode: bool, invariant: bool
) -> None:
    """The variants that were too large for 8.6, or spilled; all others are in the slow test below."""
    kernel = attend(
        86, size, decode=decode, split=decode or invariant, invariant=invariant, dtype=dtype, capped=not invariant
    )
    kernel.check(86)


@pytest.mark.slow
@pytest.mark.parametrize("processor", SHARED_KIB)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_variant_fits_every_gpu(processor: int, dtype: str, size: int) -> None:
    for variant in variants(dtype):
        attend(processor, size, dtype=dtype, **variant).check(processor)


@pytest.mark.parametrize("processor", [80, pytest.param(90, marks=WHILE_KERNELS_CHANGE)])
def test_linear_layers_and_sums(processor: int) -> None:
    from pdserve.kernels.gpu import matmul, row_sum

    constants = {"HAS_BIAS": True, "WIDEN": False, "TILE_ROWS": matmul.TILE_ROWS, "TILE_K": matmul.TILE_K, "GROUP": 8}
    for tile_n in (matmul.MIN_TILE_N, matmul.MAX_TILE_N):
        kernel = compiled(matmul._linear, processor, {**constants, "TILE_N": tile_n}, num_warps=4, num_stages=3)
        assert re.findall(MMA, kernel.ptx)
        assert kernel.shared_bytes <= SHARED_KIB[86] << 10
    compiled(row_sum._row_sum, processor, {"TILE": row_sum.TILE}, num_warps=4).check(processor)


def test_copies() -> None:
    from pdserve.kernels.gpu import block_copies, triton_kernels

    size = {"B": 16, "D": 128, "D_PAD": 128}
    compiled(triton_kernels._write_kv, 86, size, num_warps=1).check(86)
    for ids in ("HAS_TARGET_IDS", "HAS_SOURCE_IDS"):  # scatter and gather
        one = {"HAS_TARGET_IDS": False, "HAS_SOURCE_IDS": False, ids: True, "WORDS": block_copies.COPY_WORDS}
        compiled(block_copies._copy, 86, one, num_warps=8).check(86)


def test_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.kernels.gpu import gumbel

    kinds = {"sums": "*fp32", "ids": "*i64", "logits": "*bf16", "argmax": "*i64", "rows": "*i64", "counters": "*i64"}
    for name, kind in (kinds | {"temperatures": "*fp32"}).items():
        monkeypatch.setitem(POINTERS, name, kind)
    compiled(gumbel._largest_sums, 90, {"TILE": gumbel.TILE, "PART": gumbel.PART}, num_warps=4).check(90)


@pytest.mark.parametrize("processor", [90, pytest.param(80, marks=WHILE_KERNELS_CHANGE)])
def test_fused_operations(processor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.kernels.gpu import elementwise, flash

    elements = ("total", "residual", "gate", "up", "k", "v", "cos", "sin", "q_weight", "k_weight")
    for names, kind in ((elements, "*bf16"), (("slots", "kv_starts"), "*i32"), (("eps",), "fp32")):
        for name in names:
            monkeypatch.setitem(POINTERS, name, kind)
    for add in (False, True):
        compiled(elementwise._rms_norm, processor, {"ADD": add, "TILE": 4096}, num_warps=16).check(processor)
    for gelu in (False, True):
        compiled(elementwise._gate, processor, {"GELU": gelu, "TILE": elementwise.GATE_TILE}, num_warps=4).check(
            processor
        )
    for size, rotated, norm in ((128, 128, True), (64, 64, False), (80, 20, True)):
        padded = {"D": size, "D_PAD": triton.next_power_of_2(size), "R": rotated, "HEADS": elementwise.HEADS}
        constants = {"NORM": norm, "B": 16, **padded, "R_HALF_PAD": triton.next_power_of_2(rotated // 2)}
        kernel = compiled(elementwise._rotate_and_write, processor, constants, num_warps=2, enable_fp_fusion=False)
        kernel.check(processor)
        # Products are rounded before they are added, as the model's are. Older GPUs multiply by this instruction.
        assert processor < 90 or "fma.rn.bf16" not in kernel.ptx
    compiled(flash._gather_kv, processor, {"G": 8, "B": 16, "B_PAD": 16, "D": 128, "D_PAD": 128}, num_warps=4).check(
        processor
    )
