"""API keys and TLS."""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trustme

from pdserve.cli.deployment import free_port
from pdserve.config import RouterConfig
from pdserve.errors import SetupError
from pdserve.router.server import serve
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client

PUBLIC = ["/health", "/ready", "/metrics", "/version", "/", "/page.css", "/page.js"]
PUBLIC += ["/openapi.json", "/docs", "/docs/docs.js", "/docs/swagger-ui.js", "/docs/swagger-ui.css"]
CLIENT_PATHS = ["/v1/models", "/v1/models/a/b", "/v1/completions", "/tokenize"]
OPERATOR_PATHS = ["/debug/requests", "/debug/overview", "/admin/instances/decode-0/drain"]
NO_PATHS = ["/nothing", "/v1", "/v1/nothing", "/docs/nothing", "/health/nothing"]  # of which any key learns that


@pytest.fixture
def statuses(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer
) -> Callable[..., dict[str, int]]:
    """statuses(["/v1/models"], key="a", api_key="a,b") returns path → status of a GET with this key."""

    def get(paths: list[str], *, key: str = "", **settings: Any) -> dict[str, int]:
        client = make_client(make_app(tokenizer, **settings))
        headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        return {path: client.request("GET", path, headers=headers).status_code for path in paths}

    return get


def test_without_keys_everything_is_open(statuses: Callable[..., dict[str, int]]) -> None:
    assert 401 not in statuses(PUBLIC + CLIENT_PATHS + OPERATOR_PATHS + NO_PATHS).values()


def test_each_key_opens_its_own_paths(statuses: Callable[..., dict[str, int]]) -> None:
    keys = {"api_key": f"one,sha256:{hashlib.sha256('zwei ü'.encode()).hexdigest()}", "admin_key": "root"}
    clients, operators = CLIENT_PATHS + NO_PATHS, OPERATOR_PATHS + NO_PATHS
    for key, opened in {"": [], "one": clients, "zwei ü": clients, "root": operators, "on": []}.items():
        found = statuses(PUBLIC + CLIENT_PATHS + operators, key=key, **keys)
        assert {path for path, status in found.items() if status != 401} == set(PUBLIC + opened), key
    assert statuses(["/v1/models"], key=keys["api_key"].split(",")[1], **keys) == {"/v1/models": 401}, (
        "a digest is not accepted as a key"
    )


def test_only_one_kind_of_key(statuses: Callable[..., dict[str, int]]) -> None:
    for key in ("", "one"):
        assert set(statuses(OPERATOR_PATHS, key=key, api_key="one").values()) == {401}, (
            "the paths of operators are closed"
        )
    assert 401 not in statuses(PUBLIC + CLIENT_PATHS + NO_PATHS, admin_key="root").values()
    assert set(statuses(OPERATOR_PATHS, admin_key="root").values()) == {401}


def test_refusals_are_counted_and_wrong_keys_logged(
    statuses: Callable[..., dict[str, int]], metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    def count(reason: str) -> float | None:
        return metrics.registry.get_sample_value("pdserve_unauthorized_total", {"reason": reason})

    assert count("missing") == count("wrong") == 0
    for key in ("", "guess", "one"):
        statuses(["/v1/models", "/v1/" + "a" * 5000], key=key, api_key="one")
    assert count("missing") == count("wrong") == 2
    assert [len(record.getMessage()) < 200 for record in caplog.records if "wrong key" in record.getMessage()] == [
        True
    ] * 2


def test_the_error_says_what_is_needed(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer: Tokenizer
) -> None:
    client = make_client(make_app(tokenizer, api_key="one"))
    refused = client.request("GET", "/v1/models", headers={"Authorization": "Basic one"})
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert "in the header `Authorization: Bearer KEY`" in refused.json()["error"]["message"]
    assert refused.headers["www-authenticate"] == "Bearer" and refused.headers["x-request-id"]
    assert "--admin-key" in client.get("/debug/requests").json()["error"]["message"]


def test_a_router_with_a_certificate_and_keys(tmp_path: Path, tokenizer_dir: Path, eventually: Any) -> None:
    authority, port = trustme.CA(), free_port()
    chain, private, root = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "root.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(private)
    for one in issued.cert_chain_pems:
        one.write_to_path(chain, append=True)
    authority.cert_pem.write_to_path(root)
    flags = ["--port", str(port), "--control-port", "0", "--model", str(tokenizer_dir)]
    flags += ["--ssl-certfile", str(chain), "--ssl-keyfile", str(private)]
    environment = {**os.environ, "PDSERVE_API_KEY": "one", "PDSERVE_ADMIN_KEY": "root"}
    router = subprocess.Popen([sys.executable, "-m", "pdserve", "router", *flags], env=environment)
    url = f"https://127.0.0.1:{port}"
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=root)) as client:

            def alive() -> bool:
                assert router.poll() is None
                try:
                    return client.get(f"{url}/health").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(alive)
            for key, status in (("two", 401), ("one", 200)):
                models = client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert models.status_code == status
            assert client.get(f"{url}/debug/requests", headers={"Authorization": "Bearer root"}).status_code == 200
            assert "libtorch" not in Path(f"/proc/{router.pid}/maps").read_text(), "a router must not load torch"
    finally:
        router.terminate()
        router.wait(30)


def test_a_missing_certificate_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--ssl-certfile nowhere: No such file"):
        serve(RouterConfig(ssl_certfile="nowhere", ssl_keyfile="nothing"))
    with pytest.raises(ValueError, match="give both or none"):
        RouterConfig(ssl_certfile="nowhere")
