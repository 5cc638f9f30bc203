"""Series keys, and the Prometheus families built from them."""

import re
from pathlib import Path

from pdserve.counters import GAUGES, HELP, metric_families, series


def test_series_sorts_its_labels() -> None:
    assert series("store_hits") == "store_hits"
    assert series("kv_transfer_bytes", direction="load", connector="shm") == (
        'kv_transfer_bytes{connector="shm",direction="load"}'
    )


def test_families_merge_the_series_of_several_processes() -> None:
    counts = {series("store_hits", decision="cheaper"): 2.0, "kv_cache_blocks": 7.0, "from_the_future": 1.0}
    families = {one.name: one for one in metric_families([({"instance": "a"}, counts), ({"instance": "b"}, counts)])}
    assert families["pdserve_store_hits"].type == "counter" and families["pdserve_kv_cache_blocks"].type == "gauge"
    assert [sample.labels for sample in families["pdserve_store_hits"].samples] == [
        {"instance": "a", "decision": "cheaper"},
        {"instance": "b", "decision": "cheaper"},
    ]
    assert families["pdserve_from_the_future"].documentation == "from an instance of another version"


def test_every_gauge_has_a_help_text() -> None:
    assert set(HELP) >= GAUGES


def test_every_counted_name_has_a_help_text() -> None:
    """Instances count by name; one without a help text would be served as a metric of another version."""
    root = Path(__file__).parent.parent
    files = [path for folder in ("prefill", "decode", "pdserve") for path in (root / folder).rglob("*.py")]
    counted = {
        name
        for path in files
        for name in re.findall(r'\b(?:count|count_threadsafe|series)\(\s*"(\w+)"', path.read_text())
    }
    assert len(counted) > 10 and not counted - HELP.keys()
