"""Launcher of pods: scales the Deployments that the Helm chart (`deploy/helm`) makes, through Kubernetes' API.

An instance's id is the name of its pod. The Deployment of a pod is read from its labels, not from its role, which may have
been changed since. Needs the extra `pdserve[kubernetes]`.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pdserve.errors import SetupError, install

try:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError
except ImportError as error:
    raise SetupError(f"Kubernetes' client is not installed: {install('kubernetes')}") from error

CHART, ROLES = "pdserve", ("prefill", "decode", "both")
NAME, RELEASE, COMPONENT = (f"app.kubernetes.io/{label}" for label in ("name", "instance", "component"))
TEMPLATE_HASH = "pod-template-hash"  # label that tells ReplicaSets apart
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
PHASES = ("Pending", "Unknown", "Running")  # in the order in which pods are removed
TIMEOUT_S = 10.0
MAX_CONFLICTS = 5  # scalings by others between our reading and our writing, after which we give up
CONFLICT = 409


@dataclass(frozen=True)
class Pod:
    """A pod. When a Deployment shrinks, Kubernetes ends the pod of the lowest `rank`, then of the lowest `deletion_cost`."""

    name: str
    template_hash: str
    rank: tuple[bool, int, bool]  # assigned to a node, index of its phase, ready
    deletion_cost: int

    @classmethod
    def of(cls, pod: Any) -> "Pod":
        conditions = {one.type: one.status for one in pod.status.conditions or ()}
        rank = (bool(pod.spec.node_name), PHASES.index(pod.status.phase), conditions.get("Ready") == "True")
        cost = int((pod.metadata.annotations or {}).get(DELETION_COST, "0"))
        return cls(pod.metadata.name, pod.metadata.labels.get(TEMPLATE_HASH, ""), rank, cost)


def cost_to_go_first(chosen: Pod, others: Iterable[Pod]) -> int:
    """Return the deletion cost with which Kubernetes removes `chosen` before the other pods of its Deployment.

    Raises:
        SetupError: no cost achieves that.
    """
    others = list(others)
    for other in others:
        if other.template_hash != chosen.template_hash:
            raise SetupError(
                f"a rolling update is under way, in which Kubernetes might remove a pod other than {chosen.name}"
            )
        if other.rank < chosen.rank:
            raise SetupError(f"{other.name} is not ready, so Kubernetes would remove it before {chosen.name}")
    return min((0, *(other.deletion_cost for other in others))) - 1


class KubernetesLauncher:
    """Starts and stops the pods of one release of the chart. Implements `pdserve.launchers.launcher.Launcher`.

    The credentials are those of the pod's service account (`autoscaler.serviceAccount` of the chart) or, outside of a
    cluster, of kubectl's configuration.

    Raises:
        SetupError: there are no credentials.
    """

    def __init__(self, release: str, namespace: str) -> None:
        try:
            # config.load_config() would print what it does
            is_in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
            (config.load_incluster_config if is_in_cluster else config.load_kube_config)()
        except config.ConfigException as error:
            raise SetupError(f"no credentials for Kubernetes: {error}") from error
        self._release, self._namespace = release, namespace
        self._core, self._apps = client.CoreV1Api(), client.AppsV1Api()

    def start(self, role: str) -> None:
        """Scale the Deployment of the role up by one.

        Raises:
            SetupError: Kubernetes refuses, or the release has no such Deployment.
        """
        with _errors_in_one_line():
            self._scale(self._deployment(role), 1)

    def stop(self, instance_id: str) -> None:
        """Scale the Deployment of a pod down by one, with the pod as the first to go. It drains when it is told to end.

        Raises:
            SetupError: Kubernetes refuses, the release has no such pod, or another pod would have to go first.
        """
        with _errors_in_one_line():
            pod = self._core.read_namespaced_pod(instance_id, self._namespace, _request_timeout=TIMEOUT_S)
            labels = pod.metadata.labels or {}
            component = labels.get(COMPONENT, "")
            if (labels.get(NAME), labels.get(RELEASE)) != (CHART, self._release) or component not in ROLES:
                raise SetupError(f"the pod {instance_id} is no instance of the release {self._release}")
            if pod.metadata.deletion_timestamp is not None:
                raise SetupError(f"the pod {instance_id} is already being removed")
            if pod.status.phase not in PHASES:  # it is no replica any more: another pod would go in its place
                raise SetupError(f"the pod {instance_id} has ended already, in the phase {pod.status.phase}")
            deployment = self._deployment(component)
            cost = cost_to_go_first(Pod.of(pod), self._other_pods(component, instance_id))
            annotation = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
            self._core.patch_namespaced_pod(instance_id, self._namespace, annotation, _request_timeout=TIMEOUT_S)
            self._scale(deployment, -1)

    def _selector(self, component: str) -> str:
        return f"{NAME}={CHART},{RELEASE}={self._release},{COMPONENT}={component}"

    def _deployment(self, component: str) -> str:
        """Return the name of the Deployment of a role."""
        found = self._apps.list_namespaced_deployment(
            self._namespace, label_selector=self._selector(component), _request_timeout=TIMEOUT_S
        ).items
        if len(found) != 1:
            place = f"the release {self._release} in the namespace {self._namespace}"
            raise SetupError(f"{place} has {len(found)} Deployments of {component} instances, not 1")
        return str(found[0].metadata.name)

    def _other_pods(self, component: str, instance_id: str) -> list[Pod]:
        """Return the pods beside `instance_id` that count as replicas."""
        pods = self._core.list_namespaced_pod(
            self._namespace, label_selector=self._selector(component), _request_timeout=TIMEOUT_S
        ).items
        return [
            Pod.of(pod)
            for pod in pods
            if pod.metadata.name != instance_id
            and pod.metadata.deletion_timestamp is None
            and pod.status.phase in PHASES
        ]

    def _scale(self, deployment: str, change: int) -> None:
        """Change the number of replicas, without undoing what others change at the same time."""
        for attempt in range(MAX_CONFLICTS):
            scale = self._apps.read_namespaced_deployment_scale(deployment, self._namespace, _request_timeout=TIMEOUT_S)
            replicas = (scale.spec.replicas or 0) + change
            if replicas < 0:
                raise SetupError(f"{deployment} has been scaled to 0 already")
            scale.spec.replicas = replicas
            try:  # with the resource version that was read
                self._apps.replace_namespaced_deployment_scale(
                    deployment, self._namespace, scale, _request_timeout=TIMEOUT_S
                )
                return
            except ApiException as error:
                if error.status != CONFLICT or attempt == MAX_CONFLICTS - 1:
                    raise


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        raise SetupError(f"Kubernetes: {_message(error)}") from error
    except HTTPError as error:
        raise SetupError(f"Kubernetes' API cannot be reached: {error}") from error


def _message(error: ApiException) -> str:
    """Return the message of the API's Status object or, of another server's answer, its status line."""
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return f"{error.status} {error.reason}"
