"""Memory of a GPU that is shared, by a fake `torch.cuda`: no GPU has run this."""

from types import SimpleNamespace

import pytest
import torch

from pdserve.kernels.gpu import memory

GIB = 1 << 30
WEIGHTS, CONTEXT, STEP = 16 * GIB, GIB // 2, 2 * GIB


class FakeGPU:
    """A GPU of 80 GiB whose processes are numbers of bytes. `mem_get_info` is that of torch."""

    def __init__(self, *others: int) -> None:
        self.total = 80 * GIB
        self.others = list(others)

    def pool(self, utilization: float, *, weights: int = WEIGHTS) -> int:
        """Return the pool of one more instance, which then stays."""
        free = self.total - sum(self.others) - weights - CONTEXT
        taken = memory.pool_bytes(self.total, free, weights, STEP, utilization)
        self.others.append(weights + CONTEXT + STEP + memory.LATER_BYTES + taken)
        return taken


def test_one_instance_fills_its_share() -> None:
    gpu = FakeGPU()
    assert gpu.pool(0.9) == 72 * GIB - WEIGHTS - CONTEXT - STEP - memory.LATER_BYTES
    assert gpu.others == [72 * GIB]


@pytest.mark.parametrize("instances", [2, 3, 4])
def test_instances_on_one_gpu_have_equal_pools_in_any_order_of_start(instances: int) -> None:
    gpu = FakeGPU()
    pools = [gpu.pool(0.9 / instances, weights=8 * GIB) for _ in range(instances)]
    assert pools[0] > 7 * GIB and len(set(pools)) == 1
    assert sum(gpu.others) <= 0.9 * gpu.total


def test_what_others_have_beyond_their_share_is_missing() -> None:
    assert FakeGPU(50 * GIB).pool(0.45) == 80 * GIB - 50 * GIB - WEIGHTS - CONTEXT - STEP - memory.LATER_BYTES
    assert FakeGPU(62 * GIB).pool(0.45) == 0, "and not a negative number"


def test_the_memory_of_this_process_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cached = torch.device("cuda:1"), [3 * GIB]  # of what the measured steps and graphs have given back
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda one: (40 * GIB - sum(cached), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda one: {device: WEIGHTS}[one] + sum(cached))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda one: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    own = WEIGHTS + memory.CONTEXT_BYTES  # the rest of what is not free belongs to another process
    assert memory.free_for_pool(device, STEP, 0.45) == 36 * GIB - own - STEP - memory.LATER_BYTES
    assert memory.describe(device, 0.45).startswith("cuda:1 has 80.0 GiB, 40.0 of them free")


def test_the_peak_is_what_the_allocator_holds_beyond_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    now, peak, calls = 5, 5, list[str]()
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda one: calls.append(f"reset {one}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda one: calls.append(f"wait {one}"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda one: now)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda one: peak)
    with memory.PeakMeter(device) as meter:
        calls.append("step")
        now, peak = 8, 12
    assert meter.peak == 7
    assert calls == ["empty", "reset cuda:0", "step", "wait cuda:0", "empty"]


def test_pinning_registers_memory_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    registered, status = list[tuple[int, ...]](), 0

    def register(*arguments: int) -> int:
        registered.append(arguments)
        return status

    released = list[int]()
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=released.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    x = torch.zeros(3, 5)
    address = x.data_ptr()
    assert memory.pin(x) is x and registered == [(address, 60, 0)]
    view, x = x[1:], torch.zeros(1)
    assert not released, "a view still uses the memory"
    del view
    assert released == [address]
    assert len(memory.pin(x[:0])) == 0 and len(registered) == 1, "there is nothing to register"
    status = 2
    with pytest.raises(MemoryError, match="cannot be pinned"):
        memory.pin(x)
