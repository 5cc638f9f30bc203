"""Frames of an instance that lies, or of another program: each is refused with a reason, and none harms the router."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.keys import KEY_BYTES
from pdserve.output import pack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.instances.frame_checks import MAX_COUNTERS, MAX_KEYS_PER_FRAME
from pdserve.router.scheduling.policy import POLICIES, PlacementRequest, decide
from pdserve.router.telemetry.metrics import Metrics
from tests.examples import examples

if TYPE_CHECKING:
    from tests.router.instances.conftest import MakeHello, SentFrames

COSTS = {"prefill": (1, 1, 1), "decode": (1, 1, 1), "transfer": (1, 1)}


def make_fleet() -> Fleet:
    fleet = Fleet("router", "model", 1.0, time.monotonic)
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda _: None, on_draining=lambda _: None))
    return fleet


def heartbeat(**fields: Any) -> pb.InstanceFrame:
    return pb.InstanceFrame(heartbeat=pb.Heartbeat(**fields))


def costs(**changes: Any) -> pb.InstanceFrame:
    return heartbeat(costs=pb.Costs(**{**COSTS, **changes}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 2**32 - 1}, "num_blocks is 4294967295"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_bytes": 7}, "not those of its KV layout"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"eos_token_ids": [50]}, "eos_token_ids"),
        ({"nonce": b""}, "nonce"),
        ({"namespace": b"another"}, "namespace"),
        ({"instance_id": ""}, "an instance id has 1 to"),
        ({"instance_id": "a\nb"}, "an instance id has 1 to"),
        ({"itl_target": math.nan}, "itl_target is nan"),
        ({"itl_target": -1.0}, "itl_target is -1.0"),
        ({"device": "x" * 201}, "device"),
        ({"speculate": "a\nb"}, "speculate"),
        ({"role": "router"}, "unknown role"),
    ],
)
def test_registrations_with_impossible_values_are_rejected(
    make_hello: MakeHello, change: dict[str, Any], reason: str
) -> None:
    hello = make_hello("prefill-0")
    assert make_fleet().rejection_reason(pb.InstanceFrame(hello=hello)) == ""
    for name, value in change.items():
        hello.ClearField(cast(Any, name))
        hello.MergeFrom(pb.Hello(**{name: value}))
    assert reason in make_fleet().rejection_reason(pb.InstanceFrame(hello=hello))


@pytest.mark.parametrize(
    ("ranks", "num_layers", "reason"),
    [(1, 2, ""), (1, 0, "a dimension of its KV layout is not from 1"), (2, 2, "2 and 4 heads on 2 ranks")],
)
def test_layouts_with_more_sections_are_checked(
    make_hello: MakeHello, ranks: int, num_layers: int, reason: str
) -> None:
    section = pb.Section(num_layers=num_layers, num_kv_heads=4, head_dim=16)
    hello = make_hello("prefill-0", more=[section], ranks=ranks)
    found = make_fleet().rejection_reason(pb.InstanceFrame(hello=hello))
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("change", [{"vocab_size": 51}, {"eos_token_ids": [3]}])
def test_instances_have_the_same_vocabulary(
    make_hello: MakeHello, make_connection: type[SentFrames], change: dict[str, Any]
) -> None:
    fleet, joining = make_fleet(), make_hello("decode-0")
    fleet.register(make_hello("prefill-0"), make_connection())
    joining.MergeFrom(pb.Hello(**change))
    assert "its vocabulary or its EOS tokens differ" in fleet.rejection_reason(pb.InstanceFrame(hello=joining))


def test_id_and_epoch_cannot_be_taken_over_without_the_nonce(
    make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    fleet, hello = make_fleet(), make_hello("prefill-0")
    fleet.register(hello, make_connection())
    assert fleet.rejection_reason(pb.InstanceFrame(hello=hello)) == "", "it may reconnect"
    thief = pb.Hello()
    thief.CopyFrom(hello)
    thief.nonce = b"x" * len(hello.nonce)
    assert fleet.rejection_reason(pb.InstanceFrame(hello=thief)).startswith("another instance 'prefill-0' is attached")


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (costs(prefill=()), "coefficients"),
        (costs(decode=(1, math.nan, 1)), "coefficient"),
        (costs(transfer=(-1, 1)), "coefficient"),
        (costs(prefill=(1, math.inf, 1)), "coefficient"),
        (heartbeat(counters={"engine_steps": math.nan}), "finite"),
        (heartbeat(counters={"engine_steps": -1.0}), "finite"),
        (heartbeat(counters={"not a name": 1.0}), "not the series"),
        (heartbeat(counters={'engine_steps{instance="b"}': 1.0}), "labels"),
        (heartbeat(counters={f"c{i}": 1.0 for i in range(MAX_COUNTERS + 1)}), "the limit is"),
        (heartbeat(free_blocks=100), "100 free blocks of 99"),
        (pb.InstanceFrame(outputs=pack([]), waited=-1.0), "it waited for -1.0 seconds"),
        (pb.InstanceFrame(outputs=pack([]), waited=math.nan), "it waited for nan seconds"),
        (pb.InstanceFrame(blocks=pb.Blocks(added=b"x")), "KV events of 1 bytes"),
        (pb.InstanceFrame(blocks=pb.Blocks(added=bytes(KEY_BYTES * (MAX_KEYS_PER_FRAME + 1)))), "KV events of"),
        (pb.InstanceFrame(blocks=pb.Blocks(added=b"".join(bytes([i]) * KEY_BYTES for i in range(100)))), "more keys"),
        (pb.InstanceFrame(others=pb.Load(prefill_tokens=2**63)), "a load of more"),
        (pb.InstanceFrame(hello=pb.Hello(instance_id="decode-9", role="decode")), "second Hello"),
        (pb.InstanceFrame(), "unknown kind"),
    ],
)
def test_an_invalid_frame_deregisters_the_instance_with_a_reason(
    make_hello: MakeHello, make_connection: type[SentFrames], frame: pb.InstanceFrame, reason: str
) -> None:
    fleet, connection = make_fleet(), make_connection()
    instance = fleet.register(make_hello("prefill-0"), connection)
    fleet.handle_frame(instance, costs())
    assert fleet.instances
    fleet.handle_frame(instance, frame)
    assert not fleet.instances and fleet.num_invalid_frames == 1
    assert reason in connection[-1].refused.message


def test_unknown_counters_are_not_served(make_hello: MakeHello, make_connection: type[SentFrames]) -> None:
    fleet = make_fleet()
    metrics = Metrics(fleet)
    instance = fleet.register(make_hello("prefill-0"), make_connection())
    fleet.handle_frame(instance, heartbeat(counters={"requests": 1.0, "engine_steps": 3.0}))
    text = metrics.text().decode()
    assert 'pdserve_engine_steps_total{instance="prefill-0",role="prefill"} 3.0' in text
    assert "pdserve_requests_total{instance" not in text


NUMBERS = st.floats(width=64) | st.sampled_from([0.0, 1.0, 1e6, 1e308, -1.0])
UINTS = st.sampled_from([0, 1, 99, 2**31, 2**32 - 1])
LONGS = UINTS | st.sampled_from([2**60, 2**64 - 1])
SERIES = st.sampled_from(["engine_steps", 'store_hits{decision="a"}', "store_hits", "", "a{", "kv_cache_blocks"])
LISTS = st.lists(NUMBERS, max_size=4)
FRAMES = st.one_of(
    st.builds(pb.Heartbeat, waiting=UINTS, free_blocks=UINTS, counters=st.dictionaries(SERIES | st.text(), NUMBERS)),
    st.builds(pb.Costs, prefill=LISTS, decode=LISTS, transfer=LISTS).map(lambda model: pb.Heartbeat(costs=model)),
    st.builds(pb.Blocks, added=st.binary(max_size=64), removed=st.binary(max_size=64), untold=UINTS),
    st.builds(pb.Load, requests=UINTS, prefill_tokens=LONGS, output_tokens=LONGS, attended_tokens=LONGS),
    st.builds(pb.Hello, instance_id=st.text(), role=st.sampled_from(["both", "?"]), block_size=UINTS),
    st.builds(pb.Draining),
)
FIELDS = {pb.Heartbeat: "heartbeat", pb.Blocks: "blocks", pb.Load: "others", pb.Hello: "hello", pb.Draining: "draining"}


@settings(max_examples=examples(2))
@given(messages=st.lists(FRAMES, max_size=6))
def test_no_frame_makes_the_router_raise_or_produce_numbers_that_are_not_finite(
    make_hello: MakeHello, make_connection: type[SentFrames], messages: list[Any]
) -> None:
    fleet = make_fleet()
    metrics = Metrics(fleet)
    instance = fleet.register(make_hello("both-0"), make_connection())
    for message in messages:
        fleet.handle_frame(instance, pb.InstanceFrame(**{FIELDS[type(message)]: message}))
        _check_views(fleet, instance, metrics)


def _check_views(fleet: Fleet, instance: InstanceHandle, metrics: Metrics) -> None:
    """Read everything that the router derives from the frames."""
    json.dumps(instance.as_dict(0.0), allow_nan=False)
    json.dumps(fleet.index.num_blocks(instance.id))
    lines = metrics.text().decode().splitlines()
    assert not [line for line in lines if not line.startswith("#") and line.endswith((" NaN", "Inf"))]
    for decode in (False, True):
        request = PlacementRequest(tokens=100, output_tokens=10, decode=decode)
        for policy in POLICIES:
            decision = decide(policy, [instance.candidate], request)
            assert all(math.isfinite(one.score) for one in decision.candidates)
