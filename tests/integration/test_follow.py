"""Decode loads blocks while prefill stores them, and what it came too early for, later."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.kv_transfer.connector import Connector
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles import transfers

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

PROMPT = [(i * i + 11 * i) % 256 for i in range(150)]  # its last block is partial
BLOCKS = 10
TOKENS = 5


class Pair:
    """A prefill and a decode instance around one store in which decode can follow."""

    def __init__(
        self, context: Callable[..., Any], in_hand: type[Connector], model: Path, before_put: Callable[[], object]
    ):
        follower = type("Follower", (in_hand,), {"follows": True})
        values: dict[str, bytes] = {}
        self.stored = values
        self.prefill = context(follower(values=values, before_put=before_put), model=str(model), num_blocks=64)
        self.decode = context(follower(values=values), model=str(model), num_blocks=64)
        self.told = 0

    def begin(self) -> None:
        """Until prefill has the first token, and decode knows what it knows."""
        self.decode.submit("r", PROMPT, TOKENS, pb.DECODE)
        self.prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
        self.prefill.until(lambda outputs: any(output.token_ids for output in outputs))
        self.tell()

    def tell(self) -> list[pb.Output]:
        """Does what the router does, with what prefill has said since the last time."""
        said: list[pb.Output] = self.prefill.outputs[self.told :]
        self.told += len(said)
        for output in said:
            stored = output.stored
            message = pb.HandOver(
                request_id="r", num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final
            )
            if output.token_ids:
                message.first_token = output.token_ids[0]
            self.decode.instance.hand_over("router", message)
        return said

    def end(self) -> list[int]:
        """All tokens, once both have let go of the request; what was loaded was not computed."""
        self.decode.until_idle()
        self.prefill.until_idle()
        self.decode.instance.run_once(wait=False)  # idle, it publishes its counters
        counters = self.decode.instance.heartbeat.counters
        assert counters['prompt_tokens_by_source{source="loaded"}'] == len(PROMPT)
        tokens: list[int] = self.prefill.tokens("r") + self.decode.tokens("r")
        return tokens


MakePair = Callable[[Callable[[], object]], Pair]


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path], context: Callable[..., Any], store_in_hand: type[Connector]) -> MakePair:
    """make_pair(before_put) → a pair, whose store does that before it takes a block."""
    return lambda before_put: Pair(context, store_in_hand, checkpoint("llama"), before_put)


@pytest.fixture
def right(checkpoint: Callable[..., Path], generate: Generate) -> list[int]:
    """The tokens after the prompt."""
    return generate(checkpoint("llama"), [PROMPT], TOKENS)[0]


def test_decode_has_everything_before_it_is_told_that_it_is_there(
    make_pair: MakePair, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 60.0)
    admission = threading.Event()
    pair = make_pair(lambda: admission.wait(600))
    pair.begin()
    pair.decode.until(lambda _: pair.decode.instance.transfers.in_flight > 0)
    assert not pair.stored, "decode waits for blocks of which none is there"
    admission.set()
    pair.decode.until(lambda outputs: any(output.token_ids for output in outputs))
    assert pair.end() == right


def test_decode_that_was_too_early_loads_later(
    make_pair: MakePair, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 0.0)
    admission = threading.Semaphore(4)
    pair = make_pair(lambda: admission.acquire(timeout=600))
    pair.begin()
    decode = pair.decode.instance
    pair.decode.until(lambda _: decode.connector.stats().seconds["load"] and not decode.transfers.in_flight)
    assert not decode.connector.stats().failures, "nothing was lost"
    assert not pair.decode.tokens("r"), "a part of the KV is missing"
    admission.release(BLOCKS)
    while not any(output.stored.final for output in pair.tell()):
        pair.prefill.instance.run_once(wait=True)
    assert pair.end() == right


def test_a_block_that_is_late_and_a_later_one_that_is_corrupt(
    make_pair: MakePair, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not loaded, before what could not be, is computed too."""
    monkeypatch.setattr(transfers, "FOLLOW_PATIENCE_S", 0.0)
    monkeypatch.setattr(transfers, "MIN_PART_BYTES", 1)
    pair = make_pair(lambda: None)
    pair.decode.submit("r", PROMPT, TOKENS, pb.DECODE)
    pair.prefill.submit("r", PROMPT, TOKENS, pb.PREFILL)
    pair.prefill.until(lambda outputs: any(output.stored.final for output in outputs))
    names = list(pair.stored)
    late, corrupt = names[1], names[4]  # of the first piece, and of the second
    del pair.stored[late]
    pair.stored[corrupt] = pair.stored[corrupt][:-1] + bytes([pair.stored[corrupt][-1] ^ 1])
    (first_token,) = pair.prefill.tokens("r")
    decode = pair.decode.instance
    decode.hand_over("router", pb.HandOver(request_id="r", coming=BLOCKS, first_token=first_token))
    pair.decode.until(lambda _: decode.connector.stats().failures and not decode.transfers.in_flight)
    decode.hand_over("router", pb.HandOver(request_id="r", num_blocks=BLOCKS, final=True))
    pair.decode.until_idle()
    assert [first_token, *pair.decode.tokens("r")] == right
