"""NIXL itself, behind `nixl://`: one agent, its calls one at a time, and its many exceptions as two."""

import importlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.errors import SetupError
from pdserve.kv_transfer.header import Row

_POLL_S = 20e-6
_ENVIRONMENT = threading.Lock()


class NixlFault(OSError):
    """NIXL could not do it."""


class TooLate(NixlFault):
    """A read was not over in time. It may still go on."""


class Failed(NixlFault):
    """A read ended with an error, mostly because the peer died."""


class Agent:
    """A NIXL agent. NIXL's is not thread-safe; here one call runs at a time, without the interpreter's lock.

    A read through shared memory is one long copy inside of `begin`. Pieces are small, so others wait for little.
    """

    def __init__(self, devices: str) -> None:
        api, bindings = _import("nixl._api"), _import("nixl._bindings")
        self.name = f"pdserve-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._died = bindings.nixlRemoteDisconnectError
        raised = (v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))
        self._errors: tuple[type[Exception], ...] = (*raised, RuntimeError)
        self._nixl: Any = None
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            with self._calls(), _environment("UCX_NET_DEVICES", devices):
                self._nixl = api.nixl_agent(self.name, config)
        except NixlFault as fault:
            raise SetupError(f"NIXL cannot start with the network devices {devices!r}: {fault}.") from None
        if "UCX" not in self._nixl.backends:
            raise SetupError("The installed NIXL has no UCX, which nixl:// needs.")
        self._registrations: list[Any] = []

    def register(self, rows: Row) -> Any:
        with self._calls() as nixl:
            registration = nixl.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM")
            self._registrations.append(registration)
            return registration

    def forget(self, registration: Any, prepared: Any) -> None:
        with suppress(NixlFault), self._calls() as nixl:
            self._registrations.remove(registration)
            prepared.release()
            nixl.deregister_memory(registration)

    def metadata(self) -> bytes:
        with self._calls() as nixl:
            return bytes(nixl.get_agent_metadata())

    def add(self, metadata: bytes) -> None:
        with self._calls() as nixl:
            nixl.add_remote_agent(metadata)

    def remove(self, peer: str, prepared: Any) -> None:
        """Also of a peer that is dead already."""
        with suppress(NixlFault), self._calls():
            if prepared is not None:
                prepared.release()
        with suppress(NixlFault), self._calls() as nixl:
            nixl.remove_remote_agent(peer)

    def prepare(self, peer: str, base: int, block_bytes: int, count: int) -> Any:
        """Descriptors of all rows of a pool; of our own with an empty peer."""
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        rows[:, 1] = block_bytes
        with self._calls() as nixl:
            return nixl.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, "DRAM")

    def make_read(self, targets: Any, to: npt.NDArray[np.int32], sources: Any, of: npt.NDArray[np.int32]) -> Any:
        with self._calls() as nixl:
            return nixl.make_prepped_xfer("READ", targets, to, sources, of)

    def read(self, targets: Any, to: npt.NDArray[np.int32], sources: Any, of: npt.NDArray[np.int32]) -> bool:
        """A whole read in one call. Returns when nothing is written any more, however long that takes.

        Returns:
            Whether it was over as soon as it had begun.
        """
        with self._calls() as nixl:
            transfer = nixl.make_prepped_xfer("READ", targets, to, sources, of)
            try:
                over = at_once = self._is_done(nixl.transfer(transfer))
                while not over:
                    time.sleep(_POLL_S)
                    over = self._is_done(nixl.check_xfer_state(transfer))
            finally:
                transfer.release()
        return at_once

    def begin(self, transfer: Any) -> bool:
        """Whether it is over already."""
        with self._calls() as nixl:
            return self._is_done(nixl.transfer(transfer))

    def is_over(self, transfer: Any) -> bool:
        with self._calls() as nixl:
            return self._is_done(nixl.check_xfer_state(transfer))

    def is_settled(self, transfer: Any) -> bool:
        """Whether it is over, well or not. A transfer that NIXL does not say anything about may go on."""
        try:
            return self.is_over(transfer)
        except Failed:
            return True
        except NixlFault:
            return False

    def release(self, transfer: Any) -> None:
        """Only of what is over, or NIXL forgets what it still writes."""
        with suppress(NixlFault), self._calls():
            transfer.release()

    def send(self, peer: str, message: bytes) -> None:
        with self._calls() as nixl:
            nixl.send_notif(peer, message)

    def progress(self) -> list[bytes]:
        """Lets NIXL work for peers, and returns their messages."""
        with self._calls() as nixl:
            messages: dict[Any, list[bytes]] = nixl.get_new_notifs()
            return [message for each in messages.values() for message in each]

    def close(self) -> None:
        for registration in self._registrations:
            with suppress(NixlFault), self._calls() as nixl:
                nixl.deregister_memory(registration)
        self._registrations.clear()
        self._nixl = None

    def _is_done(self, state: str) -> bool:
        if state == "ERR":
            raise Failed("the read failed")
        return state == "DONE"

    @contextmanager
    def _calls(self) -> Iterator[Any]:
        with self._lock:
            try:
                yield self._nixl
            except self._died as error:
                raise Failed(f"it is gone ({error})") from None
            except self._errors as error:
                raise NixlFault(f"{type(error).__name__}: {error}") from None


def _import(module: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it writes to stdout what it does
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # nor are warnings an answer
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "nixl":
            raise SetupError("nixl:// needs the package NIXL: pip install 'pdserve[nixl]'.") from None
        raise SetupError(f"The installed NIXL cannot be imported: {error}.") from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """UCX reads its settings from the environment, when an agent is made."""
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
