"""The conformance kit: checks by use which rules of the connector contract a connector keeps.

    pdserve connector check mystore://host:port

Every rule gets fresh connectors, pools and a namespace of its own, and ends with one of three verdicts. NOT CHECKED means
that the rule could not be checked from outside of the connector, or not on this machine. It never counts as a pass.

The rules are in `kv_transfer/rules/`; `tests/kv_transfer/broken*.py` have a connector that breaks it for each of them.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from pdserve.errors import SetupError, not_imported
from pdserve.kv_transfer import registry
from pdserve.kv_transfer.connector import API_VERSION, Connector, Outcome
from pdserve.kv_transfer.rules import behaviour, blocks, connections, evictions, leases, operations, processes
from pdserve.kv_transfer.rules.context import Broken, NotChecked, RuleContext, new_keys
from pdserve.kv_transfer.rules.outage import NO_SUCCESS
from pdserve.kv_transfer.url import without_password

Rule = Callable[[RuleContext], str]
Start = Callable[[Rule, RuleContext], None]  # called when a rule starts, with the environment in which it runs

RULES: tuple[Rule, ...] = (
    blocks.round_trip,
    blocks.any_content,
    blocks.results,
    blocks.leading_match,
    blocks.missing,
    blocks.similar_keys,
    blocks.stored_again,
    blocks.following,
    blocks.whole_blocks,
    blocks.concurrent_stores,
    processes.between_processes,
    processes.killed_writer,
    blocks.flipped_bytes,
    blocks.foreign_namespace,
    blocks.older_layout,
    leases.lease,
    leases.longer_lease,
    leases.release,
    behaviour.deadline,
    connections.refused_operations,
    connections.attaching,
    connections.resumption,
    connections.stalled_value,
    connections.silent_connections,
    connections.byte_by_byte,
    behaviour.cancelled,
    behaviour.requested_cancel,
    behaviour.two_connectors,
    behaviour.many_threads,
    operations.concurrent_operations,
    operations.large_operations,
    operations.large_pools,
    operations.random_loads,
    operations.deleted_blocks,
    behaviour.caller_never_waits,
    behaviour.counts,
    behaviour.content_stays,
    behaviour.clean_close,
    # These fill the store, and so come last.
    leases.prolonged_lease,
    leases.leases_under_pressure,
    leases.capacity,
)
RULE_TIMEOUT_S = 300.0  # of one rule, beyond its --seconds


class Verdict(StrEnum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Report:
    """The result of one rule.

    Attributes:
        says: the requirement, the first line of the rule's docstring.
        detail: the reason if the rule does not hold, otherwise an optional note.
        source: file and line of the rule's function.
    """

    rule: str
    says: str
    verdict: Verdict
    seconds: float
    detail: str
    source: str


def name_of(rule: Rule) -> str:
    """Return the rule's name for users, such as "round-trip"."""
    return rule.__name__.replace("_", "-")


def source_of(rule: Rule) -> str:
    """Return the file and line of the rule's function, such as "/…/kv_transfer/rules/blocks.py:46"."""
    return f"{inspect.getsourcefile(rule)}:{inspect.getsourcelines(rule)[1]}"


def rules_named(names: Sequence[str]) -> tuple[Rule, ...]:
    """Return the rules with these names, or all rules if no names are given. Raises `SetupError` for unknown names."""
    known = {name_of(rule): rule for rule in RULES}
    for name in names:
        if name not in known:
            raise SetupError(f"There is no rule {name!r}; the rules are {', '.join(known)}.")
    return tuple(known[name] for name in names) or RULES


def _ignore(rule: Rule, context: RuleContext) -> None: ...


def check(url: str, rules: Sequence[Rule] = RULES, seconds: float = 2.0, start: Start = _ignore) -> Iterator[Report]:
    """Check the rules one by one, and yield a report for each.

    Args:
        seconds: how long randomized rules run.

    Raises:
        SetupError: the URL is invalid, or its store cannot be used at all.
    """
    require_usable(url)
    for rule in rules:
        yield try_rule(rule, url, seconds, start)


def require_usable(url: str) -> None:
    """Attach once and store one block. Raises `SetupError` if the URL is invalid, or its store cannot be used at all."""
    context = RuleContext(url, 0.0)
    try:
        if Outcome.FULL in context.attach().store(new_keys(1), [0]).outcomes:
            raise SetupError(f"{without_password(url)} is full already: it refuses a single block.")
    except SetupError:
        raise
    except Exception:  # noqa: BLE001 - the rules will report it
        pass
    finally:
        context.close()


def try_rule(rule: Rule, url: str, seconds: float = 2.0, start: Start = _ignore) -> Report:
    """Check one rule, in a separate thread, so that a connector that blocks forever breaks the rule and not the kit."""
    context = RuleContext(url, seconds)
    outcome: list[tuple[Verdict, str]] = []
    thread = threading.Thread(target=lambda: outcome.append(_run(rule, context)), name="conformance", daemon=True)
    started = time.perf_counter()
    start(rule, context)
    thread.start()
    limit = RULE_TIMEOUT_S + 20 * seconds
    thread.join(limit)
    no_end = f"expected an end, saw none after {limit:g} s; the last call was {context.call or 'none'}"
    verdict, detail = outcome[0] if outcome else (Verdict.BROKEN, no_end)
    says = (rule.__doc__ or "").partition("\n")[0]
    return Report(name_of(rule), says, verdict, time.perf_counter() - started, detail, source_of(rule))


def _run(rule: Rule, context: RuleContext) -> tuple[Verdict, str]:
    def close() -> str:
        context.close()
        return ""

    verdict, detail = _judge(lambda: evictions.run(rule, context))
    if verdict is Verdict.BROKEN and (Outcome.UNAVAILABLE in detail or NO_SUCCESS in detail):
        detail = "; ".join([detail, *(f"a connector said: {text}" for text in context.last_warnings())])
    close_verdict, close_detail = _judge(close)
    if close_verdict is Verdict.HOLDS or verdict is Verdict.BROKEN:
        return verdict, detail
    return close_verdict, close_detail


def _judge(run: Callable[[], str]) -> tuple[Verdict, str]:
    try:
        return Verdict.HOLDS, run()
    except Broken as broken:
        return Verdict.BROKEN, str(broken)
    except NotChecked as reason:
        return Verdict.NOT_CHECKED, str(reason)
    except SetupError as error:
        return Verdict.NOT_CHECKED, f"the store could not be used: {error}"
    except Exception as error:  # noqa: BLE001 - an exception of the connector breaks the rule
        return Verdict.BROKEN, f"expected no exception, saw {type(error).__name__}: {error}"


# Installed connectors.


@dataclass(frozen=True)
class ListedConnector(registry.InstalledConnector):
    """A row of `pdserve connector list`.

    Attributes:
        contract: the declared version of the connector contract; None if the class does not declare one.
        why: the reason if the connector is not usable, or a remark.
    """

    contract: int | None
    usable: bool
    why: str


def list_connectors() -> list[ListedConnector]:
    """List all installed connectors. Each is imported; any failure to do so is reported as the reason."""
    return [ListedConnector(**vars(connector), **_check_usable(connector.scheme)) for connector in registry.installed()]


def _check_usable(scheme: str) -> dict[str, Any]:
    contract: int | None = None
    try:
        connector_class = registry._find(scheme).load()
        contract = declared_version(connector_class)
        for library in registry.connector_class(scheme).libraries:
            package = library.partition(".")[0]
            if find_spec(package) is None:  # and not an import, which may take seconds
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    except SetupError as error:
        return {"contract": contract, "usable": False, "why": str(error)}
    except ModuleNotFoundError as error:
        return {"contract": contract, "usable": False, "why": str(not_imported("It", error))}
    except Exception as error:  # noqa: BLE001 - third-party code
        why = f"It cannot be imported: {type(error).__name__}: {error}."
        return {"contract": contract, "usable": False, "why": why}
    if contract is None:
        why = f"Its class does not declare API_VERSION, so it may not be for version {API_VERSION}."
    else:
        why = "" if contract == API_VERSION else f"It is adapted to version {API_VERSION}."
    return {"contract": contract, "usable": True, "why": why}


def declared_version(connector: object) -> int | None:
    """Return the version of the contract for which a connector class was written, or None if it is not declared.

    The author's own class has to declare it: a version inherited from pdserve is only that of the pdserve installed. The
    built-in connectors always have the current version.
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
