"""The Helm chart, rendered and linted by Helm's library, validated for two versions of Kubernetes; the CLI parses its flags.

No cluster takes part. The schemas of custom resources (KEDA, Prometheus, Gateway API) are not in kubernetes-validate:
`CUSTOM` lists the fields that the chart uses of them, with their types, written after their definitions.
"""

import json
import os
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from pdserve.cli.commands import app
from pdserve.config import InstanceConfig, RouterConfig
from pdserve.router.telemetry.metrics import LOAD_GAUGES

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "pdserve"
EXAMPLES = ("cpu-demo", "one-node", "several-nodes")
VERSIONS = ("1.33", "1.37")
ROLES = ("prefill", "decode", "both")
Document = dict[str, Any]


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


TEXT, NUMBER, LABELS = {"type": "string"}, {"type": "integer"}, {"type": "object"}
METADATA = fields("name", name=TEXT, labels=LABELS)
POLICY = fields(
    "type", "value", "periodSeconds", type={"enum": ["Pods", "Percent"]}, value=NUMBER, periodSeconds=NUMBER
)
SCALE_DOWN = fields(stabilizationWindowSeconds=NUMBER, policies={"type": "array", "items": POLICY})
TRIGGER = fields(
    *("type", "metadata"),
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=fields("serverAddress", "query", "threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
)
MATCH = fields("path", path=fields("type", "value", type={"enum": ["Exact", "PathPrefix"]}, value=TEXT))
RULE = fields(
    *("matches", "backendRefs"),
    matches={"type": "array", "items": MATCH, "minItems": 1, "maxItems": 64},
    backendRefs={"type": "array", "items": fields("name", "port", name=TEXT, port=NUMBER)},
    timeouts=fields(request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
)
CUSTOM = {
    "gateway.networking.k8s.io/v1": fields(
        *("parentRefs", "rules"),
        parentRefs={"type": "array", "items": fields("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=NUMBER)},
        hostnames={"type": "array", "items": TEXT},
        rules={"type": "array", "items": RULE, "minItems": 1},
    ),
    "keda.sh/v1alpha1": fields(
        *("scaleTargetRef", "triggers"),
        scaleTargetRef=fields("name", name=TEXT),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        pollingInterval=NUMBER,
        advanced=fields(horizontalPodAutoscalerConfig=fields(behavior=fields(scaleDown=SCALE_DOWN))),
        triggers={"type": "array", "items": TRIGGER, "minItems": 1},
    ),
    "monitoring.coreos.com/v1": fields(
        *("selector", "endpoints"),
        selector=fields("matchLabels", matchLabels=LABELS),
        endpoints={
            "type": "array",
            "items": fields(
                "port",
                port=TEXT,
                path=TEXT,
                interval=TEXT,
                honorLabels={"type": "boolean"},
                scheme={"enum": ["http", "https"]},
                tlsConfig=fields(insecureSkipVerify={"type": "boolean"}),
                authorization=fields("credentials", credentials=fields("name", "key", name=TEXT, key=TEXT)),
            ),
        },
    ),
}


# What no example has.
OTHER: dict[str, Any] = {
    "both": {"enabled": True, "update": {"recreate": True}},
    "grpcProbes": True,
    "router": {
        "replicas": 1,
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "env": [{"name": "A", "value": "b"}],
    },
    "tls": {"control": "control-tls"},
    "secrets": {"name": "pdserve", "apiKey": "api-key", "redisPassword": "redis-password"},
    "autoscaler": {
        "slo": "ttft.p90=500ms",
        "profile": "my-profile",
        "apply": True,
        "maxInstances": 6,
        "flags": {"window": 60},
        "nodeSelector": {"a": "b"},
    },
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
    "store": {"size": "100Gi", "storageClassName": "nfs"},
    "httpRoute": {"parentRefs": [{"name": "gateway", "namespace": "ingress"}], "hostnames": ["chat.example.com"]},
}


def example(name: str) -> dict[str, Any]:
    """Return the values of an example, the chart's own (`defaults`), or `OTHER`."""
    if name in ("defaults", "other"):
        return OTHER if name == "other" else {}
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def render(values: dict[str, Any]) -> list[Document]:
    """Return the documents of a release `chat` in the namespace `prod`."""
    with helm.Chart.load(CHART) as chart:
        templates = chart.render(values, name="chat", namespace="prod")
    texts = [text for name, text in templates.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@cache
def rendered(name: str) -> list[Document]:
    return render(example(name))


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    """Return the documents of a kind, by name without the release's."""
    found = {d["metadata"]["name"].removeprefix("chat-pdserve-"): d for d in documents if d["kind"] == kind}
    assert len(found) == sum(d["kind"] == kind for d in documents), "names are unique"
    return found


def container(deployment: Document) -> Document:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environment(deployment: Document) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(deployment)["env"]}


def parse(deployment: Document, monkeypatch: pytest.MonkeyPatch) -> RouterConfig | InstanceConfig:
    """Return the settings that the command line reads from a pod's arguments and environment."""
    variables = environment(deployment) | {"POD_NAME": "pod-1", "POD_IP": "10.0.0.1"}
    command, *arguments = container(deployment)["args"]
    for name, value in variables.items():
        if isinstance(value, str):
            arguments = [argument.replace(f"$({name})", value) for argument in arguments]
            monkeypatch.setenv(name, value)
    group: Any = typer.main.get_command(app)
    values = group.commands[command].make_context(command, arguments).params
    return RouterConfig(**values) if command == "router" else InstanceConfig(**values)


# ---- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXAMPLES, "defaults", "other"])
def test_examples_pass_the_linter(name: str) -> None:
    report = helm.lint(CHART, example(name), strict=True, namespace="prod", kube_version="v1.33.0")
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] > 1]  # 1: a chart should have an icon


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*EXAMPLES, "defaults", "other"])
def test_examples_are_valid_manifests(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = cache(kubernetes_validate.utils.schema_contents)  # megabytes, which each call would parse
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", contents)
    for document in rendered(name):
        if document["apiVersion"] in CUSTOM:
            jsonschema.validate(document["metadata"], METADATA)
            jsonschema.validate(document["spec"], CUSTOM[document["apiVersion"]])
            assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        else:
            assert kubernetes_validate.validate(document, version, strict=True) == version


def test_the_validator_finds_unknown_fields() -> None:
    deployment = json.loads(json.dumps(of_kind(rendered("cpu-demo"), "Deployment")["router"]))
    container(deployment)["lifecycle"]["preStop"]["sleep"]["minutes"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="minutes"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", [*EXAMPLES, "defaults", "other"])
def test_selectors_match_the_pods_of_one_deployment(name: str) -> None:
    documents = rendered(name)
    deployments = of_kind(documents, "Deployment")
    labels = {key: d["spec"]["template"]["metadata"]["labels"] for key, d in deployments.items()}

    def selected(selector: dict[str, str]) -> list[str]:
        return [key for key, own in labels.items() if selector.items() <= own.items()]

    for key, deployment in deployments.items():
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == [key]
    for key, budget in of_kind(documents, "PodDisruptionBudget").items():
        assert selected(budget["spec"]["selector"]["matchLabels"]) == [key]
    for key, service in of_kind(documents, "Service").items():
        (target,) = selected(service["spec"]["selector"])
        assert target in (key.removesuffix("-control"), key.removesuffix("s"))
        names = {port["name"] for port in container(deployments[target])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for scaled in of_kind(documents, "ScaledObject").values():
        assert scaled["spec"]["scaleTargetRef"]["name"].removeprefix("chat-pdserve-") in deployments


def test_the_model_of_a_release_cannot_be_changed() -> None:
    """Kubernetes refuses to change a Deployment's selector."""

    def selectors(model: str) -> dict[str, Any]:
        deployments = of_kind(render({"model": {"name": model}}), "Deployment")
        return {name: d["spec"]["selector"]["matchLabels"].get("pdserve/model") for name, d in deployments.items()}

    assert selectors("Qwen/Qwen3-8B") == dict.fromkeys(("router", "prefill", "decode"), "Qwen_Qwen3-8B") | {
        "redis": None
    }
    assert selectors("/models/my model" + "x" * 60)["router"] == ("models_my_model" + "x" * 60)[:62]


def test_the_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == package


# ---- pods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_flag_is_one_of_the_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = of_kind(rendered(name), "Deployment")
    deployments.pop("redis", None)
    assert deployments.keys() == {"router", "prefill", "decode"}
    for role, deployment in deployments.items():
        config = parse(deployment, monkeypatch)
        assert config.model == example(name).get("model", {"name": "demo"})["name"]
        assert config.drain_seconds < deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] - 10
        if isinstance(config, RouterConfig):
            assert (config.announce_host, config.port, config.control_port) == ("10.0.0.1", 8000, 8001)
        else:
            assert (config.instance_id, config.metrics_port) == ("pod-1", 9100)
            assert container(deployment)["name"] == container(deployment)["args"][0] == role
        assert config.registry.startswith("redis://")


def test_flags_of_a_role_win_over_those_of_all_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "instances": {"flags": {"max-num-seqs": 8, "max-num-batched-tokens": 4194304, "convert-kv": True}},
        "decode": {"flags": {"max-num-seqs": 256, "convert-kv": False, "gpu-memory-utilization": 0.5}},
    }
    deployments = of_kind(render(values), "Deployment")
    prefill, decode = (parse(deployments[role], monkeypatch) for role in ("prefill", "decode"))
    assert isinstance(prefill, InstanceConfig) and isinstance(decode, InstanceConfig)
    assert (prefill.max_num_seqs, prefill.max_num_batched_tokens, prefill.convert_kv) == (8, 4194304, True)
    assert (decode.max_num_seqs, decode.max_num_batched_tokens, decode.convert_kv) == (256, 4194304, False)
    assert decode.gpu_memory_utilization == 0.5


@pytest.mark.parametrize("name", EXAMPLES)
def test_probes_ask_the_ports_that_answer(name: str) -> None:
    deployments = of_kind(rendered(name), "Deployment")
    for role, deployment in deployments.items():
        if role == "redis":
            continue
        pod = container(deployment)
        ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
        expected = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
        for probe, path in expected.items():
            assert pod[probe]["httpGet"]["path"] == path
            assert ports[pod[probe]["httpGet"]["port"]] == (8000 if role == "router" else 9100)
        has_tls = role == "router" and bool(example(name).get("tls"))
        assert (pod["readinessProbe"]["httpGet"].get("scheme") == "HTTPS") is has_tls


def test_grpc_probes_ask_services_of_ports_that_serve_them() -> None:
    for role, deployment in of_kind(rendered("other"), "Deployment").items():
        if role in ("redis", "autoscaler"):
            continue
        pod = container(deployment)
        port, flag = (8002, "--grpc-port") if role == "router" else (9101, "--grpc-health-port")
        services = {"startupProbe": "liveness", "livenessProbe": "liveness", "readinessProbe": "readiness"}
        assert {probe: pod[probe]["grpc"] for probe in services} == {
            probe: {"port": port, "service": service} for probe, service in services.items()
        }
        assert f"{flag}={port}" in pod["args"] and {"name": "grpc", "containerPort": port} in pod["ports"]


def test_pods_get_only_the_secrets_that_they_need() -> None:
    deployments = of_kind(rendered("several-nodes"), "Deployment")
    variables = {"PDSERVE_ADMIN_KEY", "PDSERVE_API_KEY", "PDSERVE_CONTROL_TOKEN", "REDIS_PASSWORD", "HF_TOKEN"}
    found = {role: variables & environment(deployment).keys() for role, deployment in deployments.items()}
    shared = {"PDSERVE_CONTROL_TOKEN", "REDIS_PASSWORD", "HF_TOKEN"}
    assert found == {"router": shared | {"PDSERVE_ADMIN_KEY"}, "prefill": shared, "decode": shared}
    for deployment in deployments.values():
        for name in variables & environment(deployment).keys():
            assert environment(deployment)[name]["secretKeyRef"]["name"] == "pdserve"
    secret_volumes = {
        role: [v["name"] for v in d["spec"]["template"]["spec"]["volumes"] if "secret" in v]
        for role, d in deployments.items()
    }
    assert secret_volumes == {"router": ["keys", "tls"], "prefill": [], "decode": []}


def test_pods_run_without_privileges() -> None:
    for name in EXAMPLES:
        for deployment in of_kind(rendered(name), "Deployment").values():
            pod = deployment["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
            allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container(deployment)["securityContext"] == allowed | {"readOnlyRootFilesystem": True}


@pytest.mark.parametrize("name", ["defaults", "other"])
def test_folders_that_the_image_writes_to_are_volumes(name: str) -> None:
    """The root file system is read-only: what the environment of the image names is mounted, and /tmp."""
    image = (ROOT / "Dockerfile").read_text()
    written = re.findall(r"(?:HF_HOME|XDG_CACHE_HOME|TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR)=(\S+)", image)
    assert len(written) == 4
    for role, deployment in of_kind(rendered(name), "Deployment").items():
        pod = container(deployment)
        mounted = {one["mountPath"] for one in pod.get("volumeMounts", []) if not one.get("readOnly")}
        assert {one["name"] for one in pod.get("volumeMounts", [])} == volumes(deployment).keys()
        if role != "redis":  # which saves nothing
            folders = ["/tmp", *(folder for folder in written if role != "autoscaler" or folder != "/models")]
            assert all(any(f"{folder}/".startswith(f"{one}/") for one in mounted) for folder in folders), role


def test_a_store_is_a_claim_or_a_volume_that_all_instances_mount() -> None:
    share = {"nfs": {"server": "filer", "path": "/kv"}}
    for store, connector, source in (
        ({"size": "100Gi"}, "file:///store", {"persistentVolumeClaim": {"claimName": "chat-pdserve-store"}}),
        ({"volume": share}, "file:///store?max_bytes=9GiB", share),
    ):
        given = {} if connector == "file:///store" else {"connector": connector}
        documents = render({"store": store, **given})
        deployments = of_kind(documents, "Deployment")
        for role in ("prefill", "decode"):
            assert environment(deployments[role])["PDSERVE_CONNECTOR"] == connector
            assert volumes(deployments[role])["store"] == source
            assert {"name": "store", "mountPath": "/store"} in container(deployments[role])["volumeMounts"]
        assert "store" not in volumes(deployments["router"]) and "redis" in deployments  # the registry
        claims = {name: one["spec"]["resources"] for name, one in of_kind(documents, "PersistentVolumeClaim").items()}
        assert claims == ({"store": {"requests": {"storage": "100Gi"}}} if "size" in store else {})


def test_a_route_leads_to_the_routers_api_only_and_cuts_no_stream() -> None:
    documents = rendered("other")
    (rule,) = of_kind(documents, "HTTPRoute")["router"]["spec"]["rules"]
    service = of_kind(documents, "Service")["router"]
    backend = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert rule["backendRefs"] == [backend]
    assert [one["path"]["value"] for one in rule["matches"]] == ["/v1"] and rule["timeouts"] == {"request": "0s"}
    assert not of_kind(rendered("defaults"), "HTTPRoute")


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({}, None),
        ({"secrets": {"name": "keys", "apiKey": "api.key"}}, r"prod get secret keys -o jsonpath={.data.api\.key}"),
        ({"secrets": {"name": "keys", "keysFile": "keys.toml"}}, ""),
        ({"tls": {"clients": "tls"}, "model": {"servedName": "chat"}}, None),
    ],
)
def test_notes_print_a_request_with_a_key_if_there_are_any(
    values: dict[str, Any], read: str | None, tmp_path: Path
) -> None:
    """The commands that `helm install` prints, run in a shell; kubectl and curl are stand-ins that record their arguments."""
    for name in ("kubectl", "curl"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ {name} = curl ] || echo a2V5LG90aGVy\n')
        program.chmod(0o755)
    with helm.Chart.load(CHART) as chart:
        (notes,) = (text for name, text in chart.render(values, namespace="prod").items() if "NOTES" in name)
    commands = notes[notes.index("  kubectl") : notes.index("8}'") + 3]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-euc", commands], check=True, env=path, stdout=subprocess.DEVNULL)
    asked = (tmp_path / "asked").read_text()
    for part in ("https://localhost:8000/v1", '"chat"') if "tls" in values else ("http://localhost:8000/v1", '"demo"'):
        assert part in asked
    assert ("set secrets.apiKey" in notes) is ("Authorization: Bearer" not in asked) is (read is None)
    assert not read or (read in asked and "Authorization: Bearer key -H" in asked)


def test_shared_memory_is_the_nodes_where_the_connector_needs_it() -> None:
    def shm(name: str) -> dict[str, Any]:
        return volumes(of_kind(rendered(name), "Deployment")["decode"])["shm"]

    assert shm("one-node")["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
    assert shm("several-nodes")["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def volumes(deployment: Document) -> dict[str, Document]:
    """Return the sources of a pod's volumes, by name."""
    every = deployment["spec"]["template"]["spec"].get("volumes", [])
    return {volume["name"]: {key: value for key, value in volume.items() if key != "name"} for volume in every}


@pytest.mark.parametrize("name", [*EXAMPLES, "defaults", "other"])
def test_a_volume_has_one_source(name: str) -> None:
    """Kubernetes refuses others, which its schema does not show; Helm merges values with the chart's own."""
    for deployment in of_kind(rendered(name), "Deployment").values():
        assert all(len(source) == 1 for source in volumes(deployment).values()), volumes(deployment)


def test_compiled_kernels_are_kept_where_the_image_has_them() -> None:
    folders = re.findall(r"(?:TRITON|TORCHINDUCTOR)_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    claim, folder = {"persistentVolumeClaim": {"claimName": "kernels"}}, {"hostPath": {"path": "/var/cache/pdserve"}}
    for values, expected in (
        ({}, {"emptyDir": {}}),
        ({"instances": {"cache": claim}}, claim),
        ({"prefill": {"cache": folder}, "decode": {"cache": folder}}, folder),
    ):
        deployments = of_kind(render(values), "Deployment")
        for role in ("prefill", "decode"):
            assert volumes(deployments[role])["cache"] == expected
            (mounted,) = (one for one in container(deployments[role])["volumeMounts"] if one["name"] == "cache")
            assert len(folders) == 2 and all(folder.startswith(f"{mounted['mountPath']}/") for folder in folders)
        assert "cache" not in volumes(deployments["router"])


def test_without_a_registry_one_router_is_dialled_by_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = {"redis": {"enabled": False}, "connector": "nixl://", "router": {"replicas": 1}}
    with_tls = {"tls": {"control": "control-tls"}, "router": {"replicas": 1}}
    for values in (direct, with_tls):
        documents = render(values)
        deployments = of_kind(documents, "Deployment")
        assert deployments["router"]["spec"]["strategy"] == {"type": "Recreate"}
        assert of_kind(documents, "Service")["router-control"]["spec"]["publishNotReadyAddresses"]
        config = parse(deployments["prefill"], monkeypatch)
        assert isinstance(config, InstanceConfig) and not config.registry
        assert config.routers == ["chat-pdserve-router-control:8001"]
        monkeypatch.undo()
    assert config.control_cafile == "/etc/pdserve/control/ca.crt"
    assert parse(deployments["router"], monkeypatch).control_keyfile == "/etc/pdserve/control/tls.key"


# ---- scaling -------------------------------------------------------------------------------------------------------


def test_the_number_of_replicas_is_left_to_whoever_scales() -> None:
    def replicas(values: dict[str, Any]) -> dict[str, Any]:
        deployments = of_kind(render(values), "Deployment")
        return {role: d["spec"].get("replicas") for role, d in deployments.items() if role in ROLES}

    assert replicas({"both": {"enabled": True}}) == {"prefill": 1, "decode": 1, "both": 1}
    assert replicas({"prefill": {"replicas": None}, "decode": {"replicas": 0}}) == {"prefill": None, "decode": 0}
    assert replicas({"keda": {"enabled": True}}) == {"prefill": None, "decode": None}


def test_keda_asks_for_gauges_that_routers_export() -> None:
    queries = {
        role: scaled["spec"]["triggers"][0]["metadata"]["query"]
        for role, scaled in of_kind(rendered("several-nodes"), "ScaledObject").items()
    }
    matchers = 'namespace="prod",service="chat-pdserve-router"'
    backlog, occupancy = (f"pdserve_{name}" for name, *_ in LOAD_GAUGES)
    assert queries == {
        "prefill": f'sum(max by (instance) ({backlog}{{role="prefill",{matchers}}}))',
        "decode": f'sum(max by (instance) ({occupancy}{{role="decode",{matchers}}}))',
    }


def test_only_pods_of_the_release_reach_control_ports_instances_and_the_store() -> None:
    def allowed(policy: Document) -> dict[str, list[str]]:
        """Return components by port (empty: any port); no components: everybody."""
        found = {}
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", [{"port": ""}]):
                peers = rule.get("from", [])
                assert all(one["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "chat" for one in peers)
                found[port["port"]] = [v for one in peers for v in one["podSelector"]["matchExpressions"][0]["values"]]
        return found

    policies = {name: allowed(policy) for name, policy in of_kind(rendered("cpu-demo"), "NetworkPolicy").items()}
    assert policies == {
        "router": {"http": [], "control": [*ROLES]},
        "instances": {"": [*ROLES]},
        "redis": {"redis": [*ROLES, "router"]},
    }
    for policy in of_kind(rendered("cpu-demo"), "NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("values", [{}, {"autoscaler": {"slo": "ttft.p90=1s", "profile": "p"}}])
def test_prometheus_scrapes_the_service_that_keda_names(values: dict[str, Any]) -> None:
    documents = render(values | {"serviceMonitor": {"enabled": True}})
    (monitor,) = of_kind(documents, "ServiceMonitor").values()
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    services = of_kind(documents, "Service")
    assert [name for name, one in services.items() if labels <= one["metadata"]["labels"].items()] == ["router"]
    ports = {port["name"] for port in services["router"]["spec"]["ports"]}
    assert {one["port"] for one in monitor["spec"]["endpoints"]} <= ports


def test_alerts_with_the_targets_of_the_values() -> None:
    alerts = {"enabled": True, "ttftSeconds": 0.5, "itlSeconds": 0.05, "labels": {"release": "prometheus"}}
    (rule,) = of_kind(render({"alerts": alerts}), "PrometheusRule").values()
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    found = {one["alert"]: one["expr"] for one in rule["spec"]["groups"][0]["rules"]}
    assert found["PdserveSlowFirstToken"].endswith("> 0.5") and found["PdserveSlowTokens"].endswith("> 0.05")
    assert not of_kind(render({}), "PrometheusRule")


def test_prometheus_has_the_admin_key_for_the_series_of_api_keys() -> None:
    values = {"serviceMonitor": {"enabled": True}, "secrets": {"name": "keys", "adminKey": "admin-key"}}
    (monitor,) = of_kind(render(values), "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "keys", "key": "admin-key"}}


def test_the_autoscaler_may_do_what_the_launcher_does_and_no_more() -> None:
    documents = render({"autoscaler": {"serviceAccount": True}})
    (role,) = of_kind(documents, "Role").values()
    rules = {f"{rule['apiGroups'][0]}/{rule['resources'][0]}": set(rule["verbs"]) for rule in role["rules"]}
    assert rules == {
        "/pods": {"get", "list", "patch"},
        "apps/deployments": {"get", "list"},
        "apps/deployments/scale": {"get", "update"},
    }


def test_the_autoscaler_watches_every_router_and_may_start_pods() -> None:
    documents = rendered("other")
    deployment = of_kind(documents, "Deployment")["autoscaler"]
    arguments = container(deployment)["args"]
    assert (
        "--launcher=kubernetes://prod/chat" in arguments and "--max-instances=6" in arguments and "--apply" in arguments
    )
    assert "--router=dns://chat-pdserve-routers:8000" in arguments
    routers = of_kind(documents, "Service")["routers"]["spec"]
    assert routers["clusterIP"] == "None" and routers["selector"]["app.kubernetes.io/component"] == "router"
    settings = deployment["spec"]["template"]["spec"]
    assert settings["automountServiceAccountToken"] and settings["serviceAccountName"] == "chat-pdserve-autoscaler"
    policies = of_kind(documents, "NetworkPolicy")["router"]["spec"]["ingress"]
    allowed = [
        one["podSelector"]["matchExpressions"][0]["values"]
        for rule in policies
        for one in rule["from"][-1:]
        if "podSelector" in one
    ]
    assert ["autoscaler"] in allowed
    assert "autoscaler" not in of_kind(rendered("defaults"), "Deployment")


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"redis": {"enabled": False}, "connector": "nixl://"}, "router.replicas must be 1 without a registry"),
        ({"redis": {"enabled": False}, "router": {"replicas": 1}}, "connector is empty, and there is no Redis"),
        ({"connector": "shm://kv"}, "the connector shm:// needs sharedMemory.host"),
        ({"connector": "file:///kv"}, "the connector file:// needs store.size or store.volume"),
        ({"store": {"size": "1Gi", "volume": {"emptyDir": {}}}}, "store.size makes a claim"),
        ({"store": {"size": "100 GB"}}, "size"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}]}, "tls": {"clients": "tls"}}, "let the gateway hold"),
        ({"secrets": {"adminKey": "admin-key"}}, "secrets.name is empty, but one of its entries is named"),
        (
            {"keda": {"enabled": True}, "autoscaler": {"serviceAccount": True}},
            "keda.enabled and autoscaler.serviceAccount or .maxInstances: only one of them can scale",
        ),
        ({"autoscaler": {"slo": "ttft.p90=1s"}}, "autoscaler.profile is empty"),
        (
            {"autoscaler": {"slo": "ttft.p90=1s", "profile": "p"}, "tls": {"clients": "tls"}},
            "reaches each router by its address",
        ),
        ({"grpcProbes": True, "tls": {"clients": "tls"}}, "grpcProbes needs plain connections"),
        ({"decode": {"replica": 2}}, "replica"),
        (
            {"instances": {"cache": {"hostPath": {"path": "/a"}}}, "decode": {"cache": {"emptyDir": {}}}},
            "instances.cache or decode.cache names more than one source: emptyDir, hostPath",
        ),
        ({"prefill": {"flags": {"--max-num-seqs": 2}}}, "--max-num-seqs"),
        ({"keda": {"decode": {"occupancy": 0.8}}}, "occupancy"),
        ({"keda": {"decode": {"minReplicas": 0}}}, "minReplicas"),
    ],
)
def test_mistakes_in_values_are_reported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render(values)
