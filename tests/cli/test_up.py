"""`pdserve up`: settings that it passes on."""

from typing import Any

import pytest

from pdserve.cli.up import controller_config
from pdserve.config import UpConfig


@pytest.mark.parametrize("counts", [{}, {"prefill": 0, "decode": 0, "both": 2}])
def test_the_controller_of_autoscale_has_the_settings_of_the_deployment(counts: dict[str, Any]) -> None:
    up = UpConfig(autoscale="ttft.p90=1s", profile="p.json", tensor_parallel_size=2, max_num_seqs=8, **counts)
    found = controller_config(up, ["http://one", "http://two"])
    assert (found.router, found.slo, found.profile) == ("http://one,http://two", "ttft.p90=1s", "p.json")
    assert found.apply and found.max_num_seqs == 8 and (found.model, found.connector) == ("", "")
