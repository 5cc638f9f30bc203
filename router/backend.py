"""The interface between the HTTP side (text) and dispatch (tokens): a backend opens one token stream per request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from pdserve.errors import BadRequest
from pdserve.keys import Layout, unpack_tokens
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.timeline import Timeline


class ServedAdapter(NamedTuple):
    """An adapter that requests may name as their model.

    Attributes:
        digest: of its weights.
        path: from which an instance has read it.
        invocation: tokens from whose last occurrence in a prompt on it is added; empty: it is added to all.
    """

    digest: bytes
    path: str
    invocation: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int]) -> int:
        """Return the position of the first token of a prompt that has it. Raises BadRequest if it is not invoked."""
        if not self.invocation:
            return 0
        tokens, size = [*self.invocation], len(self.invocation)
        for at in range(len(prompt) - size, -1, -1):
            if prompt[at] == tokens[0] and [*prompt[at : at + size]] == tokens:
                return at
        message = f"the prompt does not invoke the adapter: it lacks the tokens {tokens}"
        raise BadRequest(message, kind="adapter_not_invoked", param="prompt")


@dataclass(frozen=True)
class ModelInfo:
    """Properties of the served model that hold for all attached instances.

    Attributes:
        max_model_len: tokens of the longest request, prompt and answer, that both roles can serve.
        common_model_len: tokens of the longest request that every instance can serve.
    """

    name: str
    max_model_len: int
    common_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_digest: bytes  # digest of config and weights, the root of all block keys
    block_sizes: frozenset[int]  # in tokens; more than one only if instances convert KV layouts
    supports_grammars: bool = False  # all instances can constrain outputs to a grammar
    supports_priorities: bool = False  # all instances schedule by priority
    embedding_size: int = 0  # numbers of an embedding; 0: the model has none
    classifies: bool = False  # these numbers are probabilities of classes, and the model generates nothing
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)  # by name

    @classmethod
    def common_to(cls, name: str, hellos: "Sequence[pb.Hello]") -> Self:
        """Return what holds for all of some instances, at least one."""
        adapters = sorted(
            (one for hello in hellos for one in hello.adapters if one.name), key=lambda one: one.loaded_at
        )
        by_role = [
            [one.max_model_len for one in hellos if one.role in (role, "both")] for role in ("prefill", "decode")
        ]
        return cls(
            name=name,
            max_model_len=min(max(lengths) for lengths in by_role if lengths),
            common_model_len=min(hello.max_model_len for hello in hellos),
            vocab_size=hellos[0].vocab_size,
            eos_token_ids=frozenset(hellos[0].eos_token_ids),
            model_digest=Layout.from_message(hellos[0].layout).model_digest,
            embedding_size=min(hello.embedding_size for hello in hellos),
            classifies=any(hello.classifies for hello in hellos),
            block_sizes=frozenset(hello.block_size for hello in hellos),
            supports_grammars=all(hello.grammars for hello in hellos),
            supports_priorities=all(hello.scheduling_policy == "priority" for hello in hellos),
            adapters={
                one.name: ServedAdapter(one.digest, one.path, tuple(unpack_tokens(one.invocation))) for one in adapters
            },  # of one name, the latest
        )


class TokenStream(Protocol):
    """The tokens of one request, with one reader: `take` never waits, and `on_readable` is called when it has something.

    Attributes:
        on_readable: called without arguments when there are outputs or an error to take; the reader sets it. It only wakes
            the reader, which acts later: the call comes from the middle of processing an output.
    """

    timeline: Timeline
    on_readable: Callable[[], object]

    def take(self) -> list[Output]:
        """Return the outputs that have arrived since the last call; empty if there is nothing to read yet.

        A request with `whole` has nothing to read before its end or an error. After the one with a finish reason, the
        stream is over.

        Raises:
            RequestError: the request has failed, and all of its outputs have been taken.
        """

    def cancel(self, finish_reason: str = "cancelled") -> None:
        """Abort the request on all instances and free its blocks. May be called at any time; no effect after the end.

        Args:
            finish_reason: recorded in the timeline; `stop` if the router has found a stop string.
        """


class Backend(Protocol):
    """The HTTP side's view of the fleet, implemented by `dispatch.Dispatcher`."""

    @property
    def num_instances(self) -> int:
        """Number of attached instances."""

    @property
    def model(self) -> ModelInfo | None:
        """The served model; None until the first instance has registered."""

    def ready(self) -> tuple[bool, str]:
        """Return (True, ...) if a request can be served now, else (False, reason)."""

    def open(self, request: RoutedRequest) -> TokenStream:
        """Start a request.

        Raises:
            RequestError: no instance can serve it, it can never fit, or it would break the SLO.
        """

    def open_choices(self, requests: Sequence[RoutedRequest]) -> Sequence[TokenStream]:
        """Start requests that differ only in their ids and seeds. Their prompt is computed and transferred once.

        Raises:
            RequestError: as for `open`; none of them was started.
        """

    def instances(self) -> list[dict[str, object]]:
        """Return one entry per attached instance, for /debug/instances."""

    def timeline(self, request_id: str) -> Timeline | None:
        """Return a recent request's timeline; None if it is unknown."""

    def reset_prefix_cache(self, now_ms: int) -> tuple[list[str], list[str]]:
        """Let later requests find no KV of earlier ones; return the instances that forget theirs, and the kinds of stores.

        Args:
            now_ms: milliseconds since 1970, which number the epoch that begins, so that persistent stores hold none of it.
        """

    def change_adapter(self, name: str, path: str, replaces: bool, on_done: Callable[[str], None]) -> None:
        """Let all instances that do so load an adapter from a folder or, if that is empty, unload the one with this name.

        Args:
            replaces: it may take the name of another one.
            on_done: called with the reason why an instance could not do so; empty: all have done it.
        """

    def drain(self, instance_id: str, role: str = "") -> None:
        """Ask an instance to hand over or finish its requests, and then to serve as `role`; if that is empty, to exit.

        Raises:
            NotFound: no instance with this id is attached.
            Conflict: the other instances could not serve alone, the instance is already draining, or the role is
                incompatible with the other instances.
        """
