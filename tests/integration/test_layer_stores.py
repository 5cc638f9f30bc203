"""Stores that begin while the model computes the blocks: over `shm://`, layer by layer."""

import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.step import StepOutcome, StepPlan
from pdserve.kv_transfer.blocks import Outgoing
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector, unlink
from pdserve.output import Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles import transfers
from tests.outputs import is_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 7 * i) % 256 for i in range(150)]  # its last block is partial
TOKENS = 5


class Recording(ShmConnector):
    """Records how many bytes of blocks were final each time that a growing store went on."""

    fronts: list[int]

    def put_growing(self, blocks: Sequence[Outgoing], lease_s: float) -> Generator[None, int, None]:
        growth = super().put_growing(blocks, lease_s)
        next(growth)
        while True:
            self.fronts.append((yield))
            try:
                growth.send(self.fronts[-1])
            except StopIteration:
                return


@pytest.fixture
def url() -> Iterator[str]:
    url = f"shm://test-{uuid.uuid4().hex}"
    yield f"{url}?size=16MiB&timeout=600"
    unlink(url)


@pytest.fixture
def make(
    url: str, make_instance: Callable[..., Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """make(**settings) → an instance on the store that `Recording` reaches, whose blocks are large enough for ranges."""
    monkeypatch.setattr(transfers, "MIN_RANGE_BYTES", 1)

    def make(**settings: Any) -> Any:
        connector = Recording(url)
        connector.fronts = []
        return make_instance(connector, model=str(checkpoint("llama")), num_blocks=64, **settings)

    return make


def compute(prefill: Any, prompt: list[int]) -> None:
    """Run a prompt, and its stores, to the end."""
    prefill.outputs.clear()
    prefill.submit("r", prompt, TOKENS, pb.PREFILL)
    prefill.run_until(lambda outputs: any(map(is_stored, outputs)))
    prefill.run_until_idle()


def wait_for_ranges(prefill: Any) -> None:
    """Let each layer of prefill wait until the first range is in the store: its worker may be late on a busy machine."""
    planned, connector = prefill.instance.engine.on_planned, prefill.instance.connector

    def on_planned(plan: Any) -> Any:
        if (on_layer := planned(plan)) is None:
            return None

        def on_layer_and_wait(*layer: Any) -> None:
            on_layer(*layer)
            end = time.monotonic() + 60
            while not connector.fronts and time.monotonic() < end:
                time.sleep(0.001)

        return on_layer_and_wait

    prefill.instance.engine.on_planned = on_planned


def hand_over(prefill: Any, decode: Any) -> None:
    """Pass all outputs of prefill to decode, as the router does."""
    for output in prefill.outputs:
        stored = output.stored or Stored()
        message = pb.HandOver(request_id=output.request_id, num_blocks=stored.num_blocks, coming=stored.coming)
        message.final = stored.final
        if output.token_ids:
            message.first_token = output.token_ids[0]
        decode.instance.hand_over("router", message)


@pytest.mark.parametrize("chunk", [2048, 64])
def test_blocks_move_while_they_are_computed(
    make: Callable[..., Any], checkpoint: Callable[..., Path], generate: Generate, chunk: int
) -> None:
    prefill, decode = make(max_num_batched_tokens=chunk), make()
    decode.submit("r", PROMPT, TOKENS, pb.DECODE)
    wait_for_ranges(prefill)
    compute(prefill, PROMPT)
    hand_over(prefill, decode)
    decode.run_until(lambda outputs: any(output.finish_reason for output in outputs))
    decode.run_until_idle()
    decode.instance.run_once(wait=False)  # an idle step publishes the counters
    fronts, block_bytes = prefill.instance.connector.fronts, prefill.instance.engine.layout.block_bytes
    assert 0 < min(fronts) < max(fronts) == block_bytes, "a store begins with the first layers"
    assert prefill.instance.connector.stats().blocks["store"] == 10
    counters = decode.instance.reporter.heartbeat.counters
    assert counters['prompt_tokens_by_source{source="loaded"}'] == len(PROMPT)
    assert [*prefill.tokens("r"), *decode.tokens("r")] == generate(checkpoint("llama"), [PROMPT], TOKENS)[0]


def test_decode_is_told_before_the_first_token(make: Callable[..., Any]) -> None:
    prefill = make()
    compute(prefill, PROMPT)
    first, *others = prefill.outputs
    assert first.stored.coming == 10
    assert not first.token_ids
    assert any(output.token_ids for output in others)
    assert prefill.outputs[-1].stored.final


def test_a_replayed_step_stores_its_block_too(make: Callable[..., Any]) -> None:
    """Its layers tell nothing. One further token is computed as a decode step is."""
    prefill = make()
    for prompt in (PROMPT[:33], [*PROMPT[:32], 1]):
        for _ in range(3):
            compute(prefill, prompt)
            assert prefill.outputs[-1].stored.num_blocks == 3


def test_a_cancelled_prompt_leaves_no_store_behind(make: Callable[..., Any]) -> None:
    prefill = make(max_num_batched_tokens=64)
    prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
    prefill.run_until(lambda outputs: any(output.stored for output in outputs))
    prefill.instance.cancel("router", "r")
    prefill.run_until_idle()
    assert prefill.instance.num_jobs == 0


def test_decode_computes_what_a_prefill_that_died_in_a_step_had_begun_to_store(
    make: Callable[..., Any], checkpoint: Callable[..., Path], generate: Generate
) -> None:
    prefill, decode = make(), make()

    def die(plan: StepPlan) -> StepOutcome:
        if plan.on_layer is not None:
            plan.on_layer(0)
            while not prefill.instance.connector.fronts:
                time.sleep(0.001)
            raise RuntimeError("died")
        return {}

    prefill.instance.engine.runner.step = die
    decode.submit("r", PROMPT, TOKENS, pb.DECODE)
    prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
    with pytest.raises(RuntimeError, match="died"):
        prefill.run_until(lambda outputs: False)
    hand_over(prefill, decode)
    decode.run_until(lambda _: decode.instance.transfers.in_flight)
    prefill.instance.connector.close()
    decode.instance.hand_over("router", pb.HandOver(request_id="r", final=True))
    decode.run_until(lambda outputs: any(output.finish_reason for output in outputs))
    assert decode.tokens("r") == generate(checkpoint("llama"), [PROMPT], TOKENS)[0]
