"""A follower: the process of a rank other than 0. It loads its slice of the model and does what rank 0 commands.

See `followers.py` for its arguments. It ends when rank 0 closes the connection, and the kernel kills it when rank 0 dies.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from pdserve.config import InstanceConfig
from pdserve.decode.layout_converter import SourceLoader
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.parallel.rank_group import RankLost
from pdserve.errors import SetupError
from pdserve.instance.affinity import run_beside
from pdserve.keys import Layout, Section
from pdserve.kv_transfer.batched import SWITCH_INTERVAL_S
from pdserve.kv_transfer.connector import Result, request_cancel
from pdserve.kv_transfer.grouped import attach_groups
from pdserve.kv_transfer.registry import connect
from pdserve.parent import end_with_parent
from pdserve.ranks.messages import (
    ALIVE_S,
    Alive,
    Attach,
    Cancel,
    Close,
    Convert,
    Failed,
    Match,
    Matched,
    OnAdapters,
    OnLeases,
    OnMemory,
    Ready,
    ReleaseConverted,
    Released,
    Reply,
    Step,
    Transfer,
    Transferred,
    decode_command,
    encode,
)
from pdserve.ranks.rank_config import config_of_follower, make_group, use_threads
from pdserve.ranks.runners import FollowingRunner

if TYPE_CHECKING:
    from pdserve.adapters.ranked_layers import FollowingLayers

log = logging.getLogger(__name__)
FAULT_EXIT_CODE = 70
T = TypeVar("T")


class Follower:
    """Carries out the commands of rank 0, in order. Replies are sent from any thread."""

    def __init__(self, connection: Connection, config: InstanceConfig, rank: int, port: int) -> None:
        """Load the model.

        Raises:
            SetupError: it cannot be loaded or divided.
        """
        self._connection = connection
        self._sending = threading.Lock()
        self._transfers: dict[int, Future[Any]] = {}
        self._loaders: dict[bytes, SourceLoader] = {}  # by namespace of the source layout of a group
        self._connector: Any = None  # a `Connector`, once it is told to attach
        threading.Thread(target=self._report_alive, daemon=True).start()
        self._config = config_of_follower(config, rank)
        run_beside(self._config.device)
        use_threads(config)
        checkpoint = load(self._config, make_group(self._config, rank, port))
        self._runner = FollowingRunner(checkpoint, self._config)
        self._layout = replace(checkpoint.layout, numerics=self._runner.numerics)
        self.reply(Ready())

    def reply(self, message: Reply) -> None:
        with self._sending, suppress(OSError):  # rank 0 has ended, and so will this process
            self._connection.send_bytes(encode(message))

    def run(self) -> None:
        """Carry out commands until told to end."""
        while not isinstance(command := decode_command(self._connection.recv_bytes()), Close):
            self._carry_out(command)
        for loader in self._loaders.values():
            loader.close()
        if self._connector is not None:
            self._connector.close()

    def _carry_out(self, command: Any) -> None:
        match command:
            case Step():
                self._runner.follow(command)
            case OnMemory(method, arguments):
                getattr(self._runner.kv, method)(*arguments)
            case OnAdapters(method, arguments):
                getattr(self._adapters, method)(*arguments)
            case Attach():
                make = partial(connect, self._config.connector)
                self._connector = attach_groups(make(), make, self._runner.kv, self._layout)
                self.reply(Ready())
            case Convert(operation, layout, at, keys, first, stop, blocks, tickets):
                loader = self._loader(layout, at)
                self._watch(operation, loader.load(keys, range(first, stop), blocks, tickets))
            case ReleaseConverted(layout, at, keys, tickets):
                self._loader(layout, at).release(keys, tickets)
            case Cancel(operation):
                if (future := self._transfers.get(operation)) is not None:
                    request_cancel(future)
            case Transfer(operation, method, keys, blocks, options):
                self._watch(operation, getattr(self._connector, method)(keys, blocks, **options))
            case Match(operation, keys):
                stored: Future[int] = self._connector.match(keys)
                when_done(stored, lambda count: self.reply(Matched(operation, count)))
            case OnLeases(method, keys, options):
                getattr(self._connector, method)(keys, **options)
            case other:
                raise AssertionError(f"unknown command {other}")

    def _watch(self, operation: int, future: Future[Result]) -> None:
        """Reply once a transfer has ended."""
        self._transfers[operation] = future
        when_done(future, lambda result: self._end(operation, result))

    def _end(self, operation: int, result: Result) -> None:
        self._transfers.pop(operation, None)
        held = result.held
        self.reply(Transferred(operation, result.outcomes, result.seconds, result.ticket, held is not None))
        if held is not None:
            when_done(held, lambda _: self.reply(Released(operation)))

    @cached_property
    def _adapters(self) -> "FollowingLayers":
        from pdserve.adapters.ranked_layers import FollowingLayers

        return FollowingLayers(self._runner, self._config)

    def _loader(self, fields: dict[str, Any], at: int) -> SourceLoader:
        source = Layout(**fields | {"more": tuple(Section(**part) for part in fields["more"])})
        namespace = source.groups[at].namespace
        if namespace not in self._loaders:
            kv, url = self._runner.kv, self._config.connector
            copies = kv.copies if kv.pool_NX.device.type == "cuda" else None
            self._loaders[namespace] = SourceLoader(kv.views[at], self._layout, source, url, at, copies)
        return self._loaders[namespace]

    def _report_alive(self) -> None:
        while True:
            self.reply(Alive())
            time.sleep(ALIVE_S)


def when_done(future: Future[T], action: Callable[[T], None]) -> None:
    """Pass the result of a future to `action`. A failure of either ends the process: rank 0 waits for the reply."""

    def run(done: Future[T]) -> None:
        try:
            action(done.result())
        except Exception:
            log.exception("this rank failed")
            logging.shutdown()
            os._exit(FAULT_EXIT_CODE)

    future.add_done_callback(run)


def main(descriptor: int, rank: int, port: int) -> None:
    """Serve rank 0 until it closes the connection."""
    end_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname).1s rank {rank}: %(message)s")
    connection = Connection(descriptor)
    config = msgspec.json.decode(connection.recv_bytes(), type=InstanceConfig)
    torch.manual_seed(config.seed)
    exit_code = 0
    try:
        Follower(connection, config, rank, port).run()
    except SetupError as error:
        connection.send_bytes(encode(Failed(str(error))))
        connection.recv_bytes()  # until rank 0 ends
    except (EOFError, ConnectionResetError, RankLost):
        pass  # rank 0 has ended; reset if it had not read all replies
    except BaseException:
        log.exception("this rank failed")
        exit_code = FAULT_EXIT_CODE
    logging.shutdown()
    os._exit(exit_code)  # without torch's clean-up, which waits for other ranks


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
