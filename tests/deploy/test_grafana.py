"""Dashboard and alerts ask only for metrics that are exported, and are those that the chart and Compose provision."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.counters import GAUGES, HELP
from pdserve.router.instances.fleet import Fleet
from pdserve.router.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "pdserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def exported() -> set[str]:
    """Return the names of all series of routers and instances."""
    names = {f"pdserve_{name}" + ("" if name in GAUGES else "_total") for name in HELP}
    for family in Metrics(Fleet("router", "model", 1.0, lambda: 0.0)).registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names.update(family.name + suffix for suffix in suffixes)
    return names


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_ask_for_metrics_that_are_exported(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        used = set(re.findall(r"pdserve_\w+", target["expr"]))
        assert used and used <= exported()
        assert target["expr"].count('{job=~"$job"') == len(re.findall(r"pdserve_\w+", target["expr"]))
        by = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= by, "the legend names labels that remain"


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_variables_ask_for_metrics_that_are_exported() -> None:
    queries = [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    assert {name for query in queries for name in re.findall(r"pdserve_\w+", query)} == {"pdserve_router_tasks"}
    assert exported() >= {"pdserve_router_tasks"}


def test_compose_provisions_the_dashboard() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.cpu.yml").read_text())
    grafana = compose["services"]["grafana"]
    assert grafana["profiles"] == compose["services"]["prometheus"]["profiles"] == ["metrics"]
    mounts = dict(mount.split(":")[:2] for mount in grafana["volumes"] if mount.startswith("./"))
    assert all((ROOT / source).exists() for source in mounts)
    (folder,) = [mounts[source] for source in mounts if source.endswith("grafana/pdserve.json")]
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    providers = yaml.safe_load((provisioning / "dashboards" / "pdserve.yaml").read_text())["providers"]
    assert folder.startswith(providers[0]["options"]["path"] + "/")
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]


def test_alerts_ask_for_metrics_that_are_exported_from_the_start() -> None:
    """A counter that appears with its first event shows no increase by it."""
    (group,) = yaml.safe_load((ROOT / "deploy/helm/pdserve/alerts.yaml").read_text())["groups"]
    shown = Metrics(Fleet("router", "model", 1.0, lambda: 0.0)).text().decode()
    of_instances = {f"pdserve_{name}" + ("" if name in GAUGES else "_total") for name in HELP}
    for rule in group["rules"]:
        for name, selector in re.findall(r"(pdserve_\w+)(\{[^}]*\})?", rule["expr"]):
            if name not in of_instances | {"pdserve_handovers_in_vain_total"}:
                assert re.search(rf"^{name}(\{{| )", shown, re.MULTILINE), f"{rule['alert']}: {name}"
            for label, value in re.findall(r'(\w+)=~?"([^"]+)"', selector):
                for one in value.split("|"):
                    assert f'{name}{{{label}="{one}"}} 0.0' in shown, rule["alert"]
    operations = (ROOT / "docs/operations.md").read_text()
    assert all(f"| `{rule['alert']}` |" in operations for rule in group["rules"])


def test_every_alert_says_one_sentence() -> None:
    """Prometheus does not start with other annotations: an unquoted comma ends a text within braces."""
    (group,) = yaml.safe_load((ROOT / "deploy/helm/pdserve/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule["annotations"]) == {"summary"} and rule["annotations"]["summary"].endswith("."), rule["alert"]
