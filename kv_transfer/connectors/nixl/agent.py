"""Thread-safe wrapper of a NIXL agent for `nixl://`, which maps NIXL's many exceptions to a few."""

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

from pdserve.errors import SetupError, not_imported
from pdserve.kv_transfer.connectors.nixl.memory import Memory

_POLL_INTERVAL_S = 20e-6
# Without NVLink, UCX would otherwise read memory of other GPUs over TCP, a hundred times slower: vllm#52607, nixl#2208.
_READ_OVER_CUDA_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_ENVIRONMENT_LOCK = threading.Lock()


class NixlError(OSError):
    """A NIXL call failed."""


class ReadTimeout(NixlError):
    """A read did not finish in time. It may still be in progress."""


class ReadFailed(NixlError):
    """A read ended with an error, usually because the peer died."""


class Agent:
    """A NIXL agent. NIXL's own is not thread-safe, so calls run one at a time, without the interpreter's lock.

    A read through shared memory is one long copy inside `start_read`. Reads are small, so other callers wait briefly.

    Args:
        devices: network devices that UCX may use.
        kind: of the memory to be registered, as in `Memory`.
    """

    def __init__(self, devices: str, kind: str = "DRAM") -> None:
        api, bindings = _import("nixl._api"), _import("nixl._bindings")
        self.name = f"pdserve-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._disconnect_error = bindings.nixlRemoteDisconnectError
        errors = (v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))
        self._errors: tuple[type[Exception], ...] = (*errors, RuntimeError)
        self._nixl: Any = None
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        settings = {"UCX_NET_DEVICES": devices}
        if kind == "VRAM":  # elsewhere UCX would warn that it has no use for it
            settings[_READ_OVER_CUDA_IPC] = os.environ.get(_READ_OVER_CUDA_IPC, "on")
        try:
            with self._locked(), _environment(settings):
                self._nixl = api.nixl_agent(self.name, config)
        except NixlError as error:
            raise SetupError(f"NIXL cannot start with the network devices {devices!r}: {error}.") from None
        if "UCX" not in self._nixl.backends:
            raise SetupError("The installed NIXL has no UCX backend, which nixl:// needs.")
        self._registrations: list[Any] = []

    def register(self, memory: Memory) -> Any:
        """Register memory for transfers. Returns a handle for `deregister`."""
        with self._locked() as nixl:
            registration = nixl.register_memory([(memory.address, memory.nbytes, memory.device, "")], memory.kind)
            self._registrations.append(registration)
            return registration

    def deregister(self, registration: Any, descriptors: Any) -> None:
        """Release prepared descriptors and deregister their memory. Errors are ignored."""
        with suppress(NixlError), self._locked() as nixl:
            self._registrations.remove(registration)
            descriptors.release()
            nixl.deregister_memory(registration)

    def metadata(self) -> bytes:
        """Return the metadata with which a peer connects to this agent."""
        with self._locked() as nixl:
            return bytes(nixl.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> None:
        with self._locked() as nixl:
            nixl.add_remote_agent(metadata)

    def remove_peer(self, peer: str, descriptors: Any) -> None:
        """Release a peer's descriptors, if any, and disconnect from it, even if it is dead. Errors are ignored."""
        with suppress(NixlError), self._locked():
            if descriptors is not None:
                descriptors.release()
        with suppress(NixlError), self._locked() as nixl:
            nixl.remove_remote_agent(peer)

    def prepare(self, peer: str, base: int, block_bytes: int, count: int, kind: str, device: int) -> Any:
        """Return descriptors of `count` pool rows at address `base`. An empty `peer` means this process's memory.

        Args:
            kind, device: as in `Memory`.
        """
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 2] = device
        rows[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        rows[:, 1] = block_bytes
        with self._locked() as nixl:
            return nixl.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, kind)

    def make_read(
        self, local: Any, local_rows: npt.NDArray[np.int32], remote: Any, remote_rows: npt.NDArray[np.int32]
    ) -> Any:
        """Return a transfer that reads remote rows into local rows, by prepared descriptors and row indices."""
        with self._locked() as nixl:
            return nixl.make_prepped_xfer("READ", local, local_rows, remote, remote_rows)

    def read(
        self, local: Any, local_rows: npt.NDArray[np.int32], remote: Any, remote_rows: npt.NDArray[np.int32]
    ) -> bool:
        """Run a read to its end. Does not return while anything can still be written, however long that takes.

        Returns:
            True if the read was synchronous, that is, finished when it was started.
        """
        transfer = self.make_read(local, local_rows, remote, remote_rows)
        try:
            done = synchronous = self.start_read(transfer)
            while not done:  # perhaps for ever, so others may use the agent meanwhile
                time.sleep(_POLL_INTERVAL_S)
                done = self.is_done(transfer)
        finally:
            self.release(transfer)
        return synchronous

    def start_read(self, transfer: Any) -> bool:
        """Start a transfer. Returns True if it is done already."""
        with self._locked() as nixl:
            return self._check_state(nixl.transfer(transfer))

    def is_done(self, transfer: Any) -> bool:
        """Raises `ReadFailed` if the transfer ended with an error."""
        with self._locked() as nixl:
            return self._check_state(nixl.check_xfer_state(transfer))

    def has_ended(self, transfer: Any) -> bool:
        """Return True if a transfer ended, successfully or not. If its state is unknown, it may be in progress: False."""
        try:
            return self.is_done(transfer)
        except ReadFailed:
            return True
        except NixlError:
            return False

    def release(self, transfer: Any) -> None:
        """Release a transfer that has ended. NIXL would lose track of one that still writes."""
        with suppress(NixlError), self._locked():
            transfer.release()

    def notify(self, peer: str, message: bytes) -> None:
        with self._locked() as nixl:
            nixl.send_notif(peer, message)

    def poll(self) -> list[bytes]:
        """Let NIXL make progress for peers, and return the notifications received from them."""
        with self._locked() as nixl:
            notifications: dict[Any, list[bytes]] = nixl.get_new_notifs()
            return [message for messages in notifications.values() for message in messages]

    def close(self) -> None:
        for registration in self._registrations:
            with suppress(NixlError), self._locked() as nixl:
                nixl.deregister_memory(registration)
        self._registrations.clear()
        self._nixl = None

    def _check_state(self, state: str) -> bool:
        if state == "ERR":
            raise ReadFailed("the read failed")
        return state == "DONE"

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        """Hold the lock for calls of NIXL, and map its exceptions to `NixlError`."""
        with self._lock:
            try:
                yield self._nixl
            except self._disconnect_error as error:
                raise ReadFailed(f"the peer is disconnected ({error})") from None
            except self._errors as error:
                raise NixlError(f"{type(error).__name__}: {error}") from None


def _import(module: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # otherwise it logs to stdout
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # keeps UCX's warnings off stdout
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise not_imported("The installed NIXL", error) from error


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily. UCX reads its settings from the environment when an agent is created."""
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.pop(name) for name in settings if name in os.environ}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                del os.environ[name]
            os.environ.update(before)
