"""GPU back end: the functions that the engine's core calls for a model on a GPU (fusion, graphs, memory, sampling)."""

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pdserve.config import EngineConfig
from pdserve.engine.cpu_fusion.fused_layers import fuse_mlps, fuse_norms
from pdserve.engine.gpu import step_memory
from pdserve.engine.gpu.cuda_graph import PaddedGraphs, padded_sizes
from pdserve.kernels.gpu import draw, memory
from pdserve.kernels.gpu.copies import PoolCopies

if TYPE_CHECKING:
    from pdserve.engine.model_runner import ModelRunner

log = logging.getLogger(__name__)

sample = draw.draw
pin = memory.pin
pool_bytes = memory.free_for_pool
describe_memory = memory.describe
copies = PoolCopies


def fuse(model: torch.nn.Module) -> None:
    """Replace in place what fewer launches can compute. On the CPU, in Triton's interpreter."""
    try:
        from pdserve.engine.gpu.fused_attention import fuse_attention
        from pdserve.engine.gpu.fused_layer import fuse_layers
        from pdserve.kernels.gpu import elementwise, launch
    except ImportError as error:
        log.warning("the model's layers are not fused: %s", error)
        return
    if next(model.parameters()).device.type == "cpu" and not launch.INTERPRETED:
        return  # the kernel is refused later, with its reason
    norms, mlps = fuse_norms(model, elementwise), fuse_mlps(model, elementwise)
    attentions, layers = fuse_attention(model), fuse_layers(model)
    log.info("fused for the GPU: %d norms, %d MLPs, %d attentions, %d layers", norms, mlps, attentions, layers)


def row_functions() -> AbstractContextManager[Any]:
    """Return the context in which a model rounds a row as in any other batch."""
    from pdserve.kernels.gpu.row_functions import RowFunctions

    return RowFunctions()


def step_bytes(runner: "ModelRunner", config: EngineConfig) -> int:
    """Return the memory that steps need beside weights and pool, graphs included."""
    return step_memory.measure(runner, config, with_graphs=_records(runner))


def graphs(runner: "ModelRunner", max_tokens: int) -> PaddedGraphs | None:
    """Return what records and replays the decode steps of a model; None if they cannot be recorded."""
    return PaddedGraphs(runner.compute_logits, max_tokens) if _records(runner) else None


def _records(runner: "ModelRunner") -> bool:
    is_capturable = runner.device.type == "cuda" and runner.kernel.CAPABILITIES.is_capturable
    return is_capturable and runner.checkpoint.layout.ranks == 1


def sizes_to_record(runner: "ModelRunner", max_seqs: int) -> list[tuple[int, int]]:
    """Return the (sequences, limit of lengths) of all graphs of decode steps, the largest first."""
    if not isinstance(runner.graphs, PaddedGraphs):
        return []
    sizes = padded_sizes(max_seqs, runner.graphs.max_tokens)
    log.info("recording up to %d CUDA graphs of decode steps", len(sizes))
    return sizes


def end_recording(runner: "ModelRunner") -> None:
    """Record no further graphs, now that requests may come."""
    if isinstance(runner.graphs, PaddedGraphs):
        runner.graphs.end_recording()
