"""What only a GPU can show: order of streams, pinned memory, shares of memory, nothing compiled after the warm-up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.kernels import reference
from pdserve.kernels.gpu import memory
from pdserve.kernels.gpu.copies import PoolCopies

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
LONG = 200_000_000  # cycles that the model's stream is busy for: a tenth of a second


@pytest.fixture(params=["reference", "triton"])
def copies(request: pytest.FixtureRequest) -> tuple[torch.Tensor, PoolCopies]:
    """A pool of 64 blocks of 1 MiB, and what copies from and to it."""
    pool = torch.zeros(64, 4, 2, 8, 16, 256, dtype=torch.float32, device=DEVICE)
    if request.param == "reference":
        return pool, PoolCopies(pool, reference)
    pytest.importorskip("triton")
    from pdserve.kernels.gpu import triton_kernels

    return pool, PoolCopies(pool, triton_kernels)


def test_copies_wait_for_steps_before_them(copies: tuple[torch.Tensor, PoolCopies]) -> None:
    """A late write of the model is in what is stored, and does not overwrite what is loaded."""
    pool, maker = copies
    out, back, rows = maker.lane(8), maker.lane(8), maker.rows(16)
    for turn in range(1, 20):
        torch.cuda._sleep(LONG)
        pool[8:16].fill_(turn)
        out.read(range(8, 16), rows[:8], out.mark())
        assert (rows[:8].view(torch.float32) == turn).all()
        rows[8:].view(torch.float32).fill_(-turn)
        torch.cuda._sleep(LONG)
        pool[20:28].fill_(turn)
        back.write(rows[8:], range(20, 28), back.mark())
        assert (pool[20:28] == -turn).all() and not pool[28:].any()


def test_registered_memory_is_pinned() -> None:
    assert memory.pin(torch.zeros(3 << 20)).is_pinned()


def test_two_shares_of_a_gpu_fit() -> None:
    taken = []
    for _ in range(2):
        free, total = torch.cuda.mem_get_info(DEVICE)
        nbytes = memory.pool_bytes(total, free, 0, 0, 0.4)
        taken.append(torch.empty(nbytes, dtype=torch.uint8, device=DEVICE))
    assert abs(taken[0].nbytes - taken[1].nbytes) < taken[0].nbytes / 10
    del taken
    torch.cuda.empty_cache()


def test_nothing_is_compiled_after_the_warm_up(checkpoint: Callable[..., Path]) -> None:
    triton = pytest.importorskip("triton")
    from pdserve.config import EngineConfig
    from pdserve.engine.engine import Engine
    from pdserve.engine.warm_up import warm_up
    from pdserve.request import Request, SamplingParams

    model = str(checkpoint("gemma2", dtype="bfloat16"))
    engine = Engine(EngineConfig(model=model, device="cuda", num_blocks=200, max_num_batched_tokens=64))
    list(warm_up(engine))
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: compiled.append(repr)
    try:
        for number, length in enumerate((1, 16, 17, 300, 700)):
            for temperature in (0, 1):
                sampling = SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True)
                engine.add(
                    engine.new_sequence(f"{number} {temperature}", Request(prompt=[7] * length, sampling=sampling))
                )
        while engine.has_work:
            for seq in engine.step().sampled:
                if seq.output.finish_reason():
                    engine.remove(seq)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []
