"""Orders to load and unload adapters, over the simulated cluster: who gets them, and what comes of their answers."""

from typing import Any

import pytest

from pdserve.errors import Unavailable
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.adapter_changes import NO_INSTANCE
from pdserve.router.instances.fleet import InstanceHandle

OLD, NEW = bytes([1]) * 16, bytes([2]) * 16


def has(cluster: Any, instance: InstanceHandle, *adapters: pb.Adapter, loads: bool = True) -> None:
    """Let an instance report its adapters in a second Hello, as it does after a change."""
    if instance.hello.loads_adapters != loads:
        instance.hello.loads_adapters = loads
    hello = pb.Hello()
    hello.CopyFrom(instance.hello)
    del hello.adapters[:]
    hello.adapters.extend(adapters)
    instance.hello, instance.adapters = hello, frozenset(one.digest for one in adapters)
    cluster.dispatcher.fleet.on_change()


@pytest.fixture
def cluster(make_cluster: Any) -> Any:
    cluster = make_cluster("prefill", "decode")
    for instance in cluster.instances:
        has(cluster, instance)
    return cluster


def answer(cluster: Any, instance: InstanceHandle, order: Any, error: str = "") -> None:
    cluster.dispatcher.on_adapter_changed(instance, pb.AdapterChanged(number=order.number, error=error))


def test_all_instances_load_it_before_the_order_is_done(cluster: Any) -> None:
    done: list[str] = []
    cluster.dispatcher.change_adapter("sql", "path", False, done.append)
    prefill, decode = cluster.instances
    [(kind, order)], [(_, other)] = cluster.sent(prefill), cluster.sent(decode)
    assert kind == "change_adapter" and order == other and (order.name, order.path) == ("sql", "path")
    answer(cluster, prefill, order)
    answer(cluster, prefill, order)
    assert not done
    answer(cluster, decode, order)
    assert done == [""]


def test_what_one_cannot_load_the_others_unload(cluster: Any) -> None:
    done: list[str] = []
    prefill, decode = cluster.instances
    for replaces in (False, True):
        cluster.dispatcher.change_adapter("sql", "path", replaces, done.append)
        [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
        answer(cluster, prefill, order)
        answer(cluster, decode, order, "it is of another base")
        if not replaces:
            [(_, order)] = cluster.sent(prefill)
            assert (order.name, order.path) == ("sql", "") and not done
            answer(cluster, prefill, order)
        assert cluster.sent(prefill) == cluster.sent(decode) == []
        assert done.pop() == "decode-1: it is of another base"


def test_nobody_waits_for_a_lost_instance_to_unload(cluster: Any) -> None:
    done: list[str] = []
    prefill, decode = cluster.instances
    for before in (False, True):
        cluster.dispatcher.change_adapter("sql", "path", False, done.append)
        [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
        answer(cluster, decode, order)
        if before:
            cluster.fleet.deregister(decode, "it is killed before it is told")
        answer(cluster, prefill, order, "it is of another base")
        if not before:
            [(_, order)] = cluster.sent(decode)
            answer(cluster, decode, order, "it is gone")
        assert done.pop() == "prefill-0: it is of another base"


def test_an_instance_that_is_lost_is_not_waited_for(cluster: Any) -> None:
    done: list[str] = []
    prefill, decode = cluster.instances
    cluster.dispatcher.change_adapter("sql", "path", False, done.append)
    [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
    cluster.fleet.deregister(decode, "it is killed while it loads")
    assert not done
    answer(cluster, prefill, order)
    assert done == [""]
    cluster.dispatcher.change_adapter("sql", "path", True, done.append)
    cluster.fleet.deregister(prefill, "too")
    assert done[1] == "the instances were lost before they answered"
    cluster.dispatcher.change_adapter("sql", "path", True, done.append)
    assert done[2] == NO_INSTANCE


def test_an_instance_that_never_answers_is_not_waited_for_for_ever(cluster: Any) -> None:
    """It is told again, should it have missed the order."""
    prefill, decode = cluster.instances
    cluster.dispatcher.change_adapter("sql", "path", False, lambda _: None)
    [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
    has(cluster, prefill, pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=2))
    answer(cluster, prefill, order)
    for seconds, name in ((500, "a"), (200, "b")):
        cluster.now += seconds
        cluster.dispatcher.change_adapter(name, "path", False, lambda _: None)
        (cluster.sent(prefill), cluster.sent(decode))
    answer(cluster, decode, order, "it is late")
    assert cluster.sent(prefill) == cluster.sent(decode) == [], "what it answers changes nothing"
    cluster.dispatcher.on_joined(prefill)
    assert [(one.name, one.digest) for _, one in cluster.sent(decode)] == [("sql", NEW)]


def test_an_instance_that_attaches_is_told_what_it_lacks(cluster: Any) -> None:
    """After a restart, for example; nothing if it has it, or loads nothing at run time."""
    prefill, decode = cluster.instances
    has(cluster, prefill, pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=2))
    has(cluster, decode, pb.Adapter(name="sql", digest=OLD, path="/sql", loaded_at=1))
    for joined in cluster.instances:
        cluster.dispatcher.on_joined(joined)
        [(_, order)] = cluster.sent(decode)
        assert (order.name, order.path, order.replaces, order.digest) == ("sql", "/sql", True, NEW)
        cluster.dispatcher.on_joined(joined)
        assert cluster.sent(decode) == cluster.sent(prefill) == [], "it is under way"
        answer(cluster, decode, order)
    has(cluster, decode, loads=False)
    cluster.dispatcher.on_joined(decode)
    assert cluster.sent(decode) == []


@pytest.mark.parametrize("last", ["prefill", "decode"])
def test_an_adapter_that_was_unloaded_does_not_come_back_with_an_instance_that_was_away(
    cluster: Any, last: str
) -> None:
    """Nor if that attaches before the others, to a router that has restarted."""
    prefill, decode = cluster.instances
    joined = prefill if last == "prefill" else decode
    sql = pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=2)
    too = pb.Adapter(name="sql, too", digest=NEW, path="/sql", loaded_at=1)
    lost = pb.Adapter(lost_name="sql", digest=NEW, loaded_at=3)  # it keeps those that have lost their names for a while
    has(cluster, prefill, lost, too)
    has(cluster, decode, sql, too)
    cluster.dispatcher.on_joined(joined)
    assert cluster.sent(prefill) == []
    [(_, order)] = cluster.sent(decode)
    assert (order.name, order.path) == ("sql", ""), "and it keeps the other name"
    again = pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=4)
    has(cluster, prefill, lost, again, too)
    cluster.dispatcher.on_joined(joined)
    assert cluster.sent(prefill) == cluster.sent(decode) == []
    has(cluster, prefill, lost, too)
    cluster.dispatcher.change_adapter("sql", "/sql", False, lambda _: None)  # it is being loaded again
    (cluster.sent(prefill), cluster.sent(decode))
    cluster.dispatcher.on_joined(joined)
    assert all(one.path for instance in cluster.instances for _, one in cluster.sent(instance))


def test_an_instance_with_the_adapter_under_no_name_loads_it_again(cluster: Any) -> None:
    """It was away when the name went back to earlier weights, which it keeps for a while only."""
    prefill, decode = cluster.instances
    has(cluster, prefill, pb.Adapter(name="sql", digest=OLD, path="/sql", loaded_at=3))
    lost = pb.Adapter(lost_name="sql", digest=OLD, loaded_at=2)
    has(cluster, decode, lost, pb.Adapter(name="sql", digest=NEW, path="/new", loaded_at=2))
    cluster.dispatcher.on_joined(decode)
    assert cluster.sent(prefill) == []
    [(_, order)] = cluster.sent(decode)
    assert (order.name, order.path, order.replaces) == ("sql", "/sql", True)


def test_what_one_cannot_load_another_stores_for_it(cluster: Any) -> None:
    done: list[str] = []
    prefill, decode = cluster.instances
    loaded = pb.Adapter(name="sql", digest=NEW, path="/folder/sql", loaded_at=2)
    for fault in ("", "the KV store has no room for it", "the KV store does not have it"):
        for instance in cluster.instances:
            has(cluster, instance)
        cluster.dispatcher.change_adapter("sql", "sql", False, done.append)
        [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
        assert (order.digest, order.offers) == (b"", False)
        answer(cluster, decode, order, "sql cannot be read")
        has(cluster, prefill, loaded)
        answer(cluster, prefill, order)
        [(_, offer)] = cluster.sent(prefill)
        assert offer.offers and offer.digest == NEW and cluster.sent(decode) == [] and not done
        if "room" in fault:
            answer(cluster, prefill, offer, fault)
        else:
            answer(cluster, prefill, offer)
            [(_, fetch)] = cluster.sent(decode)
            assert (fetch.digest, fetch.path, fetch.offers) == (NEW, "/folder/sql", False)
            has(cluster, decode, *([] if fault else [loaded]))
            answer(cluster, decode, fetch, fault)
        if fault:
            [(_, unload)] = cluster.sent(prefill)
            assert (unload.name, unload.path) == ("sql", "") and not done
            answer(cluster, prefill, unload)
        assert done.pop() == (fault and f"decode-1: {'sql cannot be read' if 'room' in fault else fault}")
        assert cluster.sent(prefill) == cluster.sent(decode) == []


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_an_instance_that_is_lost_while_one_stores_an_adapter(cluster: Any, lost: str) -> None:
    """The order ends, whether the lost instance was storing the adapter or waiting for it."""
    done: list[str] = []
    prefill, decode = cluster.instances
    cluster.dispatcher.change_adapter("sql", "sql", False, done.append)
    [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
    has(cluster, prefill, pb.Adapter(name="sql", digest=NEW, path="/sql"))
    answer(cluster, prefill, order)
    answer(cluster, decode, order, "sql cannot be read")
    [(_, offer)] = cluster.sent(prefill)
    if lost == "prefill":
        cluster.fleet.deregister(prefill, "it is killed while it stores")
        assert done == ["decode-1: sql cannot be read"]
    else:
        cluster.fleet.deregister(decode, "it is killed")
        answer(cluster, prefill, offer)
        assert done == [""]


def test_an_instance_that_attaches_while_others_load(cluster: Any) -> None:
    """It is told at the end, when they have it."""
    done: list[str] = []
    prefill, decode = cluster.instances
    has(cluster, decode, loads=False)
    cluster.dispatcher.change_adapter("sql", "sql", False, done.append)
    [(_, order)] = cluster.sent(prefill)
    has(cluster, decode)
    cluster.dispatcher.on_joined(decode)
    assert cluster.sent(decode) == []
    has(cluster, prefill, pb.Adapter(name="sql", digest=NEW, path="/sql"))
    answer(cluster, prefill, order)
    [(_, order)] = cluster.sent(decode)
    assert done == [""] and order.digest == NEW


@pytest.mark.parametrize("had", [None, NEW, OLD], ids=["it has none", "it has it", "it has earlier weights"])
def test_an_instance_that_attaches_while_others_unload(cluster: Any, had: bytes | None) -> None:
    """It is not told to load it, nor are those that have unloaded it; and if it has one of the name, it unloads that."""
    done: list[str] = []
    prefill, decode = cluster.instances
    has(cluster, decode, pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=2))
    has(cluster, prefill, loads=False)
    cluster.dispatcher.change_adapter("sql", "", False, done.append)
    [(_, order)] = cluster.sent(decode)
    has(cluster, prefill, *([pb.Adapter(name="sql", digest=had, path="/sql", loaded_at=1)] if had else []))
    cluster.dispatcher.on_joined(prefill)
    orders = [(one.name, one.path) for _, one in cluster.sent(prefill)]
    assert orders == ([("sql", "")] if had else [])
    has(cluster, decode, pb.Adapter(lost_name="sql", digest=NEW, loaded_at=3))
    answer(cluster, decode, order)
    assert done == [""] and not [one.path for _, one in cluster.sent(decode) if one.path]


def test_an_instance_that_has_unloaded_it_is_not_told_to_load_it_again(cluster: Any) -> None:
    """Another one attaches while a third has not unloaded it yet."""
    prefill, decode = cluster.instances
    sql = pb.Adapter(name="sql", digest=NEW, path="/sql", loaded_at=2)
    for instance in cluster.instances:
        has(cluster, instance, sql)
    cluster.dispatcher.change_adapter("sql", "", False, lambda _: None)
    [(_, order)], _ = cluster.sent(prefill), cluster.sent(decode)
    has(cluster, prefill, pb.Adapter(lost_name="sql", digest=NEW, loaded_at=3))
    answer(cluster, prefill, order)
    cluster.dispatcher.on_joined(decode)
    assert cluster.sent(prefill) == []


def test_only_instances_that_have_an_adapter_get_its_requests(cluster: Any) -> None:
    """Of two weights of one name, new requests get the later ones."""
    prefill, decode = cluster.instances
    new, old = (pb.Adapter(name="sql", digest=digest, path="/sql", loaded_at=at) for digest, at in ((NEW, 2), (OLD, 1)))
    has(cluster, prefill, new)
    has(cluster, decode, old)
    model = cluster.dispatcher.model
    assert model is not None and model.adapters["sql"].digest == NEW
    state = cluster.open(adapter=NEW)
    assert (state.prefill, state.decode) == (prefill, None)
    has(cluster, decode, new, pb.Adapter(digest=OLD))
    state = cluster.open("second", adapter=NEW)
    assert (state.prefill, state.decode) == (prefill, decode)
    state = cluster.open("third", adapter=OLD)
    assert (state.prefill, state.decode) == (decode, None), "requests that began with the old ones may move there"
    with pytest.raises(Unavailable, match="no instance with the adapter 'x' for"):
        cluster.open("fourth", adapter=bytes(16), adapter_name="x")


def test_a_second_hello_may_differ_in_adapters(cluster: Any) -> None:
    """A draining instance stays so."""
    _, decode = cluster.instances
    hello = pb.Hello()
    hello.CopyFrom(decode.hello)
    hello.adapters.add(name="sql", digest=NEW)
    cluster.fleet.begin_drain(decode)
    cluster.fleet.handle_frame(decode, pb.InstanceFrame(hello=hello))
    assert decode.adapters == {NEW} and decode.is_draining
    hello.max_model_len += 1
    cluster.fleet.handle_frame(decode, pb.InstanceFrame(hello=hello))
    [*_, (kind, refused)] = cluster.sent(decode)
    assert kind == "refused" and "more than the role and the adapters" in refused.message
