"""The conformance kit: which rules of the contract hold for a connector, found out by using it.

    pdserve connector check mystore://host:port

Every rule gets fresh connectors, pools and a namespace of its own, and ends with one of three verdicts. NOT CHECKED means
what it says: from outside of the connector it could not be told, or not on this machine. It never counts as a pass.

`kv_transfer/rules/` has the rules; `tests/kv_transfer/broken.py` has, for each, a connector that breaks it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table

from pdserve.errors import SetupError
from pdserve.kv_transfer import registry
from pdserve.kv_transfer.connector import API_VERSION, Connector, Outcome
from pdserve.kv_transfer.rules import blocks, conduct, processes, room
from pdserve.kv_transfer.rules.trial import Broken, NotChecked, Trial, new_keys
from pdserve.kv_transfer.url import without_password

Rule = Callable[[Trial], str]

RULES: tuple[Rule, ...] = (
    blocks.round_trip,
    blocks.results,
    blocks.leading_match,
    blocks.missing,
    blocks.following,
    blocks.whole_blocks,
    blocks.concurrent_stores,
    processes.between_processes,
    processes.killed_writer,
    blocks.flipped_bytes,
    blocks.foreign_namespace,
    blocks.older_layout,
    room.lease,
    room.release,
    room.leases_under_pressure,
    room.capacity,
    conduct.deadline,
    conduct.cancelled,
    conduct.many_threads,
    conduct.caller_never_waits,
    conduct.counts,
    conduct.content_stays,
    conduct.clean_close,
)
LONGEST_S = 300.0  # of one rule, beyond what it is given; then it hangs


class Verdict(StrEnum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Report:
    """What became of one rule. `detail` is a sentence where it does not hold, and a note where it does."""

    rule: str
    says: str
    verdict: Verdict
    seconds: float
    detail: str


def name_of(rule: Rule) -> str:
    return rule.__name__.replace("_", "-")


def rules_named(names: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of these names, all for none."""
    known = {name_of(rule): rule for rule in RULES}
    for name in names:
        if name not in known:
            raise SetupError(f"There is no rule {name!r}; the rules are {', '.join(known)}.")
    return tuple(known[name] for name in names) or RULES


def check(url: str, rules: Sequence[Rule] = RULES, seconds: float = 2.0) -> Iterator[Report]:
    """Tries the rules one by one.

    Raises:
        SetupError: the URL is wrong, or its store cannot be used at all.
    """
    trial = Trial(url, seconds)
    try:
        if Outcome.FULL in trial.instance().store(new_keys(1), [0]).outcomes:
            raise SetupError(f"{without_password(url)} is full already: it refuses a single block.")
    except SetupError:
        raise
    except Exception:  # noqa: BLE001 - a finding, which the rules will make
        pass
    finally:
        trial.close()
    for rule in rules:
        yield try_rule(rule, url, seconds)


def try_rule(rule: Rule, url: str, seconds: float = 2.0) -> Report:
    """Runs in a thread of its own, so that a connector that blocks for ever breaks the rule and not the kit."""
    trial = Trial(url, seconds)
    ended: list[tuple[Verdict, str]] = []
    thread = threading.Thread(target=lambda: ended.append(_try(rule, trial)), name="conformance", daemon=True)
    began = time.perf_counter()
    thread.start()
    limit = LONGEST_S + 20 * seconds
    thread.join(limit)
    verdict, detail = ended[0] if ended else (Verdict.BROKEN, f"expected an end, saw none after {limit:g} s")
    says = (rule.__doc__ or "").partition("\n")[0]
    return Report(name_of(rule), says, verdict, time.perf_counter() - began, detail)


def _try(rule: Rule, trial: Trial) -> tuple[Verdict, str]:
    def close() -> str:
        trial.close()
        return ""

    verdict, detail = _verdict(lambda: rule(trial))
    closed, trouble = _verdict(close)
    return (verdict, detail) if closed is Verdict.HOLDS or verdict is Verdict.BROKEN else (closed, trouble)


def _verdict(run: Callable[[], str]) -> tuple[Verdict, str]:
    try:
        return Verdict.HOLDS, run()
    except Broken as broken:
        return Verdict.BROKEN, str(broken)
    except NotChecked as why:
        return Verdict.NOT_CHECKED, str(why)
    except SetupError as error:
        return Verdict.NOT_CHECKED, f"the store could not be used: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a connector raises is a finding
        return Verdict.BROKEN, f"expected no exception, saw {type(error).__name__}: {error}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what connectors log of the trouble that is made for them."""
    logger = logging.getLogger("pdserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run(url: str, names: Sequence[str], seconds: float, as_json: bool) -> bool:
    """The command. Whether no rule is broken."""
    rules = rules_named(names)
    console = Console()
    # A pipe has no width; sentences that are cut help nobody.
    output = console if console.is_terminal else Console(width=200)
    if as_json:
        with _quiet():
            reports = list(check(url, rules, seconds))
    else:
        with Console(stderr=True).status("") as status, _quiet():
            reports = []
            started = check(url, rules, seconds)
            for rule in rules:
                status.update(f"{len(reports) + 1}/{len(rules)} {name_of(rule)}")
                reports.append(next(started))
    passed = all(report.verdict is not Verdict.BROKEN for report in reports)
    if as_json:
        console.print_json(
            data={"url": without_password(url), "passed": passed, "rules": [asdict(one) for one in reports]}
        )
        return passed
    table = Table(box=None, header_style="bold", title=without_password(url), title_justify="left")
    for column in ("rule", "verdict", "seconds", ""):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    colours = {Verdict.HOLDS: "green", Verdict.BROKEN: "bold red", Verdict.NOT_CHECKED: "yellow"}
    for report in reports:
        verdict = f"[{colours[report.verdict]}]{report.verdict}[/]"
        table.add_row(report.rule, verdict, f"{report.seconds:.1f}", report.detail.replace("[", r"\["))
    output.print(table)
    totals = ", ".join(f"{sum(one.verdict is verdict for one in reports)} {verdict}" for verdict in Verdict)
    output.print(totals)
    return passed


# What is installed.


@dataclass(frozen=True)
class Listed:
    """An installed connector, and whether it can be used. `contract` is None where its package does not declare it."""

    scheme: str
    target: str
    package: str
    version: str
    contract: int | None
    usable: bool
    why: str


def listed() -> list[Listed]:
    """All installed connectors. Imports each, which may do anything, so that every failure is a reason, not an end."""
    return [Listed(**vars(one), **_state(one.scheme)) for one in registry.installed()]


def _state(scheme: str) -> dict[str, Any]:
    contract: int | None = None
    try:
        found = registry._find(scheme).load()
        contract = declared_version(found)
        registry._load(registry._find(scheme))
    except SetupError as error:
        return {"contract": contract, "usable": False, "why": str(error)}
    except Exception as error:  # noqa: BLE001 - somebody else's code
        return {
            "contract": contract,
            "usable": False,
            "why": f"It cannot be imported: {type(error).__name__}: {error}.",
        }
    why = (
        ""
        if contract is not None
        else f"Its class does not declare API_VERSION, so it may not be for version {API_VERSION}."
    )
    return {"contract": contract, "usable": True, "why": why}


def declared_version(connector: object) -> int | None:
    """The contract's version for which a class was written.

    It has to be declared by the author's own class. What it inherits from pdserve is the version of the pdserve that is
    installed, and says nothing. Our own connectors come with the contract.
    """
    if not isinstance(connector, type) or not issubclass(connector, Connector):
        return None
    for parent in connector.__mro__:
        if parent.__module__.startswith("pdserve.") and parent is connector:
            return API_VERSION
        if parent.__module__.startswith("pdserve."):
            return None
        if "API_VERSION" in vars(parent):
            return int(vars(parent)["API_VERSION"])
    return None
