"""`pdserve up`: settings that it passes on."""

import sys
from typing import Any

import pytest

from pdserve.cli.up import controller_config, up
from pdserve.config import UpConfig
from pdserve.errors import SetupError


@pytest.mark.parametrize("counts", [{}, {"prefill": 0, "decode": 0, "both": 2}])
def test_the_controller_of_autoscale_has_the_settings_of_the_deployment(counts: dict[str, Any]) -> None:
    up = UpConfig(autoscale="ttft.p90=1s", profile="p.json", tensor_parallel_size=2, max_num_seqs=8, **counts)
    found = controller_config(up, ["http://one", "http://two"])
    assert (found.router, found.slo, found.profile) == ("http://one,http://two", "ttft.p90=1s", "p.json")
    assert found.apply and found.max_num_seqs == 8 and (found.model, found.connector) == ("", "")


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft.p80=1s", "p80 of ttft is not known"),
        ("latency=1s", "latency"),
        ("ttft.p90=1m", "is no objective"),
        (",", "there is no target"),
    ],
)
def test_a_wrong_slo_is_said_before_anything_starts(slo: str, message: str) -> None:
    """It was said once the fleet was ready, which then ended. The connector, which is wrong too, is not even tried."""
    with pytest.raises(SetupError, match=f"--autoscale: .*{message}"):
        up(UpConfig(model="/nowhere", connector="pigeon://", autoscale=slo, profile="p.json"))


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [
        ("grpc_port", 0, "grpc"),
        ("batch_folder", "batches", "python_multipart"),
        ("kv_events_subscribe", '[{"endpoint": "tcp://127.0.0.1:5557"}]', "zmq"),
        ("otlp_endpoint", "http://127.0.0.1:4318", "opentelemetry.sdk"),
        ("response_store", "redis://127.0.0.1:1", "redis"),
    ],
)
def test_a_missing_extra_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, package: str
) -> None:
    """Routers said it while instances were loading the model. The connector is wrong too, and not even tried."""
    monkeypatch.setitem(sys.modules, package, None)
    option = "--" + setting.replace("_", "-")
    with pytest.raises(SetupError, match=rf"{option}.* needs? .*: pip install -e '\.\[.+\]'$"):
        up(UpConfig(connector="pigeon://", **{setting: value}))
