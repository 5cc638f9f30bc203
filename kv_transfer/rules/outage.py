"""Simulates an outage: makes a connector's store hang or disappear.

host:port in the URL    the connector connects to a local relay, which delays or cuts its connections; not possible if
                        blocks bypass that host, as with the nodes of a cluster, which refer to each other
a BatchedConnector      its hooks hang, or raise one of its faults, before they do their work; with a connector that
                        combines several, the hooks of each
any other connector     not possible
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import BatchedConnector
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.registry import connect
from pdserve.kv_transfer.rules.context import (
    AttachedPool,
    Broken,
    KiB,
    NotChecked,
    RuleContext,
    batched_connectors,
    expect,
    new_keys,
    wait_until,
)
from pdserve.kv_transfer.rules.relay import Relay

_HOOKS = ("put_many", "get_many", "contains_many", "delete_many", "release_many", "prolong_many")


NO_SUCCESS = "no successful operation"


@dataclass
class Outage:
    """Controls the store of an attached pool.

    Attributes:
        method: how the outage is simulated, for the report.
        responsive: clear it to make the store hang.
        gone: set it to make the store disappear.
        relay: what the connector is connected to, with the first method.
        url: of that relay.
        calling_thread: hooks called in this thread are recorded in `hooks_in_caller`, and do not hang.
    """

    pool: AttachedPool
    method: str
    responsive: threading.Event
    gone: threading.Event
    relay: Relay | None = None
    url: str = ""
    calling_thread: threading.Thread | None = None
    hooks_in_caller: list[str] = field(default_factory=list)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Make the store hang until the end of the body."""
        self.responsive.clear()
        try:
            yield
        finally:
            self.responsive.set()

    def expect_usable(self, keys: list[bytes], expected: str) -> None:
        """Expect a store and load of two blocks to succeed in one of many tries.

        The first may still use a connection that was cut, and on a busy machine the timeout that was set is short.
        """
        expect(wait_until(lambda: self._is_usable(keys)), expected, NO_SUCCESS)
        self.pool.must_equal(12, self.pool.rows[10])

    def require_usable(self, keys: list[bytes]) -> None:
        """Raise `NotChecked` if the store does not succeed before the outage either: it may be slower than the timeout."""
        if not wait_until(lambda: self._is_usable(keys)):
            limit = f"{self.pool.timeout:g} s, the timeout of this rule unless the URL has one"
            raise NotChecked(f"no store and load of two blocks ended within {limit}")

    def _is_usable(self, keys: list[bytes]) -> bool:
        all_ok = [Outcome.OK] * 2
        return self.pool.store(keys, [10, 11]).outcomes == self.pool.load(keys, [12, 13]).outcomes == all_ok


@contextmanager
def simulated_outage(context: RuleContext, timeout_s: float, *, override: bool = False) -> Iterator[Outage]:
    """Attach a pool whose store can fail.

    Args:
        timeout_s: the timeout to set in the URL, if the connector supports one and the URL has none.
        override: replace a timeout that is in the URL, too.

    Raises:
        NotChecked: there is no way to make this connector's store fail.
    """
    responsive, gone = threading.Event(), threading.Event()
    responsive.set()
    url, may_use_relay = _prepare_url(context, timeout_s, override)
    relay = _outage_by_relay(context, url, responsive, gone) if may_use_relay else contextlib.nullcontext()
    with relay as outage:
        if outage is not None:
            yield outage
            return
        pool = context.attach(64 * KiB, url=url)
        connectors = batched_connectors(pool.connector)
        if not connectors:
            raise NotChecked("there is no host:port in the URL to hold up, and the connector has no hooks")
        outage = Outage(pool, "held up in its hooks", responsive, gone)
        with contextlib.ExitStack() as intercepted:
            for connector in connectors:
                intercepted.enter_context(_intercept_hooks(connector, outage))
            yield outage


@contextmanager
def relayed_outage(context: RuleContext, timeout_s: float, *, override: bool = False) -> Iterator[tuple[Outage, Relay]]:
    """Like `simulated_outage`, for faults that only a relay can cause.

    Raises:
        NotChecked: the store is not reached through a relay.
    """
    may_use_relay = connect(context.url).capabilities.relayable  # before the cost of attaching
    if may_use_relay and _find_address(context.url) is not None:
        with simulated_outage(context, timeout_s, override=override) as outage:
            if outage.relay is not None:
                yield outage, outage.relay
                return
    raise NotChecked("there is no connection to hold up: the URL has no host:port, or blocks bypass it")


def _prepare_url(context: RuleContext, timeout_s: float, override: bool) -> tuple[str, bool]:
    """Return the URL with the timeout wherever one is supported, and whether the store may be reached through a relay."""
    relayable = connect(context.url).capabilities.relayable
    return with_parameter(context, "timeout", f"{timeout_s:g}", override=override), relayable


def with_parameter(context: RuleContext, name: str, value: str, *, override: bool = False, **others: str) -> str:
    """Return the context's URL with a parameter that every `BatchedConnector` has, wherever one is named in the URL.

    Args:
        override: replace a value that is in the URL, too.
        others: further parameters.
    """
    probe, url = context.attach(), context.url
    for store_url in {connector.url for connector in batched_connectors(probe.connector)}:
        changed = store_url
        for one, its_value in {name: value, **others}.items():
            changed = _set_parameter(changed, one, its_value, override)
        changed = changed.replace("\\", r"\\")
        url = re.sub(f"{re.escape(store_url)}(?=,|$)", changed, url)  # it may be one of several tiers
    context.close()
    return url


def _set_parameter(url: str, name: str, value: str, override: bool) -> str:
    base, _, query = url.partition("?")
    parameters = query.split("&") if query else []
    others = [parameter for parameter in parameters if not parameter.startswith(f"{name}=")]
    if len(others) < len(parameters) and not override:
        return url
    return f"{base}?{'&'.join([*others, f'{name}={value}'])}"


# Outage by hooks.


@contextmanager
def _intercept_hooks(connector: BatchedConnector, outage: Outage) -> Iterator[None]:
    fault = _make_fault(connector)

    def intercept(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.current_thread() is outage.calling_thread:
                outage.hooks_in_caller.append(name)
                return hook(*arguments)
            if outage.gone.is_set():
                raise fault
            outage.responsive.wait()
            return hook(*arguments)

        return call

    for name in _HOOKS:
        setattr(connector, name, intercept(name, getattr(connector, name)))
    try:
        yield
    finally:
        outage.responsive.set()
        for name in _HOOKS:
            delattr(connector, name)


def _make_fault(connector: BatchedConnector) -> Exception:
    for fault in connector.faults:
        with contextlib.suppress(Exception):
            return fault("gone, for the conformance kit")
    raise NotChecked("none of the connector's faults can be constructed from a text")


# Outage by relay.


def _find_address(url: str) -> tuple[str, int] | None:
    """Return host and port of the URL; None if it has none, or several."""
    parts = urlsplit(url)
    if "," in parts.netloc or not parts.hostname or not parts.port:
        return None
    return parts.hostname, parts.port


@contextmanager
def _outage_by_relay(
    context: RuleContext, url: str, responsive: threading.Event, gone: threading.Event
) -> Iterator[Outage | None]:
    """Yield None if the URL has no single host and port, or blocks bypass a relay in front of it."""
    address = _find_address(url)
    if address is None:
        yield None
        return
    relay = Relay(*address, responsive, gone)
    try:
        parts = urlsplit(url)
        login, at, _ = parts.netloc.rpartition("@")
        relay_url = parts._replace(netloc=f"{login}{at}127.0.0.1:{relay.port}").geturl()
        try:
            pool = context.attach(64 * KiB, url=relay_url)
        except (SetupError, Broken):
            yield None
            return
        pool.store(new_keys(1), [0])
        if relay.relayed_bytes < pool.layout.block_bytes:
            yield None
            return
        yield Outage(pool, "held up and cut by a relay", responsive, gone, relay, relay_url)
    finally:
        responsive.set()
        gone.clear()
        relay.cut_silent()  # a connector that waits for ever on them could not be closed
        context.close()
        relay.close()
