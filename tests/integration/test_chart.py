"""The pods of the Helm chart's CPU demo, as processes: their commands serve, and their probes answer.

Kubernetes' part, names and addresses of pods, is played by this test; all pods have the address 127.0.0.1.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.cli.deployment import free_port

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pdserve"


class Pod:
    """A pod of a Deployment, with free ports in place of those in its manifest."""

    def __init__(self, deployment: dict[str, Any], redis_url: str) -> None:
        (self.container,) = deployment["spec"]["template"]["spec"]["containers"]
        self.name = f"{deployment['metadata']['name']}-0"
        self.ports = {port["containerPort"]: free_port() for port in self.container["ports"]}
        self.environment = {entry["name"]: entry.get("value", "") for entry in self.container["env"]}
        self.environment |= {"POD_NAME": self.name, "POD_IP": "127.0.0.1"}
        self.environment |= {"PDSERVE_REGISTRY": redis_url, "PDSERVE_CONNECTOR": redis_url}
        self.environment["REDIS_PASSWORD"] = ""

    @property
    def arguments(self) -> list[str]:
        arguments = self.container["args"]
        for name in ("POD_NAME", "POD_IP"):
            arguments = [argument.replace(f"$({name})", self.environment[name]) for argument in arguments]
        for port, free in self.ports.items():
            arguments = [argument.replace(f"port={port}", f"port={free}") for argument in arguments]
        return list(arguments)

    def url(self, port_name: str) -> str:
        (port,) = [port["containerPort"] for port in self.container["ports"] if port["name"] == port_name]
        return f"http://127.0.0.1:{self.ports[port]}"

    def passes(self, probe: str) -> bool:
        """Ask as the kubelet would."""
        get = self.container[probe]["httpGet"]
        try:
            return httpx.get(self.url(get["port"]) + get["path"]).is_success
        except httpx.TransportError:
            return False


def test_pods_of_the_cpu_demo_find_each_other_and_serve(
    fork_server: Any, redis_url: str, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    values = yaml.safe_load((CHART / "examples" / "cpu-demo.yaml").read_text())
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="chat", namespace="prod")
    documents = [
        yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(("router.yaml", "instances.yaml"))
    ]
    deployments = [d for group in documents for d in group if d and d["kind"] == "Deployment"]
    pods = {pod.name.split("-")[2]: pod for pod in (Pod(deployment, redis_url) for deployment in deployments)}
    assert pods.keys() == {"router", "prefill", "decode"}
    with (tmp_path / "output").open("w") as output:
        processes = [
            fork_server.start(pod.arguments, os.environ | pod.environment, output.fileno(), output.fileno())
            for pod in pods.values()
        ]
        try:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for name, pod in pods.items():
                    wait_until(lambda pod=pod, probe=probe: pod.passes(probe), f"{probe} of {name}")
            url = pods["router"].url("http")
            body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            assert "Paris" in httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
            names = ["chat-pdserve-decode-0", "chat-pdserve-prefill-0"]

            def attached() -> list[str]:
                return sorted(one["instance_id"] for one in httpx.get(f"{url}/debug/instances").json()["instances"])

            wait_until(lambda: attached() == names, "one that was silent for longer than a lease is back")
        finally:
            for process in processes:
                process.kill()
            print((tmp_path / "output").read_text())
