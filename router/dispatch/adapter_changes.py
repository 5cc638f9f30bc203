"""Orders to load and unload adapters: every instance that takes them gets one, and the outcome is that of all of them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.backend import ServedAdapter
from pdserve.router.instances.fleet import Fleet, InstanceHandle

log = logging.getLogger(__name__)
MAX_ERROR_CHARS = 1000  # of an instance's answer
ORDER_S = 600.0  # after which an instance that has not answered is waited for no more: longer than any client waits
NO_INSTANCE = "no instance loads adapters at run time; start the instances with --lora-folder"


@dataclass(eq=False)
class _Order:
    """An order under way.

    Attributes:
        began_at: on the router's clock.
        due: instances that have not answered.
        done: those that have obeyed.
        errors: answers of the others.
        asked: instances that were asked to store it for those that could not load it.
        lacking: the latter, until one has stored it.
        is_offered: one has.
    """

    order: pb.ChangeAdapter
    on_done: Callable[[str], None]
    began_at: float
    due: set[InstanceHandle] = field(default_factory=set)
    done: list[InstanceHandle] = field(default_factory=list)
    errors: dict[InstanceHandle, str] = field(default_factory=dict)
    asked: list[InstanceHandle] = field(default_factory=list)
    lacking: set[InstanceHandle] = field(default_factory=set)
    is_offered: bool = False


class AdapterChanges:
    """The orders under way. An instance that is lost counts for nothing: when it is back, it is told what it lacks.

    all load it ─► one that can stores it, if others cannot ─► these load it from the KV store ─► done, or none keeps it
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._orders: dict[int, _Order] = {}
        self._numbers = count(1)

    def order(self, name: str, path: str, replaces: bool, on_done: Callable[[str], None]) -> None:
        """See `Backend.change_adapter`. If an instance cannot load one under a new name, the others unload it again."""
        instances = {one for one in self._fleet.instances.values() if one.hello.loads_adapters}
        if not instances:
            on_done(NO_INSTANCE)
            return
        self._begin(pb.ChangeAdapter(name=name, path=path, replaces=replaces), instances, on_done)

    def answered(self, instance: InstanceHandle, number: int, error: str) -> None:
        """Record an instance's answer to an order."""
        state = self._orders.get(number)
        if state is None or instance not in state.due:
            if error:
                log.warning("%s: %s", instance.id, error[:MAX_ERROR_CHARS], extra={"instance": instance.id})
            return
        state.due.remove(instance)
        error = error and f"{instance.id}: {error[:MAX_ERROR_CHARS]}"
        if state.asked and not state.is_offered:
            state.is_offered = not error
            _log_error(state.order.name, error)
        elif error:
            state.errors[instance] = error
        else:
            state.done.append(instance)
        self._go_on_if_answered(state)

    def lost(self, instance: InstanceHandle) -> None:
        """Wait for no answer of an instance that has left."""
        for state in [*self._orders.values()]:
            state.lacking.discard(instance)
            state.errors.pop(instance, None)
            if instance in state.due:
                state.due.remove(instance)
                self._go_on_if_answered(state)

    def share(self, adapters: Mapping[str, ServedAdapter], has_joined: bool = False) -> None:
        """Let instances load what others have and they lack, now that one has attached, or some have loaded it.

        What is being unloaded, or has lost its name on one since others have loaded it, these unload: they were not here
        when it was unloaded.
        """
        loading = [one for one in self._fleet.instances.values() if one.hello.loads_adapters]
        for name, adapter in adapters.items():
            if has_joined and self._is_gone(name, adapter.digest):
                for instance in loading:
                    if name in {one.name for one in instance.hello.adapters}:
                        instance.connection.send(pb.RouterFrame(change_adapter=pb.ChangeAdapter(name=name)))
                continue
            lack = {one for one in loading if (name, adapter.digest) not in _named(one)}
            for state in self._orders.values():
                if (state.order.name, state.order.digest) == (name, adapter.digest):
                    lack -= state.due | state.lacking
            if lack:
                order = pb.ChangeAdapter(name=name, path=adapter.path, replaces=True, digest=adapter.digest)
                self._begin(order, lack, partial(_log_error, name))

    def _is_gone(self, name: str, digest: bytes) -> bool:
        """Return whether an adapter was unloaded, by name, after it was last loaded; if under way, the newest order says."""
        orders = [state.order for state in self._orders.values() if state.order.name == name]
        if orders:
            return not orders[-1].path
        found = [one for instance in self._fleet.instances.values() for one in instance.hello.adapters]
        of_digest = [one for one in found if one.digest == digest]
        lost = max((one.loaded_at for one in of_digest if one.lost_name == name), default=0)
        return lost > max((one.loaded_at for one in of_digest if one.name == name), default=0)

    def _begin(self, order: pb.ChangeAdapter, instances: set[InstanceHandle], on_done: Callable[[str], None]) -> None:
        order.number, now = next(self._numbers), self._fleet.now()
        self._orders = {number: one for number, one in self._orders.items() if now - one.began_at < ORDER_S}
        self._orders[order.number] = state = _Order(order, on_done, now)
        self._send(state, instances)

    def _send(self, state: _Order, instances: set[InstanceHandle], offers: bool = False) -> None:
        state.due, state.order.offers = instances, offers
        for instance in [*instances]:
            instance.connection.send(pb.RouterFrame(change_adapter=state.order))

    def _go_on_if_answered(self, state: _Order) -> None:
        if state.due:
            return
        if state.is_offered and state.lacking:
            lacking, state.lacking = state.lacking, set()
            for instance in lacking:
                del state.errors[instance]
            self._send(state, lacking)
        elif not state.is_offered and (holder := self._holder(state)):
            state.asked.append(holder)
            state.lacking = {*state.errors}
            self._send(state, {holder}, offers=True)
        else:
            self._end(state)

    def _holder(self, state: _Order) -> InstanceHandle | None:
        """Return an instance that may store the adapter for those that could not load it; None if there is none."""
        if not state.errors:
            return None
        if not state.order.digest and (loaded := _loaded(state)):
            state.order.digest, state.order.path = loaded.digest, loaded.path
        return min(self._having(state.order.digest) - {*state.asked}, key=lambda one: one.id, default=None)

    def _having(self, digest: bytes) -> set[InstanceHandle]:
        return {one for one in self._fleet.instances.values() if digest in one.adapters}

    def _end(self, state: _Order) -> None:
        order, errors = state.order, state.errors
        self._orders.pop(order.number, None)
        without_errors = "" if state.done else "the instances were lost before they answered"
        error = min(errors.values(), default=without_errors)
        keeping = {*state.done} & {*self._fleet.instances.values()}
        if errors and keeping and order.path and not order.replaces:  # the client is told once none keeps it
            self._begin(pb.ChangeAdapter(name=order.name), keeping, lambda _: state.on_done(error))
            return
        state.on_done(error)
        loaded = None if errors else _loaded(state)
        if order.path and loaded and order.digest in (b"", loaded.digest):  # some may have attached since it began
            self.share({order.name: ServedAdapter(loaded.digest, loaded.path)})


def _named(instance: InstanceHandle) -> set[tuple[str, bytes]]:
    """Return names and digests of the adapters that an instance has."""
    return {(one.name, one.digest) for one in instance.hello.adapters}


def _loaded(state: _Order) -> pb.Adapter | None:
    """Return what an instance that has obeyed has under the order's name; None if there is none."""
    adapters = (one for instance in state.done for one in instance.hello.adapters)
    return next((one for one in adapters if one.name == state.order.name), None)


def _log_error(name: str, error: str) -> None:
    if error:
        log.warning("adapter %s: %s", name, error)
