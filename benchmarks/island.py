"""A network namespace whose processes reach this host over a single link, which can be cut or slowed down."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import SetupError

HOST, INSIDE = "198.18.{}.1", "198.18.{}.2"  # in the range that RFC 2544 reserves for benchmarks
CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NetworkNamespace:
    """Context manager for the network namespace; its processes must have exited when the context ends.

    Attributes:
        host: address of this host for processes in the namespace.
        inside: address of the namespace for processes of this host.

    Raises:
        SetupError: on entry, with the reason why the namespace cannot be created.
    """

    def __init__(self) -> None:
        number = os.getpid()
        self._name, self._link = f"pdserve-{number}", f"pd{number}"
        self.host, self.inside = HOST.format(number % 250), INSIDE.format(number % 250)

    def __enter__(self) -> "NetworkNamespace":
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise SetupError("namespaces need root and the program ip")
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "out", "netns", self._name)
            _ip("addr", "add", f"{self.host}/30", "dev", self._link)
            _ip("-n", self._name, "addr", "add", f"{self.inside}/30", "dev", "out")
            for device in ("out", "lo"):
                _ip("-n", self._name, "link", "set", device, "up")
            self.mend()
        except SetupError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["ip", "netns", "del", self._name], stderr=subprocess.DEVNULL, check=False
        )  # also removes the link

    def cut(self) -> None:
        """Drop all packets in both directions, without closing connections."""
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        _ip("link", "set", self._link, "up")

    def slow_down(self, bytes_per_s: float) -> None:
        """Limit the rate of the link, in bytes per second in each direction."""
        bucket = ["root", "tbf", "rate", f"{bytes_per_s * 8:.0f}bit", "burst", "1mbit", "latency", "100ms"]
        _run("tc", "qdisc", "replace", "dev", self._link, *bucket)
        _run("tc", "-n", self._name, "qdisc", "replace", "dev", "out", *bucket)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Start the processes that this thread starts meanwhile inside the namespace."""
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self._name}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{' '.join(words)}: {done.stderr.strip()}")
