"""URLs of servers: which are refused, and why."""

import pytest

from pdserve.errors import SetupError
from pdserve.server_url import server_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://me:secret@host/", "--url must have no user and no password; send a key by KEY"),
        ("http://[::1", r"--url: 'http://\[::1' is not a URL: Invalid"),
        ("http://host:99999/v1", "--url: 'http://host:99999/v1' is not a URL: Port out of range"),
        ("http://host:x", "--url: 'http://host:x' is not a URL: "),
        ("host:8000", "--url: 'host:8000' is not a URL; write http://"),
        ("ftp://host", "--url: 'ftp://host' is not a URL; write http://"),
        ("http://host?a=b", "--url must have no query and no fragment"),
    ],
)
def test_a_url_that_names_no_server(url: str, expected: str) -> None:
    with pytest.raises(SetupError, match=expected):
        server_url(url, "--url", "KEY")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_clients_may_have_v1_in_it(end: str) -> None:
    assert server_url(f"http://[::1]:8000/model-a{end}", "--url", "KEY") == "http://[::1]:8000/model-a"
