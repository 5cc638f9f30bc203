"""URL of a server, as users give it to commands that send requests."""

from urllib.parse import urlsplit

import httpx

from pdserve.errors import SetupError


def server_url(url: str, option: str, key: str) -> str:
    """Return the URL without the /v1 with which OpenAI's clients want it.

    Args:
        option: the flag that names it, for errors.
        key: what takes an API key, for errors.

    Raises:
        SetupError: it is no URL of http or https, or has a user, a query or a fragment.
    """
    if not url.startswith(("http://", "https://")):
        raise SetupError(f"{option}: {url!r} is not a URL; write http://127.0.0.1:8000, for example")
    try:
        parts, _ = urlsplit(url), httpx.URL(url)
        _ = parts.port
    except (httpx.InvalidURL, ValueError) as error:
        raise SetupError(f"{option}: {url!r} is not a URL: {error}") from None
    if "@" in parts.netloc:
        raise SetupError(f"{option} must have no user and no password; send a key by {key}")
    if set(url) & set("?#"):
        raise SetupError(f"{option} must have no query and no fragment: {url}")
    return url.rstrip("/").removesuffix("/v1")
