"""Draft model: the drafter of `--speculate draft`. A second, smaller model in this process samples what may follow.

It samples as the first one will: with the parameters of the request, penalties and biases included, and the noise of each
position. So a draft is right wherever the two models would draw the same token, and a model that drafts for itself is always
right. Only grammars, reasoning and plug-ins are left out, which have a state of their own.

Shape legend: see kernels/batch.py; V vocabulary.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from pdserve.config import EngineConfig
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.features import SHARED
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sampler import SampledTokens
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.errors import SetupError
from pdserve.keys import Tokens
from pdserve.model_path import model_folder
from pdserve.speculation.model_drafter import AT_ONCE, CATCH_UP_TOKENS, ModelDrafter

log = logging.getLogger(__name__)

POOL_SHARE = 0.25  # of the bytes of the instance's pool, at most; as many tokens as that holds, if they take less
FREE_SHARE = 0.5  # of what is free on a GPU, at most
HAVE_STATE = {"grammar", "reasoning", "logits_processors"}  # what else changes logits is a function of the tokens alone
CHANGES = [(one, one.change) for one in SHARED if one.change is not None and not HAVE_STATE & {*one.fields}]


class DraftModel(ModelDrafter):
    """Proposes tokens by `--speculative-model`.

    Args:
        target: runs the model that drafts are for.

    Attributes:
        runner: of the draft model.

    Raises:
        SetupError: the model cannot be loaded, has recurrent layers or another vocabulary, or there is no room for its KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        target: ModelRunner,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        own = EngineConfig(
            model=config.speculative_model,
            dtype=config.dtype,
            device=config.device,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=CATCH_UP_TOKENS + AT_ONCE * config.max_num_seqs,
            kernel=config.kernel,
            batch_invariant=config.batch_invariant,
            async_scheduling="off",
            speculate="off",
            pooling="off",
        )
        checkpoint = load(own)
        _check_vocabulary(config, checkpoint, target.checkpoint)
        if checkpoint.spec.states:
            message = "has recurrent layers, whose states cannot take drafts back; use one with attention only"
            raise SetupError(f"--speculative-model {own.model} {message}")
        checkpoint = _in_one_group(checkpoint)
        count = _num_blocks(checkpoint, target)
        super().__init__(config, scheduler, count, checkpoint.context_length, now)
        self.runner = ModelRunner(checkpoint, replace(own, num_blocks=count))
        self._vocab_size = target.checkpoint.vocab_size
        size = count * checkpoint.layout.block_bytes / 2**20
        log.info("up to %d drafts a step by %s, with %d blocks of KV (%.0f MiB)", self._most, own.model, count, size)

    @torch.inference_mode()
    def _compute(self, new: Mapping[Sequence, Tokens], drafting: list[Sequence]) -> list[int]:
        """Compute new tokens of some sequences, and return the tokens that follow those of `drafting`."""
        kept, counts = [self.followed[seq] for seq in new], [*map(len, new.values())]
        ends = dict(zip(new, accumulate(counts), strict=True))
        ids_T = np.concatenate([np.frombuffer(tokens, np.uint32) for tokens in new.values()])
        ids_T = ids_T.clip(max=self.runner.checkpoint.vocab_size - 1)  # of the padding that only the other model has
        work, needed = self.work(new, drafting), [ends[seq] - 1 for seq in drafting]
        sizes, first = [count for count, _ in work], [computed for _, computed in work]
        is_decode_step = len(work) == len(ids_T)
        repeats = counts if is_decode_step else [1] * len(kept)
        tables = [one.block_ids for one, times in zip(kept, repeats, strict=True) for _ in range(times)]
        wanted = [*range(len(ids_T))] if is_decode_step else needed
        logits_SV = self.runner.forward(self.runner.step_inputs(ids_T, sizes, first, tables, wanted))
        logits_SV = logits_SV if wanted == needed else logits_SV[needed]
        for one, count in zip(kept, counts, strict=True):
            one.compute(count)
        if not drafting:
            return []
        if (padding := self._vocab_size - logits_SV.shape[1]) > 0:
            logits_SV = torch.nn.functional.pad(logits_SV, (0, padding), value=float("-inf"))
        logits_SV = logits_SV[:, : self._vocab_size].contiguous()
        for feature, change in CHANGES if any(seq.features for seq in drafting) else ():
            if rows := [(logits_SV[row], seq) for row, seq in enumerate(drafting) if feature in seq.features]:
                change(rows)
        return SampledTokens(logits_SV, drafting).read()


def _in_one_group(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose layers all keep their KV for as long, whatever their windows: drafts need few blocks."""
    spec, layout = checkpoint.spec, checkpoint.layout
    spec = replace(spec, groups=tuple(replace(group, window=None) for group in spec.groups))
    same = {name: getattr(layout, name) for name in ("model_fingerprint", "block_size", "dtype", "itemsize")}
    return replace(checkpoint, spec=spec, layout=spec.layout(**same))


def _num_blocks(checkpoint: Checkpoint, target: ModelRunner) -> int:
    """Return the blocks of a draft model's pool: for as many tokens as the target has room for, in a share of its bytes."""
    size, pool_NX = checkpoint.layout.block_bytes, target.kv.pool_NX
    room = POOL_SHARE * pool_NX.numel() * pool_NX.element_size()
    if checkpoint.device.type == "cuda":
        room = min(room, FREE_SHARE * torch.cuda.mem_get_info(checkpoint.device)[0])
    if (count := min(target.kv.num_blocks, int(room / size))) < 2:
        message = f"{room / 2**20:.1f} MiB have no room for two blocks of its KV; raise --num-blocks"
        raise SetupError(f"--speculative-model: {message}, or lower --gpu-memory-utilization")
    return count


def _check_vocabulary(config: EngineConfig, draft: Checkpoint, target: Checkpoint) -> None:
    """Raise SetupError unless both models have the same tokens. Their numbers may differ by a padding of the weights."""
    found = []
    for model in (config.model, config.speculative_model):
        tokenizer = model_folder(model) / "tokenizer.json"
        found.append(json.loads(tokenizer.read_bytes())["model"].get("vocab") if tokenizer.is_file() else None)
    is_same = found[0] == found[1] if None not in found else draft.vocab_size == target.vocab_size
    if not is_same:
        sizes = f"{draft.vocab_size} tokens, and {config.model} {target.vocab_size}"
        message = f"has another vocabulary ({sizes}); use a model with the same tokenizer"
        raise SetupError(f"--speculative-model {config.speculative_model} {message}")
