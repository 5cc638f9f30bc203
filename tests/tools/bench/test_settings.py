"""Settings of `pdserve bench serve`: wrong ones are one line before a server is asked, and the URL's path is kept."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.tools.bench.command import prepare
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.server import read_breakdown, read_drafts
from pdserve.tools.load_config import BenchServeConfig


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"extra_body": "[1]"}, r'--extra-body must be a JSON object such as \{"top_k": 5\}, not \[1\]'),
        ({"extra_body": "{"}, "--extra-body is not JSON: "),
        ({"extra_body": '{"temperature": NaN}'}, "--extra-body is not JSON: "),
        ({"api_key": "a\nb"}, "^--api-key must have printable characters only"),
        ({"extra_body": "[" * 100_000}, "--extra-body is not JSON: "),
        ({"metric_percentiles": ""}, "--metric-percentiles must be percentages such as 90,95,99, not ''"),
        ({"metric_percentiles": "50,nan"}, "--metric-percentiles must be percentages"),
        ({"sweep_attainment": "0"}, "--sweep-attainment must be more than 0"),
        ({"sweep_attainment": "90,x"}, "--sweep-attainment must be percentages"),
        ({"slo_sweep": True}, "--slo-sweep needs --goodput"),
        ({"goodput": "ttft"}, "--goodput: 'ttft' is no objective"),
    ],
)
def test_a_wrong_setting_is_named_before_a_server_is_asked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(SetupError, match=expected):
        prepare(BenchServeConfig(base_url="http://127.0.0.1:9", **settings))


@pytest.mark.parametrize(("below", "prefix"), [("", ""), ("/model-a", "/model-a"), ("/model-a/v1/", "/model-a")])
def test_the_model_is_asked_for_below_the_path_of_the_url_as_everything_else(below: str, prefix: str) -> None:
    """Behind a gateway, another path leads to another model."""
    paths = list[str]()

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            target = prepare(BenchServeConfig(base_url=url + below)).target
        finally:
            server.shutdown()
            thread.join()
    assert paths == [f"{prefix}/v1/models"]
    assert (target.url, target.path) == (url + prefix, "/v1/completions")


def test_an_admin_key_that_cannot_be_sent_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's host may have the digest of it; without the key, a part of the report is missing."""
    monkeypatch.setenv("PDSERVE_ADMIN_KEY", f"sha256:{'a' * 64}")
    assert not read_drafts("http://127.0.0.1:9")
    assert read_breakdown("http://127.0.0.1:9", [Sample(0, 0.0, token_times=[1.0], status=200)]) is None
