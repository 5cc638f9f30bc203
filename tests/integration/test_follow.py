"""Following: decode loads blocks while prefill stores them, and retries those that it requested too early."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Capabilities, Connector
from pdserve.kv_transfer.staging import Copies, StagedConnector
from pdserve.output import Output, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles import transfers
from tests.outputs import is_stored

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 11 * i) % 256 for i in range(150)]  # its last block is partial
BLOCKS = 10
TOKENS = 5


class Pair:
    """A prefill and a decode instance on one store that supports following."""

    def __init__(
        self,
        make_instance: Callable[..., Any],
        store_class: type[Connector],
        model: Path,
        before_put: Callable[[], object],
    ):
        follower = type("Follower", (store_class,), {"capabilities": Capabilities(follows=True, cancels=True)})
        values: dict[str, bytes] = {}
        self.stored = values
        self.prefill = make_instance(follower(values=values, before_put=before_put), model=str(model), num_blocks=64)
        self.decode = make_instance(follower(values=values), model=str(model), num_blocks=64)
        self._num_forwarded = 0

    def begin(self) -> None:
        """Run prefill to the first token, and forward its outputs to decode."""
        self.decode.submit("r", PROMPT, TOKENS, pb.DECODE)
        self.prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
        self.prefill.run_until(lambda outputs: any(output.token_ids for output in outputs))
        self.forward_outputs()

    def forward_outputs(self) -> list[Output]:
        """Send decode a hand-over for each new output of prefill, as the router does; return these outputs."""
        outputs: list[Output] = self.prefill.outputs[self._num_forwarded :]
        self._num_forwarded += len(outputs)
        for output in outputs:
            stored = output.stored or Stored()
            message = pb.HandOver(
                request_id="r", num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final
            )
            if output.token_ids:
                message.first_token = output.token_ids[0]
            self.decode.instance.hand_over("router", message)
        return outputs

    def finish(self) -> list[int]:
        """Run both instances until idle, check that decode loaded the whole prompt, and return all tokens."""
        self.decode.run_until_idle()
        self.prefill.run_until_idle()
        self.decode.instance.run_once(wait=False)  # an idle step publishes the counters
        counters = self.decode.instance.reporter.heartbeat.counters
        assert counters['prompt_tokens_by_source{source="loaded"}'] == len(PROMPT)
        tokens: list[int] = self.prefill.tokens("r") + self.decode.tokens("r")
        return tokens


def attach_staged(
    connector: Connector, pool: torch.Tensor, layout: Layout, make_copies: Callable[[], Copies]
) -> Connector:
    size = 3 * layout.block_bytes
    return StagedConnector(connector, make_copies(), layout, len(pool), staging_bytes=2 * size, piece_bytes=size)


MakePair = Callable[[Callable[[], object]], Pair]


@pytest.fixture(params=["direct", "staged"])
def make_pair(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    make_instance: Callable[..., Any],
    controlled_store: type[Connector],
    monkeypatch: pytest.MonkeyPatch,
) -> MakePair:
    """make_pair(before_put) → a pair whose store calls `before_put` before it stores a block.

    Staged, blocks pass through host rows as those of a pool on a GPU do, three at a time.
    """
    if request.param == "staged":
        monkeypatch.setattr("pdserve.kv_transfer.grouped.attach_pool", attach_staged)
    return lambda before_put: Pair(make_instance, controlled_store, checkpoint("llama"), before_put)


@pytest.fixture
def expected_tokens(checkpoint: Callable[..., Path], generate: Generate) -> list[int]:
    """Reference tokens after PROMPT."""
    return generate(checkpoint("llama"), [PROMPT], TOKENS)[0]


def test_decode_loads_blocks_before_prefill_reports_them_stored(
    make_pair: MakePair, expected_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 60.0)
    gate = threading.Event()
    pair = make_pair(lambda: gate.wait(600))
    pair.begin()
    pair.decode.run_until(lambda _: pair.decode.instance.transfers.in_flight > 0)
    assert not pair.stored, "decode waits although no block is stored"
    gate.set()
    pair.decode.run_until(lambda outputs: any(output.token_ids for output in outputs))
    assert pair.finish() == expected_tokens


def test_decode_retries_blocks_that_it_requested_too_early(
    make_pair: MakePair, expected_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 0.0)
    permits = threading.Semaphore(4)
    pair = make_pair(lambda: permits.acquire(timeout=600))
    pair.begin()
    decode = pair.decode.instance
    pair.decode.run_until(lambda _: decode.connector.stats().seconds["load"] and not decode.transfers.in_flight)
    assert not decode.connector.stats().failures, "a block that is not there yet is no failure"
    assert not pair.decode.tokens("r"), "a part of the KV is missing"
    permits.release(BLOCKS)
    while not any(is_stored(output) for output in pair.forward_outputs()):
        pair.prefill.instance.run_once(wait=True)
    assert pair.finish() == expected_tokens


def test_blocks_not_loaded_before_a_corrupt_block_are_computed(
    make_pair: MakePair, expected_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block is not stored in time and a later one is corrupt: decode computes both and the tokens are unchanged."""
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 0.0)
    monkeypatch.setattr(transfers, "MIN_PART_BYTES", 1)
    pair = make_pair(lambda: None)
    pair.decode.submit("r", PROMPT, TOKENS, pb.DECODE)
    pair.prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
    pair.prefill.run_until(lambda outputs: any(is_stored(output) for output in outputs))
    names = list(pair.stored)
    late, corrupt = names[1], names[4]  # in the first piece, and in the second
    del pair.stored[late]
    pair.stored[corrupt] = pair.stored[corrupt][:-1] + bytes([pair.stored[corrupt][-1] ^ 1])
    (first_token,) = pair.prefill.tokens("r")
    decode = pair.decode.instance
    decode.hand_over("router", pb.HandOver(request_id="r", coming=BLOCKS, first_token=first_token))
    pair.decode.run_until(lambda _: decode.connector.stats().failures and not decode.transfers.in_flight)
    decode.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True))
    pair.decode.run_until_idle()
    assert [first_token, *pair.decode.tokens("r")] == expected_tokens
