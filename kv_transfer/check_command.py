"""The command `pdserve connector check`: shows each rule's report as it is made, and what they amount to."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from pdserve.kv_transfer import rules
from pdserve.kv_transfer.conformance import Report, Rule, Verdict, check, name_of, rules_named
from pdserve.kv_transfer.progress import progress
from pdserve.kv_transfer.rules.context import RuleContext
from pdserve.kv_transfer.url import without_password

_RULES = os.path.join(os.path.dirname(rules.__file__), "..", "..")
_COLOURS = {Verdict.HOLDS: "green", Verdict.BROKEN: "bold red", Verdict.NOT_CHECKED: "yellow"}
BROKEN, CHECKED_LITTLE = 1, 3  # exit codes; 2 is an invalid URL or an unusable store


def exit_code(reports: Sequence[Report]) -> int:
    """Return 0 if no rule is broken and at least half of them were checked, otherwise `BROKEN` or `CHECKED_LITTLE`."""
    if any(report.verdict is Verdict.BROKEN for report in reports):
        return BROKEN
    return 0 if 2 * _count(reports, Verdict.NOT_CHECKED) <= len(reports) else CHECKED_LITTLE


def run(url: str, names: Sequence[str], seconds: float, as_json: bool) -> int:
    """Check the rules with these names, or all, and print the reports. Returns the exit code."""
    selected = rules_named(names)
    console = Console()
    # A pipe has no width; a large one avoids cut sentences.
    output = console if console.is_terminal else Console(width=200)
    width = max(len(name_of(rule)) for rule in selected)
    reports: list[Report] = []
    for report in _check_with_progress(url, selected, seconds):
        if not as_json and not reports:  # so that a URL that cannot be checked has no table
            output.print(_table(width, with_header=True, title=without_password(url)))
        reports.append(report)
        if not as_json:
            output.print(_row(report, width))
    code = exit_code(reports)
    if as_json:
        details = {"checked": len(reports) - _count(reports, Verdict.NOT_CHECKED), "of": len(reports)}
        data = {"url": without_password(url), "passed": code == 0, **details}
        console.print_json(data=data | {"rules": [asdict(report) for report in reports]})
        return code
    output.print(", ".join(f"{_count(reports, verdict)} {verdict}" for verdict in Verdict))
    if code == CHECKED_LITTLE:
        output.print(
            f"This says little: {_count(reports, Verdict.NOT_CHECKED)} of {len(reports)} rules were not checked."
        )
    return code


def _count(reports: Sequence[Report], verdict: Verdict) -> int:
    return sum(report.verdict is verdict for report in reports)


def _check_with_progress(url: str, rules: Sequence[Rule], seconds: float) -> Iterator[Report]:
    with progress() as step, _quiet():

        def start(rule: Rule, context: RuleContext) -> None:
            step(f"{rules.index(rule) + 1}/{len(rules)} {name_of(rule)}", lambda: context.call)

        yield from check(url, rules, seconds, start)


def _table(width: int, *, with_header: bool = False, title: str | None = None) -> Table:
    """Return an empty table; all of one report have equal columns, so that they line up."""
    table = Table(box=None, header_style="bold", show_header=with_header, title=title, title_justify="left")
    for column, columns in (("rule", width), ("verdict", 11), ("seconds", 7)):
        table.add_column(column, justify="right" if column == "seconds" else "left", width=columns)
    table.add_column("", overflow="fold")
    return table


def _row(report: Report, width: int) -> Table:
    """Return a row of the report. The rule's name is a link to its function; a rule that does not hold also names it."""
    row = _table(width)
    file, _, line = report.source.rpartition(":")
    rule = f"[link=file://{file}]{report.rule}[/]"
    detail = report.detail.replace("[", r"\[")
    if report.verdict is not Verdict.HOLDS:
        detail += f" ({os.path.relpath(file, _RULES)}:{line})"
    row.add_row(rule, f"[{_COLOURS[report.verdict]}]{report.verdict}[/]", f"{report.seconds:.1f}", detail)
    return row


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings that connectors log about the faults caused by the rules."""
    logger = logging.getLogger("pdserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
