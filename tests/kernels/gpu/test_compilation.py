"""Triton kernels compile for GPUs that this machine need not have, and both phases of attention to the same instructions."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

MMA = r"(?:wgmma\.mma_async|mma)\.sync\.[\w.]+"
POINTERS = {
    **dict.fromkeys(("out", "q", "cache", "y", "x", "weight", "bias"), "*bf16"),
    **dict.fromkeys(("part_o", "part_m", "part_l"), "*fp32"),
    **dict.fromkeys(("tables", "starts", "kv_lens"), "*i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pdserve.kernels.gpu import launch

    if launch.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, processor: int, constants: Mapping[str, object], **options: object) -> str:
    """Return the PTX of a kernel, whose other arguments are those of POINTERS, or integers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    # Like strides and sizes of models: multiples of 16, from which follow the widths of loads and pipelines.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    source = ASTSource(kernel, signature, constants, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options)
    assert result.asm["cubin"]
    return str(result.asm["ptx"])


@pytest.mark.parametrize(("processor", "size"), [(80, 64), (90, 128)])
def test_phases_of_invariant_attention_have_the_same_arithmetic(processor: int, size: int) -> None:
    from pdserve.kernels.gpu import triton_kernels

    def attend(*, decode: bool, split: bool, invariant: bool = True) -> str:
        options = triton_kernels._tuning(decode, invariant, 4, 2 * size)
        constants = {name: options.pop(name) for name in ("ROWS", "TOKENS")} | {"DECODE": decode, "SPLIT": split}
        constants |= {"CAPPED": False, "WINDOWED": True, "WIDEN": False, "SEQS": 8, "R": 4, "B": 16, "D": size}
        return compiled(triton_kernels._attend, processor, {**constants, "D_PAD": size}, **options)

    prefill, decode = attend(decode=False, split=False), attend(decode=True, split=False)
    partial, merged = attend(decode=True, split=True), attend(decode=False, split=True)
    assert re.findall(MMA, prefill)
    assert re.findall(MMA, prefill) == re.findall(MMA, decode) == re.findall(MMA, partial) == re.findall(MMA, merged)
    constants = {"WINDOWED": True, "SEQS": 8, "D": size, "D_PAD": size}
    combined = compiled(triton_kernels._combine, processor, constants, num_warps=1, enable_fp_fusion=False)
    assert not any("fma." in ptx for ptx in (prefill, decode, partial, merged, combined))
    if processor == 90:  # why one shape of tile is needed
        fast = [attend(decode=decode, split=False, invariant=False) for decode in (False, True)]
        assert set(re.findall(MMA, fast[0])).isdisjoint(re.findall(MMA, fast[1]))


@pytest.mark.parametrize("processor", [80, 90])
def test_linear_layers_and_sums(processor: int) -> None:
    from pdserve.kernels.gpu import matmul, row_sum

    constants = {"HAS_BIAS": True, "WIDEN": False, "TILE_ROWS": matmul.TILE_ROWS, "TILE_K": matmul.TILE_K, "GROUP": 8}
    for tile_n in (matmul.MIN_TILE_N, matmul.MAX_TILE_N):
        ptx = compiled(matmul._linear, processor, {**constants, "TILE_N": tile_n}, num_warps=4, num_stages=3)
        assert re.findall(MMA, ptx)
    compiled(row_sum._row_sum, processor, {"TILE": row_sum.TILE}, num_warps=4)


@pytest.mark.parametrize("processor", [80, 90])
def test_fused_operations(processor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.kernels.gpu import elementwise, flash

    elements = ("total", "residual", "gate", "up", "k", "v", "cos", "sin", "q_weight", "k_weight")
    for names, kind in ((elements, "*bf16"), (("slots", "kv_starts"), "*i32"), (("eps",), "fp32")):
        for name in names:
            monkeypatch.setitem(POINTERS, name, kind)
    for add in (False, True):
        compiled(elementwise._rms_norm, processor, {"ADD": add, "TILE": 4096}, num_warps=16)
    for gelu in (False, True):
        compiled(elementwise._gate, processor, {"GELU": gelu, "TILE": elementwise.GATE_TILE}, num_warps=4)
    for size, rotated, norm in ((128, 128, True), (64, 64, False), (80, 20, True)):
        padded = {"D": size, "D_PAD": triton.next_power_of_2(size), "R": rotated, "HEADS": elementwise.HEADS}
        constants = {"NORM": norm, "B": 16, **padded, "R_HALF_PAD": triton.next_power_of_2(rotated // 2)}
        compiled(elementwise._rotate_and_write, processor, constants, num_warps=2)
    compiled(flash._gather_kv, processor, {"G": 8, "B": 16, "B_PAD": 16, "D": 128, "D_PAD": 128}, num_warps=4)
