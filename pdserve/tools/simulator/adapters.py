"""Adapters of a simulated instance: all are in its memory, and a step has as many as there are slots."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pdserve.adapters.slot_table import SlotTable
from pdserve.engine.adapters import Adapter, Adapters, Host
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import StepPlan
from pdserve.errors import RequestError
from pdserve.keys import KEY_BYTES
from pdserve.profile.profile import AdapterModel
from pdserve.proto import pdserve_pb2 as pb


def digest_of(name: str) -> bytes:
    """Return the digest of a simulated adapter; empty without a name."""
    return blake2b(name.encode(), digest_size=KEY_BYTES).digest() if name else b""


@dataclass(frozen=True)
class SimulatedAdapter:
    """See `pdserve.engine.adapters.Adapter`."""

    name: str
    digest: bytes


class SimulatedAdapters(Adapters):
    """See `pdserve.engine.adapters`.

    Args:
        names: of all.
        count: slots.
        model: what they add to steps.
        take: lets a duration pass.
    """

    def __init__(self, names: Sequence[str], count: int, model: AdapterModel, take: Callable[[float], None]) -> None:
        self._known = {digest_of(name): SimulatedAdapter(name, digest_of(name)) for name in names}
        self._model, self._take = model, take
        self._slots = SlotTable(count, lambda slot, adapter: take(model.load_s))

    def find(self, digest: bytes) -> Adapter:
        if digest not in self._known:
            raise RequestError("the adapter is not on this instance", kind="unknown_adapter")
        return self._known[digest]

    def acquire(self, seq: EngineSequence, *siblings: EngineSequence) -> bool:
        return self._slots.acquire(seq, *siblings)

    def release(self, seq: EngineSequence) -> None:
        self._slots.release(seq)

    def begin_step(self, plan: StepPlan) -> None:
        if (seconds := self.seconds((seq, plan.num_tokens(seq)) for seq in plan.counts)) > 0:
            self._take(seconds)

    def seconds(self, rows: Iterable[tuple[EngineSequence, int]]) -> float:
        """Return by how much the adapters of sequences prolong a step, given how many tokens of each it has."""
        counts = [(seq.adapter.digest, count) for seq, count in rows if seq.adapter is not None]
        return self._model.seconds(len({digest for digest, _ in counts}), sum(count for _, count in counts))

    def change(self, order: pb.ChangeAdapter, host: Host, on_done: Callable[[str], None]) -> None:
        on_done("a simulation loads no adapters at run time")

    def listing(self) -> list[pb.Adapter]:
        return [pb.Adapter(name=one.name, digest=one.digest) for one in self._known.values()]
