"""The HTML report."""

import re

from pdserve.tools.bench.page import page, run_charts, sweep_chart
from pdserve.tools.bench.requests import Sample
from pdserve.tools.bench.sweep import Trial


def test_the_page_needs_no_other_host_and_escapes_what_servers_say() -> None:
    samples = [Sample(i, i, sent=i, ended=i + 2, token_times=[i + 1, i + 1.5], status=200) for i in range(5)]
    charts = [*run_charts(samples, {"itl": 0.05}), sweep_chart([Trial(1, 9, 10), Trial(2, 1, 10, True)], [0.9])]
    assert len(charts) == 5
    text = page("a </script> b", "x < y", ["<b>"], charts, "/*plotly*/")
    assert not re.search(r"(?:src|href)=", text) and "//" not in text.replace("/*plotly*/", "")
    assert text.count("</script>") == 2 and "&lt;b&gt;" in text and "width=device-width" in text


def test_a_run_without_answers_has_no_charts() -> None:
    assert run_charts([Sample(0, 0, error="refused")], {}) == []
