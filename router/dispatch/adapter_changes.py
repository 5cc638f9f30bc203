"""Orders to load and unload adapters: every instance that takes them gets one, and the outcome is that of all of them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.backend import ServedAdapter
from pdserve.router.instances.fleet import Fleet, InstanceHandle

log = logging.getLogger(__name__)
MAX_ERROR_CHARS = 1000  # of an instance's answer
NO_INSTANCE = "no instance loads adapters at run time; start the instances with --lora-folder"


@dataclass(eq=False)
class _Order:
    """An order under way.

    Attributes:
        due: instances that have not answered.
        done: those that have obeyed.
        errors: answers of the others, each with the instance's id.
    """

    order: pb.ChangeAdapter
    on_done: Callable[[str], None]
    due: set[InstanceHandle]
    done: list[InstanceHandle] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class AdapterChanges:
    """The orders under way. An instance that is lost counts for nothing: when it is back, it is told what it lacks."""

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
        order = pb.ChangeAdapter(number=next(self._numbers), name=name, path=path, replaces=replaces)
        self._orders[order.number] = _Order(order, on_done, instances)
        for instance in instances:
            instance.connection.send(pb.RouterFrame(change_adapter=order))

    def answered(self, instance: InstanceHandle, number: int, error: str) -> None:
        """Record an instance's answer to an order."""
        state = self._orders.get(number)
        if state is None or instance not in state.due:
            if error:
                log.warning("%s: %s", instance.id, error[:MAX_ERROR_CHARS], extra={"instance": instance.id})
            return
        state.due.remove(instance)
        if error:
            state.errors.append(f"{instance.id}: {error[:MAX_ERROR_CHARS]}")
        else:
            state.done.append(instance)
        self._end_if_answered(state)

    def lost(self, instance: InstanceHandle) -> None:
        """Wait for no answer of an instance that has left."""
        for state in [*self._orders.values()]:
            if instance in state.due:
                state.due.remove(instance)
                self._end_if_answered(state)

    def _end_if_answered(self, state: _Order) -> None:
        if state.due:
            return
        del self._orders[state.order.number]
        if state.errors and not state.order.replaces:
            for instance in state.done:
                instance.connection.send(pb.RouterFrame(change_adapter=pb.ChangeAdapter(name=state.order.name)))
        nobody = "" if state.done else "the instances were lost before they answered"
        state.on_done(min(state.errors, default=nobody))

    def share(self, joined: InstanceHandle, adapters: Mapping[str, ServedAdapter]) -> None:
        """Let instances load what others have and they lack, now that one has attached.

        What it has under a name that others have taken away from the same adapter, it unloads: it was told nothing then.
        """
        fleet = self._fleet.instances.values()
        known = {(one.name, one.digest) for other in fleet if other is not joined for one in other.hello.adapters}
        in_use = {name for name, _ in known} | {state.order.name for state in self._orders.values()}
        gone = {one.name for one in joined.hello.adapters if one.name not in in_use and ("", one.digest) in known}
        for instance in fleet:
            here = {(one.name, one.digest) for one in instance.hello.adapters}
            for name, adapter in adapters.items() if instance.hello.loads_adapters else ():
                if name in gone and instance is joined:
                    instance.connection.send(pb.RouterFrame(change_adapter=pb.ChangeAdapter(name=name)))
                elif name not in gone and (name, adapter.digest) not in here:
                    order = pb.ChangeAdapter(name=name, path=adapter.path, replaces=True)
                    instance.connection.send(pb.RouterFrame(change_adapter=order))
