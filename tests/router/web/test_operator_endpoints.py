"""Health, metrics, debug and admin endpoints."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.requests import Request

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.errors import Conflict
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.operator_endpoints import OperatorEndpoints

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend
    from tests.router.web.conftest import Scene

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "prompt": "hello"}


def test_health_and_readiness(client: Client, backend: ScriptedBackend) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready").json() == {"status": "ready", "instances": 1}
    backend.not_ready = "no decode instance"
    response = client.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "not ready: no decode instance"
    assert client.get("/health").status_code == 200


def test_metrics_version_and_instances(client: Client) -> None:
    metrics = client.get("/metrics")
    assert metrics.text == "pdserve_up 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/debug/instances").json() == {"instances": [{"instance_id": "p0", "role": "prefill"}]}


def test_others_are_served_between_parts_of_the_metrics(backend: ScriptedBackend) -> None:
    turns, seen = 0, list[int]()

    def parts(*, with_keys: bool) -> Iterator[bytes]:
        for number in range(3):
            seen.append(turns)
            yield b"%d " % number

    async def scenario() -> bytes:
        async def serve_others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(serve_others())
        endpoints = OperatorEndpoints(backend, parts, lambda request: True, backend.log.latest, dict, 1)
        response = await endpoints.metrics(Request({"type": "http"}))
        others.cancel()
        return bytes(response.body)

    assert asyncio.run(scenario()) == b"0 1 2 "
    assert seen[0] < seen[1] < seen[2]


def test_scrapes_at_once_share_one_rendering_of_what_holds_then(backend: ScriptedBackend) -> None:
    rendered = []

    def parts(*, with_keys: bool) -> Iterator[bytes]:
        rendered.append(with_keys)
        yield b"%d" % len(rendered)

    async def scenario() -> list[set[bytes]]:
        endpoints = OperatorEndpoints(
            backend, parts, lambda request: "admin" in request.scope, backend.log.latest, dict, 1
        )

        async def scrape(**scope: object) -> set[bytes]:
            request = Request({"type": "http", **scope})
            return {
                bytes(answer.body) for answer in await asyncio.gather(*(endpoints.metrics(request) for _ in range(20)))
            }

        return [await scrape(), await scrape(), await scrape(admin=True)]

    assert asyncio.run(scenario()) == [{b"1"}, {b"2"}, {b"3"}]
    assert rendered == [False, False, True]


def test_the_next_rendering_waits_for_its_period(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.web.operator_endpoints.METRICS_PERIOD_S", 3600.0)
    rendered = []

    async def scenario() -> None:
        def parts(*, with_keys: bool) -> Iterator[bytes]:
            rendered.append(with_keys)
            yield b""

        endpoints = OperatorEndpoints(backend, parts, lambda request: True, backend.log.latest, dict, 1)
        await endpoints.metrics(Request({"type": "http"}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endpoints.metrics(Request({"type": "http"})), 0.1)

    asyncio.run(scenario())
    assert rendered == [True]


def test_debug_finds_each_choice(client: Client, backend: ScriptedBackend) -> None:
    one = client.post(COMPLETIONS, HELLO).json()["id"]
    assert client.get(f"/debug/requests/{one}").json()["prompt_tokens"] == len(backend.requests[0].prompt)
    three = client.post(COMPLETIONS, {**HELLO, "n": 3}).json()["id"]
    found = client.get(f"/debug/requests/{three}").json()
    assert [choice["request_id"] for choice in found["choices"]] == [f"{three}-{i}" for i in range(3)]
    assert client.get(f"/debug/requests/{three}-1").json()["request_id"] == f"{three}-1"
    latest = client.get("/debug/requests").json()["requests"]
    assert [timeline["request_id"] for timeline in latest] == [f"{three}-2", f"{three}-1", f"{three}-0", one]
    unknown = client.get("/debug/requests/unknown")
    assert unknown.status_code == 404
    assert (
        unknown.json()["error"]["message"]
        == "no recent request of this router has this id; other routers have their own"
    )


def test_drains_and_role_changes(client: Client, backend: ScriptedBackend) -> None:
    json_only: Any = {"headers": {"Content-Type": "application/json"}}
    orders = "/admin/instances/decode-0"
    assert client.request("POST", f"{orders}/drain", **json_only).status_code == 202
    assert client.post(f"{orders}/role", {"role": "prefill"}, **json_only).status_code == 202
    assert backend.drained == [("decode-0", ""), ("decode-0", "prefill")]
    for body in ({}, {"role": "leader"}, {"role": ""}, {"role": "both", "now": True}):
        assert client.post(f"{orders}/role", body, **json_only).status_code == 400
    refused = client.post(f"{orders}/role", {"role": "leader"}, **json_only)
    assert refused.json()["error"]["message"] == "role must be 'prefill', 'decode' or 'both', not 'leader'"
    for path in ("drain", "role"):  # like a cross-site request to a router without keys
        assert client.post(f"{orders}/{path}", {"role": "prefill"}).status_code == 415
    assert len(backend.drained) == 2
    assert client.post("/admin/prefix_cache/reset", {}).status_code == 415
    for path in ("/admin/prefix_cache/reset", "/reset_prefix_cache"):
        answer = client.request("POST", path, **json_only)
        assert answer.json() == {"pools": ["decode-0", "prefill-0"], "stores": ["shm"]}
    backend.fails(Conflict("it is the last one", kind="last_instance"))
    assert client.request("POST", f"{orders}/drain", **json_only).status_code == 409


def test_traffic_is_a_trace(client: Client, make_scene: Callable[..., Scene], make_client: type[Client]) -> None:
    scene = make_scene()
    prefill, decode = scene.join("prefill", "p0"), scene.join("decode", "d0")
    http = make_client(scene.app)
    assert http.get("/debug/traffic").text == ""
    scene.serve("one", prefill, decode)
    answer = http.get("/debug/traffic")
    (row,) = map(json.loads, answer.text.splitlines())
    assert (row["request_id"], row["input_length"], row["output_length"], row["finish_reason"]) == (
        "one",
        3,
        3,
        "length",
    )
    assert 0 <= row["itl_p99_ms"] < 60_000 and row["timestamp"] <= float(answer.headers["X-Time-Ms"])
    assert '"request_id": "one"' in http.get("/debug/traffic?seconds=3600").text
    assert http.get("/debug/traffic?seconds=0").text == ""
    for wrong in ("now", "-1", "nan"):
        refused = http.get(f"/debug/traffic?seconds={wrong}")
        assert refused.status_code == 400 and f"seconds='{wrong}'" in refused.json()["error"]["message"]


def test_one_controller_holds_the_lease(make_scene: Callable[..., Scene], make_client: type[Client]) -> None:
    http = make_client(make_scene().app)

    def renew(holder: str, seconds: float, decision: str = "", **more: Any) -> Any:
        body = {"holder": holder, "lease_seconds": seconds, "decision": decision} | more
        return http.post("/admin/autoscaler", body, headers={"Content-Type": "application/json"})

    assert renew("a", 60, "flip decode-0").json() == {"holder": "a", "changes": []}
    made = [{"at": 7.0, "before": "decode", "after": "prefill", "count": 1, "until": 90.0}]
    assert renew("a", 60, changes=made).json()["changes"] == made == renew("a", 60).json()["changes"]
    refused = renew("b", 60, "flip it back")
    assert refused.status_code == 409 and "the controller a holds the lease" in refused.json()["error"]["message"]
    assert renew("a", 0).status_code == 200 and renew("b", 60).json() == {"holder": "b", "changes": made}
    events = http.get("/debug/overview").json()["events"]
    assert [one["text"] for one in events if one["event"] == "autoscaler"] == ["autoscaler: flip decode-0"]
    assert renew("", 60).status_code == 400 and renew("b", -1).status_code == 400


def test_the_metrics_of_keys_are_for_operators(
    tokenizer: Tokenizer, backend: ScriptedBackend, metrics: Metrics, serving: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "alice-key"\n')
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("127.0.0.1", 0)) as public:
        config = RouterConfig(
            model="demo",
            keys_file=str(keys),
            admin_key="admin",
            own_port=own.getsockname()[1],
            client_timeout_seconds=5,
        )
        admission = AdmissionController(load_api_keys("", str(keys)), config, metrics, time.monotonic)
        app = create_app(config, tokenizer, backend, admission, metrics.parts, backend.log.latest, dict)
        metrics.record_finished(Timeline("r", adapter="secret-adapter", prompt_tokens=3, output_tokens=2))
        with serving(app, public) as url, serving(app, own) as own_url:
            operator = {"Authorization": "Bearer admin"}
            for response in (httpx.get(f"{url}/metrics", headers=operator), httpx.get(f"{own_url}/metrics")):
                assert 'pdserve_key_requests_waiting{key="alice"} 0.0' in response.text
                assert 'pdserve_adapter_tokens_total{adapter="secret-adapter",of="output"} 2.0' in response.text
            for headers in ({}, {"Authorization": "Bearer alice-key"}, {"Authorization": "Bearer wrong"}):
                text = httpx.get(f"{url}/metrics", headers=headers).text
                assert "pdserve_refusals_total" in text and "alice" not in text and "secret" not in text


def test_the_metrics_of_a_router_without_keys_hide_nothing(
    tokenizer: Tokenizer, backend: ScriptedBackend, metrics: Metrics, make_client: type[Client]
) -> None:
    admission = AdmissionController([], RouterConfig(model="demo"), metrics, time.monotonic)
    config = RouterConfig(model="demo")
    app = create_app(config, tokenizer, backend, admission, metrics.parts, backend.log.latest, dict)
    assert 'key="anonymous"' in make_client(app).get("/metrics").text
