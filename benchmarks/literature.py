"""Forecasts beside what DistServe and Splitwise have published: `python benchmarks/literature.py --timings FOLDER`.

The folder holds their timings: `distserve_profile_a100_80g.json` and `splitwise_perf_model.csv`.
A term is a setting or a cost in which the forecast differs from what was published; each is changed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report
from distserve import DistServe
from rich.table import Table
from splitwise import Splitwise

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    timings: str = flag("folder of the published timings", "")
    systems: str = flag(
        "of distserve, coding and conversation; the last two are Splitwise's", "distserve,coding,conversation"
    )
    requests: int = flag("of DistServe's runs, at most", 300, least=1)
    terms: str = flag("of those in the table, separated by semicolons; empty: all", "")
    seconds: int = flag("of Splitwise's traces", 60, least=1)


def run(settings: Settings) -> None:
    """Compare forecasts with what was published."""
    settings = settings.sized({"systems": "distserve", "terms": "pdserve", "requests": 6})
    if not settings.timings:
        raise SetupError("give --timings, the folder of the published timings")
    folder, rows = Path(settings.timings), list[dict[str, Any]]()
    wanted = [term.strip() for term in settings.terms.split(";")] if settings.terms else None

    def is_wanted(term: str) -> bool:
        return wanted is None or term in wanted

    if "distserve" in settings.systems:
        system = DistServe(folder, settings.requests)
        for term, change in filter(lambda pair: is_wanted(pair[0]), system.changes.items()):
            setup = change(system.split)
            rows += [one | {"term": term} for one in [*system.runs(setup), *system.simulator(setup)]]
        for term, change in filter(lambda pair: is_wanted(pair[0]), system.vllm_changes.items()):
            rows += [one | {"term": term} for one in system.baselines(change)]
    for trace in ("coding", "conversation"):
        if trace in settings.systems:
            splitwise = Splitwise(folder, settings.seconds)
            for term in filter(is_wanted, splitwise.changes):
                rows += [one | {"term": term} for one in getattr(splitwise, trace)(term)]
    report.show(as_table(rows))
    print(report.write("literature", replace(settings, timings=folder.name), {"rows": rows}))


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("system", "figure", "term", "published", "forecast", "ratio")
    for one in rows:
        ratio = one["forecast"] / one["published"] if one["published"] else float("nan")
        cells = [f"{one[key]:.3g} {one['unit']}" for key in ("published", "forecast")]
        table.add_row(one["system"], one["figure"], one["term"], *cells, f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
