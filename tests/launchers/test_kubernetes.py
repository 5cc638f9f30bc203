"""The launcher of pods, against a fake API server: no cluster can run here.

The fake keeps Deployments and pods, checks resource versions and permissions (those of the chart's Role), and removes pods in
the documented order of the ReplicaSet controller.
"""

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from pdserve.cli.deployment import free_port
from pdserve.errors import SetupError
from pdserve.launchers.kubernetes import DELETION_COST, KubernetesLauncher
from pdserve.launchers.launcher import Launcher

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pdserve"
CONTENT_TYPES = {"PATCH": "application/strategic-merge-patch+json"}  # of others: none, which is JSON
Object = dict[str, Any]


class FakeKubernetes:
    """A fake of the part of Kubernetes' API server, and of its controllers, that the launcher uses.

    Attributes:
        replicas: Deployment → its replicas.
        pods: name → pod, in the order of creation.
        before_scale: called before each change of a scale is checked, as a person who scales at the same time would be.
    """

    def __init__(self, documents: list[Object]) -> None:
        self.deployments = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Deployment"}
        (role,) = [d for d in documents if d["kind"] == "Role"]
        self._rules = role["rules"]
        self.replicas = dict.fromkeys(self.deployments, 0)
        self.pods: dict[str, Object] = {}
        self.before_scale: Callable[[], None] = lambda: None
        self._version = 1
        self._num_created = 0

    def scale(self, deployment: str, replicas: int) -> None:
        """Change the replicas as `kubectl scale` would, with new pods ready at once."""
        self._version += 1
        self.replicas[deployment] = replicas
        own = [pod for pod in self.pods.values() if pod["metadata"]["name"].startswith(f"{deployment}-")]
        for _ in range(replicas - len(own)):
            self.add_pod(deployment)
        for pod in sorted(own, key=self._order)[: max(0, len(own) - replicas)]:
            del self.pods[pod["metadata"]["name"]]

    def add_pod(self, deployment: str, *, template_hash: str = "5d9f", ready: bool = True) -> str:
        self._num_created += 1
        name = f"{deployment}-{template_hash}-{self._num_created:05}"
        labels = self.deployments[deployment]["spec"]["template"]["metadata"]["labels"]
        self.pods[name] = {
            "metadata": {"name": name, "labels": labels | {"pod-template-hash": template_hash}, "annotations": {}},
            "spec": {"nodeName": "node-0", "containers": []},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
        }
        return name

    @staticmethod
    def _order(pod: Object) -> tuple[bool, int, bool, int]:
        ready = pod["status"]["conditions"][0]["status"] == "True"
        phase = ["Pending", "Unknown", "Running"].index(pod["status"]["phase"])
        return "nodeName" in pod["spec"], phase, ready, int(pod["metadata"]["annotations"].get(DELETION_COST, 0))

    def answer(self, method: str, url: str, body: Object) -> tuple[int, Object]:
        """Return the status and the JSON of the answer to a request."""
        path, query = urlsplit(url).path.strip("/").split("/"), parse_qs(urlsplit(url).query)
        group = "" if path[0] == "api" else path[1]
        namespace, kind, name, *sub = [*path[path.index("namespaces") + 1 :], ""][:4]
        verb = {"GET": "get" if name else "list", "PUT": "update", "PATCH": "patch"}[method]
        if namespace != "prod" or not self._allows(group, "/".join([kind, *filter(None, sub)]), name, verb):
            return self.failure(403, f"{kind} is forbidden: cannot {verb} in the namespace {namespace!r}")
        objects = self.pods if kind == "pods" else self.deployments
        if not name:
            wanted = dict(label.split("=") for label in query["labelSelector"][0].split(","))
            items = [one for one in objects.values() if wanted.items() <= one["metadata"]["labels"].items()]
            return 200, {"items": items}
        if name not in objects:
            return self.failure(404, f'{kind} "{name}" not found')
        if sub == ["scale"]:
            return self._scale_answer(name, verb, body)
        if verb == "patch":
            objects[name]["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return 200, objects[name]

    def _scale_answer(self, name: str, verb: str, body: Object) -> tuple[int, Object]:
        if verb == "update":
            self.before_scale()
            if body["metadata"]["resourceVersion"] != str(self._version):
                return self.failure(
                    409, "the object has been modified; please apply your changes to the latest version"
                )
            self.scale(name, body["spec"]["replicas"])
        metadata = {"name": name, "namespace": "prod", "resourceVersion": str(self._version)}
        return 200, {"metadata": metadata, "spec": {"replicas": self.replicas[name]}}

    def _allows(self, group: str, resource: str, name: str, verb: str) -> bool:
        return any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and name in rule.get("resourceNames", [name])
            for rule in self._rules
        )

    @staticmethod
    def failure(code: int, message: str) -> tuple[int, Object]:
        return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@contextmanager
def served(fake: FakeKubernetes) -> Iterator[int]:
    """Serve the fake on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "{}")
            status, answer = 415, FakeKubernetes.failure(415, "the body of the request was in an unknown format")[1]
            if self.headers.get("Content-Type") == CONTENT_TYPES.get(self.command):
                status, answer = fake.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_PATCH = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """configure(port) → kubectl's configuration names the API server at that port."""

    def write(port: int) -> None:
        file = tmp_path / "config"
        content = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "test", "user": {"token": "t"}}],
        }
        file.write_text(yaml.safe_dump(content))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    return write


@pytest.fixture
def fake(configure: Callable[[int], None]) -> Iterator[FakeKubernetes]:
    """Two prefill and three decode pods of the release `chat`, which the chart made."""
    with helm.Chart.load(CHART) as chart:
        templates = chart.render({"autoscaler": {"serviceAccount": True}}, name="chat", namespace="prod")
    texts = [text for name, text in templates.items() if name.endswith(".yaml")]
    fake = FakeKubernetes([document for text in texts for document in yaml.safe_load_all(text) if document])
    fake.scale("chat-pdserve-prefill", 2)
    fake.scale("chat-pdserve-decode", 3)
    with served(fake) as port:
        configure(port)
        yield fake


@pytest.fixture
def launcher(fake: FakeKubernetes) -> Launcher:
    return KubernetesLauncher("chat", "prod")


def pods_of(fake: FakeKubernetes, role: str) -> list[str]:
    return [name for name in fake.pods if name.startswith(f"chat-pdserve-{role}-")]


def test_start_scales_the_deployment_of_the_role(fake: FakeKubernetes, launcher: Launcher) -> None:
    launcher.start("decode")
    assert fake.replicas == {
        "chat-pdserve-prefill": 2,
        "chat-pdserve-decode": 4,
        "chat-pdserve-router": 0,
        "chat-pdserve-redis": 0,
    }


def test_stop_removes_the_pod_that_it_names(fake: FakeKubernetes, launcher: Launcher) -> None:
    first, second, third = pods_of(fake, "decode")
    launcher.stop(second)
    assert pods_of(fake, "decode") == [first, third]
    fake.pods[first]["metadata"]["annotations"][DELETION_COST] = "-7"  # of a stop that went no further
    launcher.stop(third)
    assert pods_of(fake, "decode") == [first]
    assert fake.replicas["chat-pdserve-decode"] == 1 and fake.replicas["chat-pdserve-prefill"] == 2


def test_scaling_by_others_meanwhile_is_not_undone(fake: FakeKubernetes, launcher: Launcher) -> None:
    def scale_once() -> None:
        fake.before_scale = lambda: None
        fake.scale("chat-pdserve-decode", 7)

    fake.before_scale = scale_once
    launcher.start("decode")
    assert fake.replicas["chat-pdserve-decode"] == 8
    fake.before_scale = lambda: fake.scale("chat-pdserve-decode", 9)
    with pytest.raises(SetupError, match="Kubernetes: the object has been modified"):
        launcher.start("decode")


def test_a_pod_is_not_stopped_where_another_would_go_first(fake: FakeKubernetes, launcher: Launcher) -> None:
    chosen = pods_of(fake, "decode")[0]
    starting = fake.add_pod("chat-pdserve-decode", ready=False)
    with pytest.raises(SetupError, match=f"{starting} is not ready, so Kubernetes would remove it before {chosen}"):
        launcher.stop(chosen)
    fake.replicas["chat-pdserve-decode"] = 4
    launcher.stop(starting)
    assert starting not in fake.pods and chosen in fake.pods
    fake.add_pod("chat-pdserve-decode", template_hash="77aa")
    with pytest.raises(SetupError, match=f"a rolling update is under way, .* other than {chosen}"):
        launcher.stop(chosen)
    assert not fake.pods[chosen]["metadata"]["annotations"]


def test_what_is_no_instance_of_the_release_is_not_stopped(fake: FakeKubernetes, launcher: Launcher) -> None:
    with pytest.raises(SetupError, match=r'^Kubernetes: pods "nothing" not found$'):
        launcher.stop("nothing")
    router = fake.add_pod("chat-pdserve-router")
    with pytest.raises(SetupError, match=f"the pod {router} is no instance of the release chat"):
        launcher.stop(router)
    ending = pods_of(fake, "prefill")[0]
    fake.pods[ending]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(SetupError, match=f"the pod {ending} is already being removed"):
        launcher.stop(ending)
    evicted = pods_of(fake, "decode")[0]
    fake.pods[evicted]["status"] = {"phase": "Failed"}  # Kubernetes has started another pod by itself
    with pytest.raises(SetupError, match=f"the pod {evicted} has ended already, in the phase Failed"):
        launcher.stop(evicted)
    assert fake.replicas["chat-pdserve-decode"] == 3
    with pytest.raises(SetupError, match="the release chat in the namespace prod has 0 Deployments of both instances"):
        launcher.start("both")


def test_refusals_and_silence_are_one_line(fake: FakeKubernetes, configure: Callable[[int], None]) -> None:
    with pytest.raises(SetupError, match=r"^Kubernetes: deployments is forbidden"):
        KubernetesLauncher("chat", "elsewhere").start("decode")
    configure(free_port())
    with pytest.raises(SetupError, match=r"^Kubernetes' API cannot be reached: .*Connection refused") as caught:
        KubernetesLauncher("chat", "prod").start("decode")
    assert "\n" not in str(caught.value)


def test_missing_credentials_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SetupError, match=r"^no credentials for Kubernetes: "):
        KubernetesLauncher("chat", "prod")


def test_a_missing_client_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "pdserve.launchers.kubernetes")
    with pytest.raises(SetupError, match=r"pip install -e '\.\[kubernetes\]'$"):
        importlib.import_module("pdserve.launchers.kubernetes")
