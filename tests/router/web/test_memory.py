"""What clients leave in the router's memory: nothing that is there until the garbage collector runs, minutes later."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trustme
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdserve.cli.deployment import free_port
from pdserve.errors import Overloaded, Unavailable
from pdserve.router.api.streaming import ClientConnection
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.http_protocol import MAX_HEADERS, HttpProtocol

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

PROMPT = {"prompt": "a", "max_tokens": 2}
BODY_BYTES = 4_000_000
WRONG = b'{"prompt":"a","stop_token_ids":"' + b"a" * BODY_BYTES + b'"}'


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, ssl.SSLContext]:
    """A file with a certificate and its key, and a context that trusts it."""
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    authority.configure_trust(context)
    return str(tmp_path / "all.pem"), context


@pytest.fixture
def uncollected() -> Iterator[Callable[[], set[str]]]:
    """Switches the garbage collector off; returns the names of what is left of connections that were made since."""
    gc.collect()
    before = set(map(id, _of_connections()))
    gc.disable()
    yield lambda: {type(one).__name__ for one in _of_connections() if id(one) not in before}
    gc.enable()


def _of_connections() -> list[object]:
    types = (HttpProtocol, RequestResponseCycle, ClientConnection)
    return [one for one in gc.get_objects() if issubclass(type(one), types)]


def test_connections_and_requests_are_freed_as_they_end(
    make_app: Callable[..., Any],
    tokenizer: Tokenizer,
    backend: ScriptedBackend,
    serving: Callable[..., Any],
    certificate: tuple[str, ssl.SSLContext],
    uncollected: Callable[[], set[str]],
    eventually: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Over TLS, each would hold 256 KiB, besides its body."""
    (tmp_path / "keys.toml").write_text('[one]\nkey = "one"\n[two]\nkey = "two"\nrequests = "1/h"\n')
    app, (path, context) = make_app(tokenizer, keys_file=str(tmp_path / "keys.toml")), certificate
    with serving(app, ssl_certfile=path, ssl_keyfile=path) as url:

        def ask(
            status: int, body: Mapping[str, Any] = PROMPT, key: str = "one", headers: Mapping[str, str] | None = None
        ) -> None:
            with httpx.Client(base_url=url, verify=context, headers={"x-api-key": key}) as client:
                answer = client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == status, answer.text

        ask(200, {**PROMPT, "stream": True})
        ask(401, key="wrong")
        ask(400, {"prompt": [{}] * 20})
        ask(400, {"prompt": [{}] * 5_000})  # parsed in a thread
        ask(413, {"prompt": "a" * 30_000})
        ask(431, headers={f"x-{number}": "a" for number in range(MAX_HEADERS)})
        ask(200, headers={"Upgrade": "h2c", "Connection": "Upgrade"})
        ask(200, key="two")
        ask(429, key="two")  # its quota is used up
        backend.fails(Unavailable("gone", kind="instance_lost"))
        ask(503)
        backend.fails(Overloaded("full", kind="max_requests"), error_at_open=True)
        ask(429, {**PROMPT, "stream": True})
        backend.generates([1], None, error=Unavailable("gone", kind="instance_lost"))
        ask(200, {**PROMPT, "stream": True})  # whose last event is the error
        backend.generates([1], None, hang=True)
        body = json.dumps(PROMPT).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: one\r\nContent-Length: %d\r\n\r\n"
        for left in (head % len(body) + body) * 3, head % 9_000 + body:  # pipelined; unfinished
            with closing(socket.create_connection(("127.0.0.1", httpx.URL(url).port))) as connection:
                client = context.wrap_socket(connection, server_hostname="127.0.0.1")
                client.sendall(left)
                eventually(lambda: "RequestResponseCycle" in uncollected())
                client.close()
    assert uncollected() == set()


def test_a_router_does_not_grow_by_the_bodies_that_it_refuses(
    certificate: tuple[str, ssl.SSLContext], tokenizer_dir: Path, eventually: Callable[..., None]
) -> None:
    path, context = certificate
    port = free_port()
    flags = ["--port", str(port), "--control-port", "0", "--model", str(tokenizer_dir)]
    command = [sys.executable, "-m", "pdserve", "router", *flags, "--ssl-certfile", path, "--ssl-keyfile", path]
    with subprocess.Popen(command, env={**os.environ, "PDSERVE_API_KEY": "one"}) as router:

        def refused(count: int) -> int:
            """Send wrong bodies, each on a connection of its own, and return the router's own memory in bytes."""
            for _ in range(count):
                with httpx.Client(verify=context, headers={"x-api-key": "one"}) as client:
                    answer = client.post(f"https://127.0.0.1:{port}/v1/completions", content=WRONG)
                    assert answer.status_code == 400, answer.text
            sizes = Path(f"/proc/{router.pid}/smaps_rollup").read_text()
            return 1024 * int(re.findall(r"Pss_Anon: +(\d+) kB", sizes)[0])

        def alive() -> bool:
            assert router.poll() is None
            try:
                return httpx.get(f"https://127.0.0.1:{port}/health", verify=context).status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(alive)
            first = refused(4)
            assert refused(12) - first < 6 * BODY_BYTES, "the bodies stay in memory"
        finally:
            router.terminate()
