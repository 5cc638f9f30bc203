"""Series keys, and the Prometheus families built from them."""

import re
from pathlib import Path

import pytest

from pdserve.counters import GAUGES, HELP, LABELS, metric_families, parse_series, series


def test_series_sorts_its_labels() -> None:
    assert series("engine_steps") == "engine_steps"
    assert series("kv_transfer_bytes", direction="load", connector="shm") == (
        'kv_transfer_bytes{connector="shm",direction="load"}'
    )


def test_a_series_has_the_labels_that_routers_expect() -> None:
    with pytest.raises(AssertionError, match="LABELS does not name the labels of kv_transfer_bytes"):
        series("kv_transfer_bytes", connector="shm")


def test_families_merge_the_series_of_several_processes() -> None:
    counts = {series("store_hits", decision="cheaper"): 2.0, "kv_cache_blocks": 7.0, "from_the_future": 1.0}
    families = {one.name: one for one in metric_families([({"instance": "a"}, counts), ({"instance": "b"}, counts)])}
    assert families["pdserve_store_hits"].type == "counter" and families["pdserve_kv_cache_blocks"].type == "gauge"
    assert [sample.labels for sample in families["pdserve_store_hits"].samples] == [
        {"instance": "a", "decision": "cheaper"},
        {"instance": "b", "decision": "cheaper"},
    ]
    assert len(families) == 2, "a name of another version is left out"


def test_every_gauge_and_every_label_belongs_to_a_name() -> None:
    assert set(HELP) >= GAUGES | LABELS.keys()


@pytest.mark.parametrize("key", ["", "a b", "a{", "a{}", 'a{b="c"', 'a{b="c"}x', 'a{b="c",}', 'a{b="c""}', "é"])
def test_other_text_is_not_a_series(key: str) -> None:
    assert parse_series(key) is None


def test_a_series_is_parsed_into_its_name_and_labels() -> None:
    labels = {"connector": "shm/converted", "direction": "load"}
    assert parse_series(series("kv_transfer_bytes", **labels)) == ("kv_transfer_bytes", labels)


def test_every_counted_name_has_a_help_text() -> None:
    """Instances count by name; one without a help text would be left out as one of another version."""
    root = Path(__file__).parent.parent
    files = [path for folder in ("prefill", "decode", "pdserve") for path in (root / folder).rglob("*.py")]
    counted = {
        name
        for path in files
        for name in re.findall(r'\b(?:count|count_threadsafe|series)\(\s*"(\w+)"', path.read_text())
    }
    assert len(counted) > 10 and not counted - HELP.keys()
