"""Byte equality of the hand-over: every block on D equals the block on P, over real connectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.memory.kv_memory import section_views
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.roles import transfers
from tests.outputs import is_stored


@pytest.mark.parametrize("connector_url", ["shm", "file", "redis"], indirect=True)
@pytest.mark.parametrize("piece_bytes", [1, transfers.MIN_PART_BYTES])
def test_every_block_of_a_700_token_prompt_arrives_unchanged(
    piece_bytes: int,
    connector_url: str,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    make_instance: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "MIN_PART_BYTES", piece_bytes)
    path = checkpoint("llama")
    settings = {"num_blocks": 64, "max_num_batched_tokens": 128, "max_model_len": 1000}
    prompt = [(i * i + 3 * i) % 256 for i in range(700)]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    request = Request(prompt=prompt, sampling=sampling).pack()
    prefill, decode = (make_instance(model=str(path), connector=connector_url, **settings) for _ in range(2))

    decode.instance.submit("r", pb.Submit(request_id="x", phase=pb.DECODE, request=request))
    decode.instance.run_once(wait=True)
    (decode_job,) = decode.instance._jobs.values()

    prefill.instance.submit("r", pb.Submit(request_id="x", phase=pb.PREFILL, request=request))
    # P frees the blocks after the last store, so record their ids after each step.
    tables: list[list[int]] = [[]]
    while not any(is_stored(o) for o in prefill.outputs):
        jobs = list(prefill.instance._jobs.values())
        if jobs and jobs[0].seq.kv.block_ids:
            tables.append(list(jobs[0].seq.kv.block_ids))
        prefill.instance.run_once(wait=not prefill.instance.engine.has_work)
    sent = section_views(prefill.instance.engine.runner.kv.pool_NX, prefill.instance.engine.layout)[0][
        tables[-1]
    ].clone()
    assert len(tables[-1]) == 44
    first = next(o.token_ids[0] for o in prefill.outputs if o.token_ids)
    updates = [o.stored for o in prefill.outputs if o.stored is not None]
    counts = [stored.num_blocks for stored in updates]
    assert counts[-1] == 44 and counts == sorted(counts)

    for stored in updates:
        message = pb.HandOver(
            request_id="x",
            num_blocks=stored.num_blocks,
            coming=stored.coming,
            final=stored.final,
            first_token=first if stored.final else None,
        )
        decode.instance.hand_over("r", message)
    decode.run_until(lambda outputs: any("kv_ready" in o.stamps for o in outputs))
    reserved = list(decode_job.seq.kv.block_ids)
    decode.run_until(lambda outputs: any(o.finish_reason for o in outputs))
    received = section_views(decode.instance.engine.runner.kv.pool_NX, decode.instance.engine.layout)[0][reserved]
    assert torch.equal(received[:43], sent[:43]), "full blocks"
    filled = 700 % 16  # decode writes its own tokens behind these
    assert torch.equal(received[43, ..., :filled, :], sent[43, ..., :filled, :]), "the partial block"
    moved = [o.moved.blocks for o in decode.outputs if o.moved is not None][-1]
    assert moved == 44, "the partial block was loaded too"
    tokens = [first, *(t for o in decode.outputs for t in o.token_ids)]
    assert tokens == generate(path, [prompt], 4)[0]
    for driver in (prefill, decode):
        assert driver.instance.engine.pool.num_held == 0
