"""Tests of `rediss://` with real certificates. TLS is terminated by a proxy in front of a real Redis, see `TlsProxy`."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from pdserve.errors import SetupError
from pdserve.kv_transfer.conformance import Verdict, check
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector

Attach = Callable[..., Any]
NewKeys = Callable[[int], list[bytes]]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


def context_of(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def store_and_load(attach: Attach, url: str, new_keys: NewKeys) -> None:
    instance, keys = attach(url), new_keys(3)
    assert instance.store(keys, range(3)).leading == 3
    assert instance.load(keys, range(8, 11)).leading == 3
    np.testing.assert_array_equal(instance.rows[8:11], instance.rows[:3])


def test_a_certificate_of_the_given_ca_is_accepted(
    authority: trustme.CA, ca: Path, start_redis: Start, start_tls_proxy: Start, attach: Attach, new_keys: NewKeys
) -> None:
    port = start_tls_proxy(start_redis().port, context_of(authority, "127.0.0.1", "localhost"))
    store_and_load(attach, f"rediss://127.0.0.1:{port}/0?ca={ca}", new_keys)
    store_and_load(attach, f"rediss://localhost:{port}?ca={ca}", new_keys)


def test_invalid_server_certificates_are_refused(
    authority: trustme.CA, ca: Path, start_redis: Start, start_tls_proxy: Start, attach: Attach, new_keys: NewKeys
) -> None:
    server = start_redis()
    valid_name, other_name = (
        start_tls_proxy(server.port, context_of(authority, name)) for name in ("127.0.0.1", "elsewhere.test")
    )
    with pytest.raises(SetupError, match=r"No Redis answers at rediss://127.0.0.1:\d+: .*certificate verify failed"):
        attach(f"rediss://127.0.0.1:{valid_name}")  # the CA is not given
    with pytest.raises(SetupError, match="certificate verify failed: IP address mismatch"):
        attach(f"rediss://127.0.0.1:{other_name}?ca={ca}")
    with pytest.raises(SetupError, match="No Redis answers"):
        attach(f"rediss://127.0.0.1:{server.port}?ca={ca}&timeout=0.5")  # a server without TLS
    store_and_load(attach, f"rediss://127.0.0.1:{other_name}?verify=0", new_keys)


def test_a_server_that_requires_a_client_certificate(
    authority: trustme.CA, ca: Path, start_redis: Start, start_tls_proxy: Start, attach: Attach, new_keys: NewKeys
) -> None:
    context = context_of(authority, "127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    url = f"rediss://127.0.0.1:{start_tls_proxy(start_redis().port, context)}/0?ca={ca}"
    with pytest.raises(SetupError, match="No Redis answers"):
        attach(url)
    client = authority.issue_cert("client.test")
    client.private_key_pem.write_to_path(ca.parent / "key.pem")
    client.cert_chain_pems[0].write_to_path(ca.parent / "cert.pem")
    store_and_load(attach, f"{url}&cert={ca.parent}/cert.pem&key={ca.parent}/key.pem", new_keys)


def test_missing_certificate_files_are_refused() -> None:
    with pytest.raises(SetupError, match=r"The file '/no/ca.pem' given by ca= of a rediss:// URL does not exist\."):
        RedisConnector("rediss://host?ca=/no/ca.pem")
    with pytest.raises(SetupError, match="no parameter 'ca'"):
        RedisConnector("redis://host?ca=/no/ca.pem")


@pytest.mark.slow
def test_conformance(authority: trustme.CA, ca: Path, start_redis: Start, start_tls_proxy: Start) -> None:
    server = start_redis("--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
    port = start_tls_proxy(server.port, context_of(authority, "127.0.0.1"))
    reports = {one.rule: one for one in check(f"rediss://127.0.0.1:{port}/0?ca={ca}", seconds=0.5)}
    exceptions = {rule: one.detail for rule, one in reports.items() if one.verdict is not Verdict.HOLDS}
    assert not exceptions
    assert reports["deadline"].detail.startswith("held up and cut by a relay")


def test_a_cluster(
    authority: trustme.CA, ca: Path, start_cluster: Start, start_tls_proxy: Start, attach: Attach, new_keys: NewKeys
) -> None:
    """Each node announces the port of its proxy as its own."""
    ports: list[int] = []

    def announce(port: int) -> int:
        ports.append(start_tls_proxy(port, context_of(authority, "127.0.0.1")))
        return ports[-1]

    start_cluster(announce=announce)
    instance, keys = attach(f"rediss+cluster://127.0.0.1:{ports[0]}?ca={ca}", blocks=64), new_keys(32)
    assert instance.store(keys, range(32)).leading == 32
    assert instance.load(keys, range(32, 64)).leading == 32
    np.testing.assert_array_equal(instance.rows[32:], instance.rows[:32])
