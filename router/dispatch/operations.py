"""Operators' requests to the fleet: list, drain, change a role, reset the prefix cache. See `Backend`."""

import logging

from pdserve.errors import Conflict, NotFound
from pdserve.proto import pdserve_pb2 as pb
from pdserve.router.dispatch.request_state import Needs
from pdserve.router.dispatch.selector import InstanceSelector
from pdserve.router.instances.fleet import Fleet

log = logging.getLogger(__name__)


class Operations:
    """Operators' requests to a fleet."""

    def __init__(self, fleet: Fleet, selector: InstanceSelector) -> None:
        self._fleet = fleet
        self._selector = selector

    def instances(self) -> list[dict[str, object]]:
        now = self._fleet.now()
        return [
            {
                **instance.as_dict(now),
                "cached_blocks": self._fleet.index.num_blocks(instance.id),
                "breaker": self._fleet.breakers.state(instance.id, now),
            }
            for instance in sorted(self._fleet.instances.values(), key=lambda instance: instance.id)
        ]

    def drain(self, instance_id: str, role: str = "") -> None:
        instance = self._fleet.instances.get(instance_id)
        if instance is None:
            raise NotFound(f"no instance {instance_id!r} is attached to this router", kind="instance_not_found")
        if instance.is_draining:
            raise Conflict(f"{instance_id} is already draining", kind="draining")
        if role == instance.hello.role:
            return
        if missing := self._selector.missing_roles(Needs(left=instance)):
            raise Conflict(f"{missing} would be available while {instance_id} drains", kind="last_instance")
        hello = pb.Hello()
        hello.CopyFrom(instance.hello)
        hello.role = role or hello.role
        if reason := self._fleet.conflict(hello):
            raise Conflict(f"{instance_id} cannot serve as {role}: {reason}", kind="role_refused")
        self._fleet.begin_drain(instance)  # at once; the instance will announce it to all routers
        instance.connection.send(pb.RouterFrame(drain=pb.Drain(role=role)))

    def reset_prefix_cache(self, now_ms: int) -> tuple[list[str], list[str]]:
        self._fleet.reset_cache(max(now_ms, self._fleet.cache_epoch + 1))
        log.info("the prefix cache was reset")
        instances = self._fleet.instances
        return sorted(instances), sorted({one.hello.connector for one in instances.values()})
