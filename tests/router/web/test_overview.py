"""The snapshot at /debug/overview, from a real dispatcher through the HTTP application."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdserve.counters import series
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.web.overview import HISTORY_LENGTH, MAX_INSTANCES_IN_HISTORY

if TYPE_CHECKING:
    from tests.router.conftest import Client
    from tests.router.web.conftest import Scene


def test_requests_and_faults(make_scene: Callable[..., Scene], make_client: type[Client]) -> None:
    scene = make_scene()
    client = make_client(scene.app)
    empty = client.get("/debug/overview").json()
    assert not empty["ready"] and empty["why"] == "no prefill and no decode instance is registered"
    prefill, decode = scene.join("prefill", "p"), scene.join("decode", "d")
    loaded = {series("kv_transfer_bytes", connector="shm", direction="load"): 4096.0, "generation_tokens": 2.0}
    decode.update_heartbeat(pb.Heartbeat(running=1, counters=loaded))
    scene.serve("r", prefill, decode)
    scene.dispatcher.open(RoutedRequest(request_id="s", prompt=[1], sampling=SamplingParams(max_tokens=3)))
    scene.join("decode", "e")
    scene.fleet.deregister(decode, "test")
    answer = client.get("/debug/overview")
    assert answer.headers["cache-control"] == "no-store"
    now = answer.json()
    assert now["ready"] and now["router"] == "router" and now["slo"] == {"ttft": 1.0}
    assert now["requests"] == {"length": 1} and (now["under_way"], now["waiting"]) == (1, 0)
    assert now["placements"] == {"split": 3} and now["migrations"] == {"instance_lost": 1}
    assert sum(now["ttft"]["counts"]) == 1 and sum(now["itl"]["counts"]) == 2
    assert len(now["itl"]["counts"]) == len(now["itl"]["limits"]) + 1
    assert [entry["instance_id"] for entry in now["instances"]] == ["e", "p"]
    running, done = now["timelines"]
    assert (running["request_id"], running["migrations"]) == ("s", 1) and "finished" not in running["stages_ms"]
    assert (done["finish_reason"], done["output_tokens"], done["computed_tokens"]) == ("length", 3, 3)
    assert now["time"] - 60 < done["time"] <= now["time"]
    moved, left, *joined = now["events"]
    assert (moved["event"], moved["request_id"], moved["instance"]) == ("moved", "s", "d")
    assert (left["event"], left["instance"]) == ("left", "d") and left["time"] <= now["time"] + 1
    assert [event["event"] for event in joined] == ["joined"] * 3
    (move,) = client.get("/debug/requests/s").json()["moves"]
    assert move["instance"] == "d" and move["why"].startswith("instance d was lost") and move["ms"] >= 0
    detail = client.get("/debug/requests/r").json()
    assert [(part["name"], part["who"]) for part in detail["parts"]][-1] == ("decode", "decode")


def test_counters_of_instances(make_scene: Callable[..., Scene], make_client: type[Client]) -> None:
    scene = make_scene()
    instance = scene.join("decode", "d", ranks=2)
    counts = {"generation_tokens": 2.0, series("kv_transfer_seconds", connector="shm", direction="load"): 0.5}
    counts[series("kv_transfer_seconds", connector="tier of shm", direction="load")] = 0.25
    counts |= {
        series("kv_store_out", connector=name): out for name, out in (("tiered/1/shm", 0.0), ("tiered/2/redis", 1.0))
    }
    instance.update_heartbeat(pb.Heartbeat(running=3, waiting=1, counters=counts))
    (entry,) = make_client(scene.app).get("/debug/overview").json()["instances"]
    assert (entry["running"], entry["waiting"], entry["generation_tokens"], entry["load_seconds"]) == (3, 1, 2.0, 0.5)
    assert entry["ranks"] == 2 and entry["store_bytes"] == 0 and entry["stores_out"] == ["tiered/2/redis"]


def test_history(make_scene: Callable[..., Scene], make_client: type[Client]) -> None:
    scene = make_scene()
    prefill, decode = scene.join("prefill", "p"), scene.join("decode", "d")
    scene.overview.record()
    scene.serve("a", prefill, decode)
    for _ in range(HISTORY_LENGTH - 1):
        scene.overview.record()
    client = make_client(scene.app)
    assert "history" not in client.get("/debug/overview").json()
    history = client.get("/debug/overview?history=true").json()["history"]
    assert [sum(one["requests"].values()) for one in history] == [0] + [1] * (HISTORY_LENGTH - 1)
    assert {one["instance_id"] for one in history[0]["instances"]} == {"p", "d"} and "timelines" not in history[0]
    scene.overview.record()
    for number in range(MAX_INSTANCES_IN_HISTORY):
        scene.join("decode", f"d{number}")
    scene.overview.record()
    history = client.get("/debug/overview?history=true").json()["history"]
    assert len(history) == HISTORY_LENGTH and history[-2]["instances"] and not history[-1]["instances"]


def test_a_query_of_a_wrong_type_is_an_error_in_our_format(client: Client) -> None:
    response = client.get("/debug/overview?history=maybe")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("history", "invalid_parameter") and "boolean" in error["message"]
