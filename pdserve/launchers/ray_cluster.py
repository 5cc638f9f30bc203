"""Places for instances in a Ray cluster: bundles of placement groups."""

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import SetupError, install

try:
    import ray
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise SetupError(f"--on ray needs Ray, which is not installed: {install('ray')}") from None

from pdserve.launchers.ray_actor import InstanceActor

PLACEMENT_TIMEOUT_S = 60.0
ADDRESS_TIMEOUT_S = 10.0
ONE_NODE = "; shm:// keeps all instances on this node: --connector redis://, nixl:// and mooncake:// reach others"


@dataclass(frozen=True)
class Place:
    """One bundle: the CPUs, and perhaps the GPU, of one instance. It stays reserved while its actor is replaced."""

    group: PlacementGroup
    index: int


class RayCluster:
    """Connection to the Ray cluster in which this process runs.

    In a placement group, as inside of a Ray job or a Ray Serve replica that has one, instances get its bundles, and never a
    group of their own: that would wait for resources that the outer group holds already.

    Args:
        instances: number of instances among which the CPUs are divided.
        cpus: CPUs of an instance; None: an equal share of all.
        ranks: processes of an instance, each of which gets a CPU at least.
        gpus: GPUs of an instance, if the cluster has any.
        one_node: place all instances on this node.

    Attributes:
        host: address of this node.
        bundle: resources of an instance.

    Raises:
        SetupError: there is no Ray cluster, or it is too small.
    """

    def __init__(self, instances: int, cpus: int | None, *, ranks: int = 1, gpus: int, one_node: bool) -> None:
        self._groups: list[PlacementGroup] = []
        self._cleanup = _connect()
        self._cleanup.callback(self._remove_groups)
        context = ray.get_runtime_context()
        self.host: str = ray.util.get_node_ip_address()
        self._selector = [{"ray.io/node-id": context.get_node_id()}] if one_node else None
        self._hint = ONE_NODE if one_node else ""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if one_node:
            nodes = [node for node in nodes if node["NodeID"] == context.get_node_id()]
        self._outer = ray.util.get_current_placement_group()
        self._used: set[int] = set()
        resources = self._outer.bundle_specs if self._outer else [node["Resources"] for node in nodes]
        share = cpus or share_cpus([one.get("CPU", 0.0) for one in resources], instances)
        if share == 0 or (cpus is None and share < ranks):
            self.close()
            needed = "no CPU" if ranks == 1 else f"fewer than {ranks} CPUs, one per rank,"
            raise SetupError(f"the Ray cluster has {needed} for each of {instances} instances{self._hint}")
        self.bundle = {"CPU": max(share, ranks)}
        if gpus and any(one.get("GPU", 0.0) >= 1 for one in resources):
            self.bundle["GPU"] = gpus

    def place(self) -> Place:
        """Reserve the resources of one instance.

        Raises:
            SetupError: the cluster has no room for it.
        """
        if self._outer:
            return self._place_in(self._outer)
        group = placement_group([self.bundle], bundle_label_selector=self._selector)
        self._groups.append(group)
        if not group.wait(PLACEMENT_TIMEOUT_S):
            self.release(Place(group, 0))
            raise SetupError(f"the Ray cluster has no room for one more instance with {self.bundle}{self._hint}")
        return Place(group, 0)

    def release(self, place: Place) -> None:
        """Give back the resources of an instance that has ended."""
        if place.group is self._outer:
            self._used.discard(place.index)
        else:
            self._groups.remove(place.group)
            remove_placement_group(place.group)

    def start_actor(self, name: str, place: Place) -> ActorHandle:
        """Return a new actor on this place, which runs nothing yet."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=place.group, placement_group_bundle_index=place.index
        )
        cpus, gpus = self.bundle["CPU"], self.bundle.get("GPU", 0)
        actor = ray.remote(InstanceActor).options(
            num_cpus=cpus, num_gpus=gpus, max_concurrency=2, scheduling_strategy=strategy
        )
        return actor.remote(name)

    def close(self) -> None:
        """Give back the resources of all instances."""
        self._cleanup.close()

    def _remove_groups(self) -> None:
        for group in self._groups:
            remove_placement_group(group)

    def _place_in(self, outer: PlacementGroup) -> Place:
        fits = (
            index
            for index, bundle in enumerate(outer.bundle_specs)
            if index not in self._used and all(bundle.get(name, 0) >= self.bundle[name] for name in self.bundle)
        )
        index = next(fits, None)
        if index is None:
            raise SetupError(f"the placement group of this process has no free bundle with {self.bundle}")
        self._used.add(index)
        return Place(outer, index)


def share_cpus(cpus_of_nodes: Sequence[float], instances: int) -> int:
    """Return the most whole CPUs that each instance can have if all are placed; 0 if there is less than one for each."""
    shares = range(int(max(cpus_of_nodes, default=0)), 0, -1)
    return next((n for n in shares if sum(int(cpus // n) for cpus in cpus_of_nodes) >= instances), 0)


def _connect() -> contextlib.ExitStack:
    """Connect to the cluster unless this process is connected; return what disconnects it again."""
    disconnect = contextlib.ExitStack()
    if not ray.is_initialized():
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise SetupError(
                "no Ray cluster was found: run `ray start --head` here, or set RAY_ADDRESS to one in which this machine is"
                " a node"
            ) from error
        disconnect.callback(ray.shutdown)
    return disconnect


def _check_address(address: str) -> None:
    """Raise `SetupError` at once for an address with which Ray would try for minutes, and then end this process."""
    if "://" in address:
        raise SetupError(
            f"RAY_ADDRESS={address}: Ray Client does not suffice; run this command on a node of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # Ray looks for a cluster of this machine
    try:
        socket.create_connection((host, int(port)), ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise SetupError(f"RAY_ADDRESS={address}: no Ray cluster answers there: {error.strerror or error}") from error
