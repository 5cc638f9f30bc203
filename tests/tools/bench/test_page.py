"""The HTML report."""

import re

from pdserve.tools.bench.page import chart, is_worth_drawing, page, run_charts, sweep_chart
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.sweep import Trial


def test_the_page_needs_no_other_host_and_escapes_what_servers_say() -> None:
    samples = [Sample(i, i, sent=i, ended=i + 2, token_times=[i + 1, i + 1.5], status=200) for i in range(5)]
    charts = [*run_charts(samples, {"itl": 0.05}), sweep_chart([Trial(1, 9, 10), Trial(2, 1, 10, True)], [0.9])]
    assert len(charts) == 5
    text = page("a </script> b", "x < y", ["<b>"], charts, "/*plotly*/")
    assert not re.search(r"(?:src|href)=", text) and "//" not in text.replace("/*plotly*/", "")
    assert text.count("</script>") == 2 and "&lt;b&gt;" in text and "width=device-width" in text


def test_a_page_begins_with_its_verdict_and_its_figures() -> None:
    text = page("t", "figures", [], [chart("c", [])], "", verdict=["it <holds>"], details=["more"])
    order = [text.index(part) for part in ("it &lt;holds&gt;", "<pre>figures", 'class="chart"', "<p>more", "<script>")]
    assert order == sorted(order) and "prefers-color-scheme:dark" in text


def test_a_single_point_is_not_drawn() -> None:
    assert not is_worth_drawing(chart("", [{"x": [1, 1], "y": [2, 3]}, {"x": [], "y": []}]))
    assert is_worth_drawing(chart("", [{"x": ["1P+1D"], "y": [2]}, {"x": ["2 both"], "y": [3]}]))
    heat = {"x": ["1D", "2D"], "z": [[0.5, None]]}
    assert not is_worth_drawing(chart("", [heat])) and is_worth_drawing(chart("", [heat | {"z": [[0.5, 0.6]]}]))


def test_a_run_without_answers_has_no_charts() -> None:
    assert run_charts([Sample(0, 0, error="refused")], {}) == []
