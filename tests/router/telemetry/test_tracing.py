"""OpenTelemetry traces of requests, as received by a collector."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import SetupError
from pdserve.lifetime import TRACE_SPANS, Stage
from pdserve.output import Failure, Moved, Output, Stored
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.tracing import SERVICES, Tracer

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REASON = "needs pip install -e '.[otel]'"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The collector's URL, and a list of the received (service, span) pairs."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=REASON)
    metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason=REASON)
    received: list[tuple[str, Any]] = []

    def metrics_of(body: bytes) -> list[Any]:
        resources = metrics.ExportMetricsServiceRequest.FromString(body).resource_metrics
        return [metric for one in resources for scope in one.scope_metrics for metric in scope.metrics]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/metrics":
                received.extend(("metric", metric) for metric in metrics_of(body))
                body = b""
            else:
                assert self.path == "/v1/traces"
            for one in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {at.key: at.value.string_value for at in one.resource.attributes}
                received.extend((names["service.name"], span) for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def serve() -> Callable[..., None]:
    """serve(url, traceparent, fails) runs one request through a dispatcher, and exports its trace."""

    def run(url: str, traceparent: str = "", fails: bool = False) -> None:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=REASON)
        tracer, fleet = Tracer(url, "demo"), Fleet("router", "demo", 1.0, time.monotonic)
        dispatcher = Dispatcher(RouterConfig(local_prefill_tokens=0), fleet, Metrics(fleet), seed=0)
        dispatcher.finish_listeners.append(tracer.export)

        def join(role: str) -> InstanceHandle:
            hello = pb.Hello(instance_id=f"{role}-0", role=role, model="demo", max_model_len=9, num_blocks=9)
            hello.vocab_size, hello.block_size = 100, 16
            return fleet.register(
                hello, SimpleNamespace(send=lambda frame: None, close=lambda: None, abort=lambda: None)
            )

        def deliver(instance: InstanceHandle, *stages: Stage, **output: Any) -> None:
            stamps = {stage.value: 0.0 for stage in stages}
            dispatcher.on_output(instance, Output(request_id="r", stamps=stamps, **output))

        prefill, decode = join("prefill"), join("decode")
        sampling = SamplingParams(max_tokens=2)
        request = RoutedRequest(
            request_id="r", prompt=[1, 2], sampling=sampling, traceparent=traceparent, multi_turn=bool(traceparent)
        )
        dispatcher.open(request)
        if fails:
            deliver(decode, error=Failure(kind="rejected", message="it does not fit"))
        else:
            deliver(decode, Stage.RESERVED)
            deliver(prefill, Stage.PREFILL_STARTED, token_ids=[7])
            deliver(prefill, Stage.KV_STORED, stored=Stored(num_blocks=1, final=True), moved=Moved(blocks=1, bytes=64))
            stages = Stage.KV_READY, Stage.DECODE_STARTED, Stage.FINISHED
            deliver(decode, *stages, token_ids=[8], finish_reason="length")
        assert not dispatcher.states
        tracer.close()

    return run


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_request_is_exported_as_a_trace(
    collector: tuple[str, list[tuple[str, Any]]], serve: Callable[..., None]
) -> None:
    url, received = collector
    serve(f"{url}/v1/traces", f"00-{TRACE}-{SPAN}-01")
    assert {span.trace_id.hex() for _, span in received} == {TRACE}
    assert {service for service, _ in received} == {f"pdserve-{name}" for name in SERVICES}
    (root,) = (span for _, span in received if span.parent_span_id.hex() == SPAN)
    parts = {span.name: span for _, span in received if span.parent_span_id == root.span_id}
    assert set(parts) == set(TRACE_SPANS) and len(received) == 1 + len(TRACE_SPANS)
    for name, span in parts.items():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, name
        assert span.end_time_unix_nano <= root.end_time_unix_nano, name
    assert parts["prefill"].end_time_unix_nano <= parts["decode"].end_time_unix_nano
    assert [event.name for event in root.events] and {event.name for event in root.events} == {
        stage.value for stage in Stage
    }
    assert attributes(root)["pdserve.request_id"] == "r" and attributes(root)["gen_ai.usage.output_tokens"] == 2
    assert root.name == "chat demo"
    assert attributes(root).items() >= {
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", "demo"),
        ("gen_ai.response.id", "r"),
        ("gen_ai.request.max_tokens", 2),
    }
    assert attributes(parts["prefill"]) == {"pdserve.instance": "prefill-0"}
    assert attributes(parts["store KV"]) == {"pdserve.blocks": 1, "pdserve.bytes": 64}


def test_metrics_by_the_conventions_for_generative_ai(
    collector: tuple[str, list[tuple[str, Any]]], serve: Callable[..., None]
) -> None:
    url, received = collector
    serve(url)
    found = {metric.name: metric for kind, metric in received if kind == "metric"}
    assert {metric.unit for metric in found.values()} == {"s", "{token}"}
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        [point] = found[f"gen_ai.server.{name}"].histogram.data_points
        assert point.count == 1
        assert attributes(point).items() >= {
            ("gen_ai.operation.name", "text_completion"),
            ("gen_ai.provider.name", "pdserve"),
        }
    usage = found["gen_ai.client.token.usage"].histogram.data_points
    assert {attributes(point)["gen_ai.token.type"]: point.sum for point in usage} == {"input": 2, "output": 2}


def test_failed_request_without_a_client_span(
    collector: tuple[str, list[tuple[str, Any]]], serve: Callable[..., None]
) -> None:
    url, received = collector
    serve(f"{url}/v1/traces", fails=True)
    (root,) = (span for _, span in received if not span.parent_span_id)
    assert root.status.code == 2 and root.status.message == "it does not fit"
    assert attributes(root)["error.type"] == "error"


def test_unsampled_requests_are_not_exported(
    collector: tuple[str, list[tuple[str, Any]]], serve: Callable[..., None]
) -> None:
    url, received = collector
    serve(f"{url}/v1/traces", f"00-{TRACE}-{SPAN}-00")
    assert not received


@pytest.mark.parametrize(
    ("sent", "taken"), [(f"00-{TRACE}-{SPAN}-01", True), ("<script>", False), (f"00-{TRACE}-01", False)]
)
def test_traceparent_header_is_parsed(client: Client, backend: ScriptedBackend, sent: str, taken: bool) -> None:
    body = json.dumps({"model": "demo", "prompt": "hello"}).encode()
    assert client.request("POST", "/v1/completions", content=body, headers={"traceparent": sent}).status_code == 200
    assert [request.traceparent for request in backend.requests] == [sent if taken else ""]


def test_setup_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="--otlp-endpoint collector:4318 is not a URL"):
        Tracer("collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SetupError, match=r"pip install -e '\.\[otel\]'"):
        Tracer("http://collector:4318")
