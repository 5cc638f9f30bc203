"""The stream of one request's tokens, as the HTTP side sees it: the seam between text (api) and tokens (dispatch)."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.request import Request, TokenLogprobs
from pdserve.router.telemetry.timeline import Timeline


@dataclass(slots=True)
class Chunk:
    """New tokens, and on the last chunk why it is the last: stop (EOS or a stop token, kept as last id) or length.

    `logprobs` belong to the tokens, one for each, if the request asks for them."""

    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def extend(self, more: "Chunk") -> None:
        """Takes the chunk that follows."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.finish_reason = more.finish_reason


@dataclass(frozen=True)
class ModelInfo:
    """What the serving instances agree on."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    weights: bytes  # digest of the model, the root of all block keys
    block_sizes: frozenset[int]  # tokens; one, unless instances convert
    grammars: bool = False  # outputs can be made to follow grammars
    by_priority: bool = False  # all instances schedule by it


class TokenStream(Protocol):
    """Tokens of one request: at each turn the chunks that have come meanwhile, at least one; for a request that wants the
    whole, one at the end, or before an error. Iterating ends after the chunk with a finish reason, or raises RequestError."""

    timeline: Timeline

    def __aiter__(self) -> AsyncIterator[list[Chunk]]: ...

    def cancel(self, finish_reason: str = "cancelled") -> None:
        """Frees the request's blocks everywhere. Harmless when it is over already; may be called at any time.

        `finish_reason` is what the timeline says: "stop" when the router has found a stop string.
        """


class Backend(Protocol):
    """What the HTTP side needs of the fleet. `dispatch.Dispatcher` is the real one."""

    def model(self) -> ModelInfo | None:
        """None until the first instance has registered."""

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and the reason in words if not."""

    def open(self, request: Request) -> TokenStream:
        """Starts the request.

        Raises:
            RequestError: nobody can serve it, or it can never fit.
        """

    def instances(self) -> list[dict[str, object]]:
        """One dict per registered instance, for /debug/instances."""

    def timeline(self, request_id: str) -> Timeline | None: ...

    def drain(self, instance_id: str, role: str = "") -> None:
        """Asks an instance to hand over or end what it has, and then to serve in this role; empty: to end.

        Raises:
            NotFound: nobody has this id.
            Conflict: nobody else could serve meanwhile, it drains already, or the role does not go with the others.
        """
