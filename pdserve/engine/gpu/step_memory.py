"""Step memory: how much of a GPU's memory steps take beside weights and pool, by running the largest ones."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from pdserve.config import EngineConfig
from pdserve.engine.features import features_of
from pdserve.engine.gpu.cuda_graph import PaddedGraphs, padded_sizes
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.engine.scheduling.budget import StepBudget
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.kernels.gpu import memory as gpu_memory
from pdserve.keys import token_array
from pdserve.request import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from pdserve.engine.model_runner import ModelRunner

LARGEST_SAMPLING = SamplingParams(  # without top_k, which lets the sampler sort less
    top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=MAX_LOGPROBS
)
SCORED = msgspec.structs.replace(LARGEST_SAMPLING, prompt_logprobs=MAX_LOGPROBS)


def measure(runner: "ModelRunner", config: EngineConfig, *, with_graphs: bool) -> int:
    """Return the bytes that a step takes at most, and all graphs."""
    with gpu_memory.PeakMeter(runner.device) as meter:
        run_largest_steps(runner, config)
    return meter.peak + (graph_bytes(runner, config) if with_graphs else 0)


@torch.inference_mode()
def run_largest_steps(runner: "ModelRunner", config: EngineConfig) -> None:
    """Run the steps that take the most memory: as many tokens as fit, of as many prompts as possible, and of as few.

    Their sampling uses every feature that takes memory, and as many tokens are scored as the scheduler lets a step score.
    """
    limit, longest = config.max_num_batched_tokens, runner.checkpoint.context_length
    for num_seqs in sorted({-(-limit // longest), min(config.max_num_seqs, limit)}):
        num_seqs = min(num_seqs, config.max_num_seqs)
        count = min(-(-limit // num_seqs), longest)
        counts = [min(count, max(1, limit - i * count)) for i in range(num_seqs)]
        scored = min(count, StepBudget.scored_tokens)
        plain = [counts[0] - scored, *counts[1:]] if counts[0] > scored else counts[1:]
        blocks = range(-(-count // runner.block_size))  # shared: what is written there does not matter
        with runner.scratch_pool(len(blocks)):
            seqs = [_prompt(scored, runner.block_size, blocks, SCORED)]
            seqs += [_prompt(each, runner.block_size, blocks) for each in plain]
            runner.step(StepPlan({seq: len(seq) for seq in seqs}))


def _prompt(count: int, block_size: int, blocks: range, sampling: SamplingParams = LARGEST_SAMPLING) -> Sequence:
    return Sequence.new(
        "probe",
        token_array([0] * count),
        count,
        count,
        sampling,
        b"",
        block_size,
        block_ids=block_table(blocks),
        features=features_of(sampling, count),
    )


@torch.inference_mode()
def graph_bytes(runner: "ModelRunner", config: EngineConfig) -> int:
    """Return the bytes that the graphs of decode steps will take, by those of the two largest.

    The first takes the memory of its tensors, which all share, and each takes some for its inputs, and outside of torch
    for what it launches. Other processes on the GPU may start meanwhile: hence not by what is free on it.
    """
    longest, taken = runner.checkpoint.context_length, []
    sizes = padded_sizes(min(config.max_num_seqs, config.max_num_batched_tokens), longest)
    graphs = PaddedGraphs(runner.compute_logits, longest)
    with runner.scratch_pool(1):
        for rows, limit in sizes[:2]:
            table = block_table([0] * -(-limit // runner.block_size))
            before = gpu_memory.reserved_bytes(runner.device)
            inputs = runner.step_inputs(
                np.zeros(rows, np.uint32), [1] * rows, [limit - 1] * rows, [table] * rows, [*range(rows)]
            )
            graphs.logits(inputs.ids_1T, inputs.positions_1T, inputs.batch)
            taken.append(gpu_memory.reserved_bytes(runner.device) - before)
    return taken[0] + taken[-1] * (len(sizes) - 1) + gpu_memory.GRAPH_BYTES * len(sizes)
