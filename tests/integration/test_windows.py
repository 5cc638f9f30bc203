"""Models whose layers all have an attention window: decode takes and loads only the blocks that the window needs."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pdserve.output import Output, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.outputs import is_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPTS = [[(i * i + k * i) % 250 for i in range(330)] for k in (3, 4, 5)]
TOKENS = 40  # with a prompt, 24 blocks of 16 tokens
WINDOW = 48


class Pair:
    """A prefill instance with a large pool, and a decode instance with one that holds a single request at full length."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.max_held = 0

    def store(self) -> None:
        """Compute and store all prompts."""
        for i, prompt in enumerate(PROMPTS):
            self.prefill.submit(str(i), prompt, TOKENS, pb.PREFILL)
        self.prefill.run_until(lambda outputs: sum(is_stored(output) for output in outputs) == len(PROMPTS))
        self.prefill.run_until_idle()

    def submit(self) -> None:
        """Submit all prompts to decode."""
        layout = self.prefill.instance.engine.layout
        same = layout == self.decode.instance.engine.layout
        for i, prompt in enumerate(PROMPTS):
            writer = {} if same else {"writer": pb.Layout(**asdict(layout))}
            self.decode.submit(str(i), prompt, TOKENS, pb.DECODE, **writer)
        self.decode.instance.run_once(wait=True)

    def hand_over(self) -> None:
        """Report to decode what prefill has reported, as the router does, and run it to the end. None waits for blocks."""
        decode = self.decode.instance
        for output in self.prefill.outputs:
            stored = output.stored or Stored()
            message = pb.HandOver(
                request_id=output.request_id, num_blocks=stored.num_blocks, tickets=stored.tickets, final=stored.final
            )
            if output.token_ids:
                message.first_token = output.token_ids[0]
            decode.hand_over("router", message)

        def done(outputs: list[Output]) -> bool:
            assert not decode.decoder.unreserved
            self.max_held = max(self.max_held, decode.engine.pool.num_held)
            return sum(bool(output.finish_reason) for output in outputs) == len(PROMPTS)

        self.decode.run_until(done)
        self.decode.run_until_idle()
        decode.run_once(wait=False)  # an idle step publishes the counters

    def tokens(self) -> list[list[int]]:
        return [self.prefill.tokens(str(i)) + self.decode.tokens(str(i)) for i in range(len(PROMPTS))]

    def prompt_tokens(self) -> dict[str, float]:
        """Return the prompt tokens on the decode instance, by source."""
        name = "prompt_tokens_by_source"
        counters = self.decode.instance.reporter.heartbeat.counters
        return {source: counters[f'{name}{{source="{source}"}}'] for source in ("computed", "loaded", "unneeded")}


@pytest.mark.parametrize("block_size", [16, 32], ids=["", "converted"])
@pytest.mark.parametrize("connector_url", ["shm", "file", "redis"], indirect=True)
def test_small_pool_decodes_prompts_that_would_not_fit_together(
    connector_url: str,
    block_size: int,
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
) -> None:
    path = checkpoint("mistral")
    settings = {"model": str(path), "connector": connector_url, "max_num_batched_tokens": 64}
    pair = Pair(
        make_instance(num_blocks=128, **settings),
        make_instance(num_blocks=24 * 16 // block_size, block_size=block_size, convert_kv=True, **settings),
    )
    first = (len(PROMPTS[0]) - WINDOW) // block_size
    blocks = -(-len(PROMPTS[0]) // block_size) - first
    assert blocks == {16: 4, 32: 3}[block_size], "of 21 or 11"
    pair.store()
    pair.submit()
    assert pair.decode.instance.engine.pool.num_held == 0, "no KV has been announced"
    pair.hand_over()
    assert pair.tokens() == generate(path, PROMPTS, TOKENS)
    assert blocks * len(PROMPTS) <= pair.max_held <= (blocks + 1) * len(PROMPTS)
    assert pair.decode.instance.engine.scheduler.num_preemptions == 0
    unneeded = first * block_size * len(PROMPTS)
    assert pair.prompt_tokens() == {"computed": 0, "loaded": 330 * len(PROMPTS) - unneeded, "unneeded": unneeded}
    moved = [output.moved for output in pair.decode.outputs if output.moved is not None]
    layout = pair.decode.instance.engine.layout
    assert [(one.blocks, one.bytes) for one in moved] == [(blocks, blocks * layout.block_bytes)] * len(PROMPTS)
    if block_size == 16:
        scheme = connector_url.partition(":")[0]
        name = f'kv_transfer_blocks{{connector="{scheme}",direction="load"}}'
        assert pair.decode.instance.reporter.heartbeat.counters[name] == blocks * len(PROMPTS)


@pytest.mark.parametrize("lost", [17, 18, 19], ids=["the first one", "another one", "the last full one"])
def test_prompt_is_computed_if_a_block_of_its_window_is_missing(
    lost: int,
    checkpoint: Callable[..., Path],
    generate: Generate,
    make_instance: Callable[..., Any],
    controlled_store: Callable[..., Any],
) -> None:
    """All three prompts lose a block. The pool has room for one of them at a time to be computed."""
    path, values = checkpoint("mistral"), dict[str, bytes]()
    settings = {"model": str(path), "max_num_batched_tokens": 64}
    pair = Pair(
        make_instance(controlled_store(values=values), num_blocks=128, **settings),
        make_instance(controlled_store(values=values), num_blocks=24, **settings),
    )
    pair.store()
    for prompt in PROMPTS:
        seq = pair.prefill.instance.engine.new_sequence(
            "", Request(prompt=prompt, sampling=SamplingParams(max_tokens=1))
        )
        (name,) = (name for name in values if name.endswith(seq.kv.full_keys()[lost].hex()))
        del values[name]
    pair.submit()
    pair.hand_over()
    assert pair.tokens() == generate(path, PROMPTS, TOKENS)
    assert pair.prompt_tokens() == {"computed": 330 * len(PROMPTS), "loaded": 0, "unneeded": 0}
