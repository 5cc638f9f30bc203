"""Makes a store hang, or be gone, from outside.

host:port in the URL    the connector talks to a relay on this machine, which holds up or cuts its connections; not where
                        the blocks then take another way, as with the nodes of a cluster, which name each other
a BatchedConnector      its hooks hang, or raise one of its faults, before they do their work; so do those of the
                        connectors behind one that has several
anything else           cannot be done from here
"""

import contextlib
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import SetupError
from pdserve.kv_transfer.rules.trial import Broken, Instance, KiB, NotChecked, Trial, new_keys, stores_of
from pdserve.kv_transfer.threaded import BatchedConnector

_HOOKS = ("put_many", "get_many", "contains_many", "delete_many", "release_many")


@dataclass
class Outage:
    """An instance, and the two ways in which its store can fail."""

    instance: Instance
    how: str
    flowing: threading.Event  # clear it: the store hangs
    gone: threading.Event  # set it: the store is gone
    caller: threading.Thread | None = None  # set it: hooks that run in this thread are noted, and go on at once
    in_caller: list[str] = field(default_factory=list)  # those


@contextmanager
def outage_of(trial: Trial, timeout_s: float, *, always: bool = False) -> Iterator[Outage]:
    """An instance whose store can fail, with this time-out where the connector has the parameter and the URL does not set
    it, or `always`."""
    flowing, gone = threading.Event(), threading.Event()
    flowing.set()
    url, may_be_relayed = _look(trial, timeout_s, always)
    with _relayed(trial, url, flowing, gone) if may_be_relayed else contextlib.nullcontext() as relayed:
        if relayed is not None:
            yield relayed
            return
        instance = trial.instance(64 * KiB, url=url)
        stores = stores_of(instance.connector)
        if not stores:
            raise NotChecked("there is no host:port in the URL to hold up, and the connector has no hooks")
        outage = Outage(instance, "held up in its hooks", flowing, gone)
        with contextlib.ExitStack() as held:
            for store in stores:
                held.enter_context(_held_up(store, outage))
            yield outage


def _look(trial: Trial, timeout_s: float, always: bool) -> tuple[str, bool]:
    """The URL, with this time-out wherever there can be one, and whether the store may be reached by a relay."""
    probe, url = trial.instance(), trial.url
    for store in {store.url for store in stores_of(probe.connector)}:
        timed = _with_timeout(store, timeout_s, always).replace("\\", r"\\")
        url = re.sub(f"{re.escape(store)}(?=,|$)", timed, url)  # it may be one of several
    relayed = getattr(probe.connector, "relayed", True)
    trial.close()
    return url, relayed


def _with_timeout(url: str, timeout_s: float, always: bool) -> str:
    base, _, query = url.partition("?")
    parameters = query.split("&") if query else []
    others = [one for one in parameters if not one.startswith("timeout=")]
    if len(others) < len(parameters) and not always:
        return url
    return f"{base}?{'&'.join([*others, f'timeout={timeout_s:g}'])}"


# Hooks.


@contextmanager
def _held_up(connector: BatchedConnector, outage: Outage) -> Iterator[None]:
    fault = _fault_of(connector)

    def held(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.current_thread() is outage.caller:
                outage.in_caller.append(name)
                return hook(*arguments)
            if outage.gone.is_set():
                raise fault
            outage.flowing.wait()
            return hook(*arguments)

        return call

    for name in _HOOKS:
        setattr(connector, name, held(name, getattr(connector, name)))
    try:
        yield
    finally:
        outage.flowing.set()
        for name in _HOOKS:
            delattr(connector, name)


def _fault_of(connector: BatchedConnector) -> Exception:
    for fault in connector.faults:
        with contextlib.suppress(Exception):
            return fault("gone, for the conformance kit")
    raise NotChecked("none of the connector's faults can be raised with a text")


# The relay.


@contextmanager
def _relayed(trial: Trial, url: str, flowing: threading.Event, gone: threading.Event) -> Iterator[Outage | None]:
    """None where the URL has no one host and port, or the store cannot be reached through a relay alone."""
    parts = urlsplit(url)
    if "," in parts.netloc or not parts.hostname or not parts.port:
        yield None
        return
    relay = _Relay(parts.hostname, parts.port, flowing, gone)
    try:
        login, at, _ = parts.netloc.rpartition("@")
        by_relay = parts._replace(netloc=f"{login}{at}127.0.0.1:{relay.port}").geturl()
        try:
            instance = trial.instance(64 * KiB, url=by_relay)
        except (SetupError, Broken):
            yield None
            return
        instance.store(new_keys(1), [0])
        if relay.passed < instance.layout.block_bytes:
            yield None
            return
        yield Outage(instance, "held up and cut by a relay", flowing, gone)
    finally:
        flowing.set()
        gone.clear()
        trial.close()
        relay.close()


class _Relay:
    """Passes bytes between whoever connects to `port` and the store."""

    def __init__(self, host: str, port: int, flowing: threading.Event, gone: threading.Event) -> None:
        self._target = (host, port)
        self._flowing = flowing
        self._gone = gone
        self._closed = False
        self.passed = 0  # bytes, both ways
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._start(self._pass_on, client)

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as store:
            while not self._closed and not self._gone.is_set():
                ready, _, _ = select.select([client, store], [], [], 0.02)
                for source in ready:
                    while not self._flowing.wait(0.02):
                        if self._closed:
                            return
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self.passed += len(data)
                    (store if source is client else client).sendall(data)
