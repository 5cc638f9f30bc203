"""The followers of an instance, seen from rank 0: their processes, and the commands and replies.

    python -m pdserve.ranks.follower DESCRIPTOR RANK PORT

DESCRIPTOR is one end of a socket pair, over which the follower first gets its config. Followers end with rank 0, by a signal
of the kernel (`parent.py`). If a follower ends or falls silent, so does rank 0: the streams of the instance go on elsewhere,
as when an instance of one process dies.
"""

import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from pdserve import parent
from pdserve.config import InstanceConfig
from pdserve.engine.parallel.rank_group import HANG_S, START_S
from pdserve.instance.affinity import on_all_cores
from pdserve.kv_transfer.connector import Result
from pdserve.ranks.messages import (
    Alive,
    Attach,
    Close,
    Command,
    Failed,
    Matched,
    Ready,
    Released,
    Transferred,
    decode_reply,
    encode,
)

log = logging.getLogger(__name__)

SETUP_ERROR_EXIT_CODE = 2
FAULT_EXIT_CODE = 70
OWN_ERROR_S = 1.0  # for rank 0 to report the same error itself
CLOSE_S = 10.0


def start_process(descriptor: int, rank: int, port: int) -> "subprocess.Popen[bytes]":
    """Start a follower with one end of a socket pair."""
    with on_all_cores():  # its GPU may be beside others
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve.ranks.follower", str(descriptor), str(rank), str(port)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=os.environ | parent.environment(signal.SIGKILL),
            start_new_session=True,
        )


class Follower:
    """One process. A thread reads its replies."""

    def __init__(self, config: InstanceConfig, rank: int, port: int, on_end: Callable[[str, int], None]) -> None:
        self.rank = rank
        self.ready = threading.Semaphore(0)
        self.transfers: dict[int, Future[Result]] = {}
        self.matches: dict[int, Future[int]] = {}
        self.held: dict[int, Future[None]] = {}
        self.is_closing = False
        self._on_end = on_end
        ours, theirs = socket.socketpair()
        # A process that does not read for so long is taken for dead.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(HANG_S), 0))
        with theirs:
            self.process = start_process(theirs.fileno(), rank, port)
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self.send(msgspec.json.encode(config))
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(data)

    def close(self) -> None:
        self.is_closing = True
        try:
            self.send(encode(Close()))
            self.process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        patience_s = START_S  # it imports torch before it sends anything
        try:
            while self._connection.poll(patience_s):
                patience_s = HANG_S
                self._handle(decode_reply(self._connection.recv_bytes()))
            self._report_end(lambda: f"has not answered for {patience_s:g} s")
        except (EOFError, OSError):
            self._report_end(lambda: f"has ended ({_exit_cause(self.process)})")

    def _report_end(self, describe: Callable[[], str]) -> None:
        if not self.is_closing:
            self._on_end(f"rank {self.rank} {describe()}; the instance exits", FAULT_EXIT_CODE)

    def _handle(self, reply: Any) -> None:
        match reply:
            case Alive():
                pass
            case Ready():
                self.ready.release()
            case Failed(reason):
                time.sleep(OWN_ERROR_S)
                self._on_end(f"rank {self.rank}: {reason}", SETUP_ERROR_EXIT_CODE)
            case Transferred():
                result, held = reply.result(), None
                if reply.is_held:
                    held = self.held[reply.operation] = Future()
                future = self.transfers.pop(reply.operation)
                future.set_result(Result(result.outcomes, result.seconds, result.ticket, held))
            case Matched(operation, count):
                self.matches.pop(operation).set_result(count)
            case Released(operation):
                self.held.pop(operation).set_result(None)


class Followers:
    """All followers of an instance.

    Args:
        port: of the listener of the rank group.
        on_end: called in another thread with a sentence and an exit code when a follower has ended, or cannot start.
    """

    def __init__(self, config: InstanceConfig, port: int, on_end: Callable[[str, int], None] | None = None) -> None:
        ranks = range(1, config.tensor_parallel_size)
        self._all = [Follower(config, rank, port, on_end or end_process) for rank in ranks]
        self._operations = itertools.count()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._all]

    def send(self, command: Command) -> None:
        """Send a command to all followers."""
        data = encode(command)
        for follower in self._all:
            follower.send(data)

    def send_each(self, make: Callable[[int], Command]) -> None:
        """Send each follower a command of its own, by its rank."""
        for follower in self._all:
            follower.send(encode(make(follower.rank)))

    def transfer(self, make: Callable[[int, int], Command]) -> tuple[int, list[Future[Result]]]:
        """Send a command that moves blocks. `make` gets the number of the operation and a rank."""
        operation, futures = next(self._operations), []
        for follower in self._all:
            future = follower.transfers[operation] = Future()
            follower.send(encode(make(operation, follower.rank)))
            futures.append(future)
        return operation, futures

    def match(self, make: Callable[[int], Command]) -> list[Future[int]]:
        """Send a command that counts stored blocks."""
        operation, futures = next(self._operations), []
        for follower in self._all:
            future = follower.matches[operation] = Future()
            follower.send(encode(make(operation)))
            futures.append(future)
        return futures

    def wait_ready(self) -> None:
        """Wait until every follower has loaded its model, or has attached."""
        for follower in self._all:
            follower.ready.acquire()

    def attach(self) -> None:
        """Have every follower connect to the KV store."""
        self.send(Attach())
        self.wait_ready()

    def kill(self) -> None:
        """End all followers at once: they may wait for this process."""
        for follower in self._all:
            follower.is_closing = True
            follower.process.kill()
        self.close()

    def close(self) -> None:
        """End all followers."""
        for follower in self._all:
            follower.close()


def end_process(sentence: str, exit_code: int) -> None:
    """End this process, whatever its other threads wait for."""
    if exit_code == SETUP_ERROR_EXIT_CODE:
        print(f"pdserve: {sentence}", file=sys.stderr, flush=True)
    else:
        log.error("%s", sentence)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)


def _exit_cause(process: "subprocess.Popen[bytes]") -> str:
    code = process.wait()  # its end of the connection is closed, so it has ended, or is about to
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
