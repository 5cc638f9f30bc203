"""Adapters, as the engine knows them: weights that some sequences add to the base's. `pdserve/adapters/` implements them.

A step may have sequences with as many adapters as there are slots. A sequence asks for the slot of its adapter before it
takes any block, and keeps it until it leaves the engine.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.engine.sequence import Sequence
    from pdserve.engine.step import StepPlan
    from pdserve.proto import pdserve_pb2 as pb


class Adapter(Protocol):
    """An adapter: a delta to the base's weights. It is kept as long as a sequence refers to it.

    Attributes:
        digest: of all that it adds, and so of the KV computed with it.
    """

    @property
    def digest(self) -> bytes: ...


class Host(Protocol):
    """The instance of an engine, for changes of its adapters.

    Attributes:
        post: runs a function on the engine thread, soon.
        count: as `Reporter.count`; called on the engine thread.
    """

    @property
    def post(self) -> "Callable[[Callable[[], None]], None]": ...

    @property
    def count(self) -> "Callable[..., None]": ...


class Adapters(Protocol):
    """The adapters of an engine."""

    def find(self, digest: bytes) -> Adapter:
        """Return the adapter with a digest. Raises RequestError if it is not here."""

    def acquire(self, seq: "Sequence", *siblings: "Sequence") -> bool:
        """Give a sequence, and others of its request, the slot of their adapter; return False if it has to wait for one."""

    def release(self, seq: "Sequence") -> None:
        """End a sequence's use of a slot, and its wait for one, if there is any."""

    def begin_step(self, plan: "StepPlan") -> None:
        """Let the model add to each row of the next step what its sequence's adapter adds."""

    def change(self, order: "pb.ChangeAdapter", host: Host, on_done: Callable[[str], None]) -> None:
        """Load, unload or offer an adapter, without keeping the engine thread.

        Args:
            on_done: called on the engine thread with the reason why it could not be done, or "".
        """

    def listing(self) -> "list[pb.Adapter]":
        """Return what is here, for the Hello."""
