"""A request with what only the router needs of it: who sent it, its keys by block size, and where its timeline begins."""

from msgspec import field

from pdserve.request import Request


class RoutedRequest(Request, frozen=True, kw_only=True):
    """A request on its way through the router, one for each choice; instances get the fields of `Request` alone.

    Attributes:
        request_id: the response's id, with a number where there are several choices.
        keys: block size → keys of the prompt's full blocks.
        traceparent: the client's span, in W3C Trace Context format.
        client: its sender: the name of its API key or, without keys, its address; empty if unknown.
        session: the client's session id; a routing policy may keep a session on one instance.
        alone: it finds no KV of other requests; `build_requests` gives each prompt a salt of its own.
        prediction: tokens of the answer that the client has predicted, packed; instances that decode get them, too.
        leaves_nothing: its answer is not kept for drafts of later requests.
        received: when the router received the body, in seconds on its monotonic clock.
    """

    request_id: str
    keys: dict[int, list[bytes]] = field(default_factory=dict)
    traceparent: str = ""
    client: str = ""
    session: str = ""
    alone: bool = False
    prediction: bytes = b""
    leaves_nothing: bool = False
    received: float | None = None
