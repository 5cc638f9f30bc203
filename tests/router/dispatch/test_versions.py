"""Routers serve instances of the version before, and keep from them what they do not know."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import request
from pdserve.control import frame_connection
from pdserve.errors import BadRequest
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.instances import fleet
from pdserve.router.instances.fleet import InstanceHandle

from .conftest import Cluster

THIS = frame_connection.PROTOCOL_VERSION
NEW_FIELD = SamplingParams(max_tokens=4, min_p=0.5)


@pytest.fixture(autouse=True)
def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version of the router, which has the field `min_p` and serves this version's instances."""
    monkeypatch.setitem(request.SINCE, "min_p", THIS + 1)
    monkeypatch.setattr(fleet, "PROTOCOL_VERSION", THIS + 1)
    monkeypatch.setattr(fleet, "OLDEST_VERSION", THIS)


def update(instance: InstanceHandle) -> None:
    instance.hello.protocol_version = THIS + 1


@pytest.mark.parametrize(
    ("version", "is_served"), [(THIS - 1, False), (THIS, True), (THIS + 1, True), (THIS + 2, False)]
)
def test_instances_of_this_version_and_the_one_before_are_served(
    make_cluster: type[Cluster], version: int, is_served: bool
) -> None:
    hello = make_cluster("both").instances[0].hello
    changed = pb.Hello()
    changed.CopyFrom(hello)
    changed.protocol_version, changed.instance_id = version, "other"
    reason = make_cluster().fleet.rejection_reason(pb.InstanceFrame(hello=changed))
    assert ("speaks control protocol" in reason) is not is_served
    assert ("update routers before instances" in reason) is (version > THIS + 1)


def test_a_new_field_goes_to_instances_that_know_it(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", "both", "both", policy="round_robin")
    update(cluster.instances[1])
    for i in range(4):
        assert cluster.open(f"new-{i}", sampling=NEW_FIELD).final_instance is cluster.instances[1]
    chosen = {cluster.open(f"old-{i}").final_instance.id for i in range(6)}
    assert chosen == {one.id for one in cluster.instances}, "what all know goes to all"


def test_a_new_field_that_no_instance_knows_is_refused(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("prefill", "decode")
    with pytest.raises(BadRequest, match="no attached instance knows min_p yet") as refused:
        cluster.open(sampling=NEW_FIELD)
    assert refused.value.param == "min_p"
    assert not cluster.dispatcher.states


@pytest.mark.parametrize("settings", [{}, {"no_instance_timeout": 30.0}])
def test_a_stream_with_a_new_field_does_not_move_to_an_instance_that_does_not_know_it(
    make_cluster: type[Cluster], settings: dict[str, Any]
) -> None:
    cluster = make_cluster("both", "both", **settings)
    old, new = cluster.instances
    update(new)
    state = cluster.open(sampling=NEW_FIELD)
    cluster.deliver(new, token_ids=[7])
    cluster.fleet.deregister(new, "test")
    assert not old.requests
    assert state.machine.is_over is not bool(settings), "it waits for one that knows it, if it may"


def test_a_request_that_waits_is_refused_by_the_first_instance_that_does_not_know_its_field(
    make_cluster: type[Cluster],
) -> None:
    """Others that wait are served: neither the instance nor the router is to blame."""
    cluster = make_cluster(no_instance_timeout=30.0)
    new, old = cluster.open("new", sampling=NEW_FIELD), cluster.open("old")
    instance = cluster.join("both", "both")
    cluster.fleet.on_joined(instance)
    assert [*instance.requests] == [old.id]
    with pytest.raises(BadRequest, match="no attached instance knows min_p yet"):
        new.take()
    cluster.advance(1.0)
