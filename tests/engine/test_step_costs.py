"""What an eager decode step asks of a GPU, counted without one: copies, syncs and launches.

torch's meta device stands in for the GPU: its tensors have shapes and no values, and whatever Python reads from one is 0.
Operators on CPU tensors run for real; Triton's launches are counted and do nothing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.config import EngineConfig
from pdserve.engine import paged_model
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.features import features_of
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Accepted, StepPlan
from pdserve.keys import token_array
from pdserve.kv_spec import KVSpec
from pdserve.request import SamplingParams

triton = pytest.importorskip("triton")

GPU = torch.device("meta")
MAX_SYNCS, MAX_LAUNCHES_PER_LAYER = 2, 16
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
}
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item")
NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift")


class GpuCounter(TorchDispatchMode):
    """Counts what operators would ask of a GPU: `launches`, `syncs` and `copies` from host memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_gpu, target = any(x.is_meta for x in inputs), kwargs.get("device")
        name = func._schema.name
        if on_gpu and name in READS:
            self.counts["syncs"] += 1
            return 0
        if on_gpu and target is not None and torch.device(target).type == "cpu":
            self.counts["syncs"] += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if not any(x.is_meta for x in (*inputs, *outputs)):
            return result
        self.counts["copies"] += sum(not x.is_meta and x.dim() > 0 for x in inputs)
        known = {x.untyped_storage()._cdata for x in inputs}
        is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in outputs)
        if not is_view and not name.startswith(NO_LAUNCH):
            self.launch(name)
        return result

    def launch(self, name: str) -> None:
        self.counts["launches"] += 1
        self.launched[name] += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCounter]:
    """A GPU that counts, and computes nothing."""
    from triton.runtime.jit import JITFunction

    from pdserve.engine.cpu_fusion import fused_layers
    from pdserve.engine.gpu import fused_attention, fused_layer
    from pdserve.kernels.gpu import elementwise, triton_kernels

    counter = GpuCounter()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: counter.launch(self.fn.__name__))
    for module in (elementwise, triton_kernels):
        monkeypatch.setattr(module, "device_of", lambda x: nullcontext())
    monkeypatch.setattr(triton_kernels, "processors", lambda device: 132)
    for fusion in (fused_layers, fused_attention, fused_layer):
        monkeypatch.setattr(fusion, "nearly_equal", lambda x, y: True)  # trials compare values, and there are none
    monkeypatch.setattr(torch, "equal", lambda x, y: True)
    with counter:
        yield counter


def make_runner(architecture: str, layers: int) -> ModelRunner:
    from pdserve.engine.gpu import back_end

    paged_model.register()
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    hf_config = AutoConfig.for_model(
        architecture, **SHAPE, num_hidden_layers=layers, **(extra if architecture == "qwen3_moe" else {})
    )
    with torch.device(GPU):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation=paged_model.NAME)
    back_end.fuse(model.eval().requires_grad_(False))
    spec = KVSpec.uniform(layers, hf_config.num_key_value_heads, hf_config.head_dim)
    layout = spec.layout(model_fingerprint="", block_size=16, dtype="bfloat16", itemsize=2)
    checkpoint = Checkpoint(model, layout, spec, 1024, hf_config.vocab_size, frozenset(), GPU, torch.bfloat16)
    return ModelRunner(checkpoint, EngineConfig(kernel="triton", batch_invariant="off", num_blocks=64))


def new_sequences(count: int, **sampling: Any) -> list[Sequence]:
    params = SamplingParams(**sampling)
    blocks, features = block_table([3, 4, 5]), features_of(params, 30)
    return [
        Sequence.new(
            str(i),
            token_array([5] * 40),
            30,
            30,
            params,
            b"",
            16,
            block_ids=blocks,
            num_computed=39,
            features=features,
        )
        for i in range(count)
    ]


def decode_step(runner: ModelRunner, count: int, **sampling: Any) -> None:
    seqs = new_sequences(count, **sampling)
    assert runner.step(StepPlan(dict.fromkeys(seqs, 1))) == dict.fromkeys(seqs, Accepted(1, [0]))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_budget_of_an_eager_decode_step(architecture: str, gpu: GpuCounter) -> None:
    launches = []
    for layers in (2, 4):
        runner = make_runner(architecture, layers)
        for count in (1, 7, 64):
            gpu.counts.clear()
            gpu.launched.clear()
            decode_step(runner, count, temperature=0)
            assert (gpu.counts["copies"], gpu.counts["syncs"]) == (1, 1), gpu.launched
            assert gpu.launched["_attend"] == gpu.launched["_rotate_and_write"] == layers, "the kernels were launched"
        launches.append(gpu.counts["launches"])
    assert (launches[1] - launches[0]) / 2 <= 14 < MAX_LAUNCHES_PER_LAYER, gpu.launched
    assert launches[0] <= 2 * MAX_LAUNCHES_PER_LAYER + 20, "what is not a layer's"


@pytest.mark.parametrize(("sampling", "copies"), [({"temperature": 0}, 1), ({"temperature": 1.0}, 2)], ids=str)
def test_budget_of_a_step_that_is_launched_ahead(sampling: dict[str, Any], copies: int, gpu: GpuCounter) -> None:
    """It takes the tokens of the last step on the device: nothing waits until they are read."""
    runner = make_runner("llama", 1)
    seqs = new_sequences(7, **sampling)
    first = runner.launch(seqs)
    gpu.counts.clear()
    runner.launch(seqs[1:], first, range(1, 7))
    assert (gpu.counts["copies"], gpu.counts["syncs"]) == (copies, 0), gpu.launched
    first.read()
    assert gpu.counts["syncs"] == 1


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}], ids=str)
def test_greedy_rows_beside_sampled_ones_cost_no_wait(sampling: dict[str, Any], gpu: GpuCounter) -> None:
    """An index that is a list is copied below what a mode sees, and waited for: the step, before the next is launched."""
    runner = make_runner("llama", 1)
    seqs = [*new_sequences(3, temperature=0), *new_sequences(4, temperature=1.0, **sampling)]
    gpu.counts.clear()
    runner.launch(seqs)
    assert (gpu.counts["copies"], gpu.counts["syncs"]) == (2, 0) and not gpu.launched["aten::index_put_"], gpu.launched


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.1}], ids=str)
def test_budget_of_sampling(sampling: dict[str, Any], gpu: GpuCounter) -> None:
    """One more copy, of the seeds and settings, and no further wait."""
    runner = make_runner("llama", 1)
    gpu.counts.clear()
    decode_step(runner, 7, temperature=1.0, seed=1, **sampling)
    assert gpu.counts["copies"] == 2 and gpu.counts["syncs"] == 1 < MAX_SYNCS


def test_experts_run_without_a_loop_in_python(gpu: GpuCounter) -> None:
    """A loop would read which experts have tokens: a wait in each layer."""
    runner = make_runner("qwen3_moe", 2)
    gpu.counts.clear()
    gpu.launched.clear()
    decode_step(runner, 7, temperature=0)
    assert (gpu.counts["copies"], gpu.counts["syncs"]) == (1, 1), gpu.launched
    products = sum(count for name, count in gpu.launched.items() if "grouped_mm" in name)
    assert products == 2 * 2, gpu.launched
