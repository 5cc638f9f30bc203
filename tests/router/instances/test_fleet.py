"""Registration in the fleet: which instances can serve together, heartbeats, load and leases."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.costs import Costs
from pdserve.keys import STATE_WINDOW, Layout
from pdserve.output import Output, pack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.scheduling.policy import Load, PlacementRequest, decide

if TYPE_CHECKING:
    from tests.router.instances.conftest import MakeHello, SentFrames


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet("router", "model", 1.0, lambda: 0.0)
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
    return fleet


def rejection(fleet: Fleet, attached: pb.Hello, joining: pb.Hello, connection: SentFrames) -> str:
    """Attach one instance, and return the reason for which the other one is rejected."""
    fleet.register(attached, connection)
    return fleet.rejection_reason(pb.InstanceFrame(hello=joining))


@pytest.mark.parametrize(
    ("attached", "joining"),
    [
        (dict(name="prefill-0"), dict(name="decode-0")),
        (dict(name="prefill-0"), dict(name="decode-0", block_size=32, convert=True)),
        (dict(name="decode-0", dtype="float32", convert=True), dict(name="prefill-0")),
        (dict(name="prefill-0"), dict(name="prefill-1", block_size=32)),  # no hand-over between two of these
        (dict(name="decode-0"), dict(name="decode-1", block_size=32)),
        (dict(name="both-0", convert=True), dict(name="both-1", block_size=32, convert=True)),
        (dict(name="both-0"), dict(name="decode-0", block_size=32, convert=True)),
    ],
)
def test_instances_that_can_hand_over_are_accepted(
    fleet: Fleet,
    make_hello: MakeHello,
    make_connection: type[SentFrames],
    attached: dict[str, Any],
    joining: dict[str, Any],
) -> None:
    assert rejection(fleet, make_hello(**attached), make_hello(**joining), make_connection()) == ""


@pytest.mark.parametrize(
    ("attached", "joining", "converter"),
    [
        (dict(name="prefill-0"), dict(name="decode-0", block_size=32), "decode-0"),
        (dict(name="decode-0"), dict(name="prefill-0", dtype="float32"), "decode-0"),
        (dict(name="prefill-0", convert=True), dict(name="decode-0", block_size=32), "decode-0"),
        (dict(name="both-0", convert=True), dict(name="both-1", block_size=32), "both-1"),
        (dict(name="both-0"), dict(name="prefill-0", block_size=32), "both-0"),
    ],
)
def test_rejection_names_the_instance_that_needs_convert_kv(
    fleet: Fleet,
    make_hello: MakeHello,
    make_connection: type[SentFrames],
    attached: dict[str, Any],
    joining: dict[str, Any],
    converter: str,
) -> None:
    reason = rejection(fleet, make_hello(**attached), make_hello(**joining), make_connection())
    assert reason.endswith(f"make them the same, or start {converter} with --convert-kv")
    assert f"{attached['name']} " in reason and f"{joining['name']} " in reason


@pytest.mark.parametrize(
    ("attached", "joining", "named"),
    [
        (dict(name="prefill-0", numerics="x"), dict(name="decode-0"), "decode-0"),
        (dict(name="decode-0", numerics="x"), dict(name="prefill-0", inexact=True), "decode-0"),
        (dict(name="prefill-0"), dict(name="decode-0", numerics="x", convert=True, block_size=32), "decode-0"),
        (dict(name="prefill-0"), dict(name="decode-0", numerics="x", inexact=True), ""),
        (dict(name="prefill-0"), dict(name="prefill-1", numerics="x"), ""),
        (dict(name="prefill-0"), dict(name="decode-0", dtype="float32", numerics="x", convert=True), ""),
    ],
)
def test_instances_of_two_numerics_classes_need_allow_inexact(
    fleet: Fleet,
    make_hello: MakeHello,
    make_connection: type[SentFrames],
    attached: dict[str, Any],
    joining: dict[str, Any],
    named: str,
) -> None:
    reason = rejection(fleet, make_hello(**attached), make_hello(**joining), make_connection())
    assert reason.endswith(f"start {named} with --allow-inexact") if named else reason == ""


@pytest.mark.parametrize(
    "change",
    [
        *({"model_fingerprint": "n"}, {"num_kv_heads": 1}, {"head_dim": 4}, {"version": 2}),
        {"more": [pb.Section(num_layers=1, num_kv_heads=1, head_dim=16)]},
    ],
)
def test_layouts_that_cannot_be_converted_are_rejected(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames], change: dict[str, Any]
) -> None:
    reason = rejection(
        fleet, make_hello("prefill-0"), make_hello("decode-0", convert=True, **change), make_connection()
    )
    assert reason == "its weights or its KV layout differ from those of prefill-0"


def test_heartbeats_are_acknowledged_every_few_seconds(
    make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    now, connection, acknowledged = 0.0, make_connection(), list[float]()
    fleet = Fleet("router", "model", 1.0, lambda: now)
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
    instance = fleet.register(make_hello("prefill-0"), connection)
    while now < 10:
        fleet.handle_frame(instance, pb.InstanceFrame(heartbeat=pb.Heartbeat()))
        acknowledged += [now] * (len(connection) - len(acknowledged))
        now += 0.5
    assert acknowledged == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert {frame.WhichOneof("frame") for frame in connection} == {"heard"}


def test_stamps_age_while_their_frame_waits_to_be_written(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    stamps = list[dict[str, float]]()
    fleet.listener = cast(Any, SimpleNamespace(on_output=lambda _, output: stamps.append(output.stamps)))
    instance = fleet.register(make_hello("decode-0"), make_connection())
    outputs = pack([Output(request_id="r", stamps={"reserved": 2.0, "kv_ready": 1.0}), Output(request_id="s")])
    fleet.handle_frame(instance, pb.InstanceFrame(outputs=outputs, waited=0.5))
    assert stamps == [{"reserved": 2.5, "kv_ready": 1.5}, {}]


def test_instances_serve_in_their_role_unless_they_drain_or_leave(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    def serving() -> list[str]:
        return [instance.id for instance in fleet.serving["decode"]]

    assert serving() == []
    first, second = (fleet.register(make_hello(name), make_connection()) for name in ("decode-0", "decode-1"))
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None, on_draining=lambda instance: None))
    assert serving() == ["decode-0", "decode-1"]
    fleet.begin_drain(first)
    assert serving() == ["decode-1"]
    fleet.handle_frame(second, pb.InstanceFrame(draining=pb.Draining()))
    assert serving() == []
    for instance, role in ((first, "decode"), (second, "prefill")):
        hello = pb.Hello()
        hello.CopyFrom(instance.hello)
        hello.role = role
        fleet.handle_frame(instance, pb.InstanceFrame(hello=hello))
    assert serving() == ["decode-0"]
    fleet.deregister(first, "it left")
    assert serving() == []


def test_an_instance_that_was_drained_empty_is_not_lost(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames], caplog: pytest.LogCaptureFixture
) -> None:
    """One that dies as it drains, with requests, is: no one has planned that."""
    caplog.set_level("INFO")
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None, on_draining=lambda instance: None))
    names = ("decode-0", "decode-1", "decode-2")
    drained, cut_off, died = (fleet.register(make_hello(name), make_connection()) for name in names)
    cut_off.assign("a request", Load())
    for instance, is_lost in ((drained, False), (cut_off, True), (died, True)):
        if instance is not died:
            fleet.begin_drain(instance)
        before = fleet.num_lost
        fleet.deregister(instance, "it left")
        assert fleet.num_lost - before == is_lost
        last = caplog.records[-1]
        assert (last.levelname, vars(last)["event"]) == (("WARNING", "left") if is_lost else ("INFO", "drained"))


def test_a_joining_instance_is_compared_with_all_kinds_of_instances(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    for number in range(3):
        fleet.register(make_hello(f"prefill-{number}"), make_connection())
    fleet.register(make_hello("decode-0", block_size=32, convert=True), make_connection())
    assert not fleet.rejection_reason(pb.InstanceFrame(hello=make_hello("prefill-3", block_size=32)))
    reason = fleet.rejection_reason(pb.InstanceFrame(hello=make_hello("decode-1", block_size=32)))
    assert reason.endswith("make them the same, or start decode-1 with --convert-kv")


def test_a_heartbeat_tells_the_room_in_the_pool(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    instance = fleet.register(make_hello("prefill-0"), make_connection())
    fleet.handle_frame(instance, pb.InstanceFrame(heartbeat=pb.Heartbeat(free_blocks=3)))
    assert instance.candidate.free_tokens == 3 * instance.hello.block_size


def test_instances_that_have_moved_no_kv_are_judged_by_those_that_have(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    """By what they assume instead, the first one that got KV would get all of it under light load."""
    used, unused = (fleet.register(make_hello(name), make_connection()) for name in ("decode-0", "decode-1"))
    step = {"prefill": (0.0, 1e-5, 0.0), "decode": (0.001, 0.0, 0.0)}
    for transfer in ((1e-4, 1e-10), (2e-4, 1e-10)):
        for instance, own in ((used, transfer), (unused, Costs.transfer)):
            costs = pb.Costs(**step, transfer=own)
            fleet.handle_frame(instance, pb.InstanceFrame(heartbeat=pb.Heartbeat(costs=costs)))
        assert used.candidate.costs.transfer == unused.candidate.costs.transfer == transfer
    candidates = [used.candidate, unused.candidate]
    requests = [PlacementRequest(100, turn, output_tokens=5, decode=True) for turn in range(10)]
    assert Counter(decide("auto", candidates, one).chosen for one in requests) == {"decode-0": 5, "decode-1": 5}
    costs = pb.Costs(**step, transfer=(0.1, 1e-9))
    fleet.handle_frame(unused, pb.InstanceFrame(heartbeat=pb.Heartbeat(costs=costs)))
    assert {decide("auto", candidates, one).chosen for one in requests} == {"decode-0"}, "what is measured counts"


def test_instances_that_make_no_steps_are_judged_by_those_that_do(
    make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    """An instance that gets no requests never corrects what it calibrated while others were starting."""
    time = [1000.0]
    fleet = Fleet("router", "model", 1e9, lambda: time[0])
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: None))
    busy, idle, other = (fleet.register(make_hello(f"decode-{i}"), make_connection()) for i in range(3))
    other.hello.kernel = "triton"
    models = {busy: 1.0, idle: 2.0, other: 3.0}
    steps = dict.fromkeys(models, 0)

    def hear_all(seconds: float, *working: InstanceHandle) -> list[float]:
        """Return by which ITL each is judged, in ms."""
        for _ in range(int(seconds)):
            time[0] += 1
            fleet.expire_leases()
            for instance, ms in models.items():
                steps[instance] += instance in working
                costs = pb.Costs(prefill=(0.0, ms / 1e5, 0.0), decode=(ms / 1e3, 0.0, 0.0), transfer=(1e-4, 1e-10))
                heartbeat = pb.Heartbeat(costs=costs, counters={"engine_steps": steps[instance]})
                fleet.handle_frame(instance, pb.InstanceFrame(heartbeat=heartbeat))
        return [one.candidate.costs.decode[0] * 1e3 for one in fleet.instances.values()]

    assert hear_all(1) == [1, 2, 3], "no other instance has made a step"
    assert hear_all(1, busy) == [1, 1, 3], "one with another kernel is no peer"
    assert idle.own_costs.decode[0] == 0.002, "what it reports is shown, and a profile may be made of it"
    assert idle.as_dict(0.0)["costs"] == vars(idle.own_costs)
    candidates = [busy.candidate, idle.candidate]
    requests = [PlacementRequest(100, turn, output_tokens=5, decode=True) for turn in range(10)]
    assert Counter(decide("auto", candidates, one).chosen for one in requests) == {"decode-0": 5, "decode-1": 5}
    assert hear_all(1, idle) == [1, 2, 3], "steps of its own count"
    assert hear_all(5, busy) == [1, 2, 3], "for some time"
    assert hear_all(20, busy) == [1, 1, 3]
    fleet.deregister(busy, "test")
    del models[busy]
    assert hear_all(1) == [2, 3], "an instance is not judged by one that has left"


def test_load_is_that_of_own_and_other_routers_requests(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    instance = fleet.register(make_hello("decode-0"), make_connection())
    instance.assign("ours", Load(output_tokens=7))
    instance.update_other_load(pb.Load(requests=2, output_tokens=5))
    instance.update_other_load(pb.Load(requests=1))
    instance.assign("ours", Load(output_tokens=6))
    assert (instance.candidate.requests, instance.candidate.output_tokens) == (2, 6)
    instance.unassign("ours")
    instance.unassign("ours")
    assert (instance.candidate.requests, instance.candidate.output_tokens) == (1, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 9)), max_size=30))
def test_the_longest_prompt_of_an_instance_is_known(
    make_hello: MakeHello, make_connection: type[SentFrames], changes: list[tuple[int, int]]
) -> None:
    """`changes` are (request, prompt tokens left; -1: it leaves)."""
    fleet = Fleet("router", "model", 1.0, lambda: 0.0)
    instance, left = fleet.register(make_hello("prefill-0"), make_connection()), dict[str, int]()
    for request, tokens in changes:
        left[str(request)] = tokens
        if tokens < 0:
            del left[str(request)]
            instance.unassign(str(request))
        else:
            instance.assign(str(request), Load(prefill_tokens=tokens))
        assert instance.candidate.longest.prefill_tokens == max(left.values(), default=0)


def test_expired_lease_deregisters(make_hello: MakeHello, make_connection: type[SentFrames]) -> None:
    now, lost = 0.0, list[str]()
    fleet = Fleet("router", "model", 3.0, lambda: now)
    fleet.listener = cast(Any, SimpleNamespace(on_lost=lambda instance: lost.append(instance.id)))
    silent, alive = (fleet.register(make_hello(name), make_connection()) for name in ("decode-0", "decode-1"))
    while now < 6.0:
        now += fleet.lease_check_interval_s
        fleet.handle_frame(alive, pb.InstanceFrame(heartbeat=pb.Heartbeat()))
        fleet.expire_leases()
        assert lost == ([silent.id] if now > 3.0 else [])


def test_time_in_which_the_router_was_stalled_does_not_count(
    make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    now = 0.0
    fleet = Fleet("router", "model", 3.0, lambda: now)
    fleet.register(make_hello("decode-0"), make_connection())
    now = 60.0
    fleet.expire_leases()
    assert fleet.instances


def test_one_state_is_forecast_of_a_prompt_and_of_a_sequence(
    fleet: Fleet, make_hello: MakeHello, make_connection: type[SentFrames]
) -> None:
    """Of recurrent layers, whose blocks of 16 tokens have a state each."""
    state = pb.Section(num_layers=1, num_kv_heads=1, head_dim=640, latent=True, window=STATE_WINDOW)
    candidate = fleet.register(make_hello("decode-0", more=[state]), make_connection()).candidate
    full, states = Layout.from_message(make_hello("decode-0", more=[state]).layout).groups
    assert candidate.token_bytes * 16 == full.block_bytes and candidate.capacity_tokens == 99 * 16
    assert candidate.window_bytes(16) == candidate.window_bytes(500) == states.block_bytes
    assert fleet.instances["decode-0"].as_dict(0.0)["kv_groups"] == [
        {"window": None, "block_bytes": full.block_bytes, "states": False},
        {"window": 2, "block_bytes": states.block_bytes, "states": True},
    ]
