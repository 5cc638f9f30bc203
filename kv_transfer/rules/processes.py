"""Rules about several processes that share a store. Whether the store is shared is found out by a probe."""

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.header import Row
from pdserve.kv_transfer.rules.context import (
    AttachedPool,
    Broken,
    MiB,
    NotChecked,
    RuleContext,
    expect,
    expect_count,
    format_size,
    random_rows,
    stamp,
)

COUNT = 8  # blocks per pass
BLOCK_BYTES = MiB
UNLIMITED_PASSES = 1 << 30
MIN_KILLS, MAX_KILLS = 6, 60
MAX_KILL_DELAY_S = 0.04  # a writer is killed at a random time up to this


def between_processes(context: RuleContext) -> str:
    """Processes that store the same keys at the same time all succeed, and other processes can load the blocks."""
    with _WriterPool(context) as pool:
        for seed in range(1 if context.tickets else 3):
            writers = [pool.start(seed, passes=1, lease_s=120.0) for _ in range(3)]
            for writer in writers:
                writer.begin()
            pool.register_passes(seed, 0)
            for writer in writers:
                seen = writer.outcomes()
                if set(seen) - {Outcome.OK} == {Outcome.FULL}:
                    raise NotChecked(f"no space for more blocks of {format_size(BLOCK_BYTES)}")
                said = "".join(f"; it said: {text}" for text in writer.warnings())
                expect(
                    set(seen) == {Outcome.OK}, "every process to store all blocks", ", ".join(sorted(set(seen))) + said
                )
            for writer in writers:
                pool.keep_tickets(writer, seed)
                loaded = pool.count_loadable(seed, 0)
                expect_count(
                    loaded, COUNT, f"{COUNT} blocks of another process to load, which has not closed its connector"
                )
            for writer in writers:
                writer.end()
    return ""


def killed_writer(context: RuleContext) -> str:
    """If a writer is killed at any moment, each of its blocks is complete or missing, and the store stays usable."""
    rng, kills, interrupted, can_delete = random.Random(), 0, 0, True
    with _WriterPool(context) as pool:
        if context.tickets:
            return _killed_during_loads(context, pool)
        give_up_at = time.monotonic() + context.seconds
        while kills < MIN_KILLS or (time.monotonic() < give_up_at and kills < MAX_KILLS):
            kills += 1
            seed = 1000 + kills
            writer = pool.start(seed, passes=UNLIMITED_PASSES, lease_s=0.0)
            writer.begin()
            writer.wait_for_pass()
            time.sleep(rng.uniform(0.0, MAX_KILL_DELAY_S))
            last_pass = writer.kill()
            loaded = [pool.count_loadable(seed, number) for number in range(max(0, last_pass - 3), last_pass + 1)]
            interrupted += loaded[-1] < COUNT
            pool.register_passes(seed, last_pass)
            # A store that never evicts would get full of complete blocks, not of interrupted ones.
            can_delete = context.delete_blocks(pool.reader)
        reader, keys = pool.reader, [key_of(0, 0, n) for n in range(COUNT)]
        reader.must_store(keys, range(COUNT), must_fit=can_delete)  # space held by dead writers must be free again
        reader.must_load(keys, range(COUNT, 2 * COUNT), reader.rows[:COUNT])
    return f"{kills} writers killed, {interrupted} of them during a store"


def _killed_during_loads(context: RuleContext, pool: "_WriterPool") -> str:
    """Variant for blocks that stay with the process that stored them: kill it while another process loads them."""
    rng, kills, interrupted = random.Random(), 0, 0
    give_up_at = time.monotonic() + context.seconds
    while kills < MIN_KILLS // 2 or (time.monotonic() < give_up_at and kills < MAX_KILLS):
        kills += 1
        seed = 1000 + kills
        writer = pool.start(seed, passes=1, lease_s=60.0)
        writer.begin()
        writer.outcomes()
        pool.keep_tickets(writer, seed)
        kill = threading.Timer(rng.uniform(0.0, MAX_KILL_DELAY_S), os.kill, (writer.pid, signal.SIGKILL))
        kill.start()
        interrupted += pool.count_loadable(seed, 0) < COUNT
        kill.join()
        pool.read(writer.pid, "dead")
        pool.register_passes(seed, 0)
        context.delete_blocks(pool.reader)  # where blocks outlive their writer, many writers would fill the store
    reader, keys = pool.reader, [key_of(0, 0, n) for n in range(COUNT)]
    reader.must_store(keys, range(COUNT))
    reader.must_load(keys, range(COUNT, 2 * COUNT), reader.rows[:COUNT])
    return f"{kills} processes killed while their blocks were read, {interrupted} of them before all were"


# Key and content of block n of pass `number` of the writer with this seed.


def key_of(seed: int, number: int, n: int) -> bytes:
    return struct.pack("<QII", seed, number, n)


def rows_of(seed: int) -> Row:
    """Return the rows of all blocks of a pass, before `stamp` writes the number of the pass into them."""
    return random_rows(COUNT, BLOCK_BYTES, seed)


_REQUIRED = object()


class _Writer:
    """A child process with an attached connector, which stores on a signal."""

    def __init__(self, pool: "_WriterPool", pid: int) -> None:
        self._pool = pool
        self.pid = pid
        self._last_pass = 0

    def begin(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def wait_for_pass(self) -> None:
        """Wait until the writer begins its next pass."""
        self._last_pass = int(self._pool.read(self.pid, "pass"))

    def outcomes(self) -> list[str]:
        return list(self._pool.read(self.pid, "outcomes"))

    def warnings(self) -> list[str]:
        """Return the latest warnings of its connector, such as a fault."""
        return list(self._pool.read(self.pid, "warnings"))

    def end(self) -> None:
        """Let the writer close its connector, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self._pool.read(self.pid, "dead")

    def kill(self) -> int:
        """Kill the writer. Returns the number of the last pass that it began."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._pool.read(self.pid, "dead")
        return int(self._pool.read(self.pid, "pass", default=self._last_pass))


class _WriterPool:
    """A process with all modules imported that forks writers, as starting a new interpreter takes half a second.

    Attributes:
        reader: an attached pool of this process, which loads what the writers store.
    """

    def __init__(self, context: RuleContext) -> None:
        self.reader: AttachedPool = context.attach(BLOCK_BYTES, 2 * COUNT)
        self._context = context
        self._seed, self._rows = 0, rows_of(0)
        self._messages: dict[tuple[int, str], Any] = {}
        command = [
            sys.executable,
            "-m",
            "pdserve.kv_transfer.rules.writer",
            context.url,
            self.reader.layout.model_fingerprint,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def __enter__(self) -> "_WriterPool":
        try:
            self._probe()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def start(self, seed: int, passes: int, lease_s: float) -> _Writer:
        """Fork a writer, and wait until its connector is attached."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'seed': seed, 'passes': passes, 'lease_s': lease_s})}\n")
        self._process.stdin.flush()
        writer = _Writer(self, self.read(0, "pid"))
        self.read(writer.pid, "ready")
        return writer

    def read(self, pid: int, what: str, default: Any = _REQUIRED) -> Any:
        """Return a writer's message of this kind. Waits for it, or returns the default if given and it has not come.

        Other messages are kept for later calls.
        """
        assert self._process.stdout is not None
        while (pid, what) not in self._messages:
            if default is not _REQUIRED:
                return default
            line = self._process.stdout.readline()
            if not line:
                raise NotChecked("another process could not be started")
            message = json.loads(line)
            if message["what"] == "error":
                raise Broken(f"expected another process to store, saw {message['value']}")
            if message["what"] == "refused":
                raise NotChecked(f"another process cannot attach: {message['value']}")
            self._messages[message["pid"], message["what"]] = message["value"]
        return self._messages.pop((pid, what))

    def count_loadable(self, seed: int, number: int) -> int:
        """Count the blocks of a pass that load. These must be correct, and the others missing."""
        if self._seed != seed:
            self._seed, self._rows = seed, rows_of(seed)
        stamp(self._rows, number)
        keys = [key_of(seed, number, n) for n in range(COUNT)]
        return self.reader.may_load(keys, range(COUNT), list(self._rows))

    def keep_tickets(self, writer: _Writer, seed: int) -> None:
        """Keep the tickets of a writer's pass 0 for later loads."""
        for ticket in self.read(writer.pid, "tickets"):
            keys = [key_of(seed, 0, n) for n in range(COUNT)]
            self._context.tickets.update({(self.reader.layout.namespace, key): bytes.fromhex(ticket) for key in keys})

    def register_passes(self, seed: int, last_pass: int) -> None:
        """Register the blocks of a writer's passes for deletion."""
        for number in range(last_pass + 1):
            self._context.register_keys(self.reader.layout, [key_of(seed, number, n) for n in range(COUNT)])

    def _probe(self) -> None:
        """Raise `NotChecked` if blocks of another process are not found."""
        writer = self.start(seed=999, passes=1, lease_s=60.0)
        writer.begin()
        seen = writer.outcomes()
        if Outcome.FULL in seen:
            raise NotChecked(f"the store has no space for {COUNT} blocks of {format_size(BLOCK_BYTES)}")
        self.register_passes(999, 0)
        self.keep_tickets(writer, 999)
        found = self.count_loadable(999, 0)
        writer.end()
        if found == 0:
            found_later = self.count_loadable(999, 0)
            late = f"{found_later}, but only after it had closed its connector"
            expect(found_later == 0, "the blocks of another process to load", late)
            self.reader.must_store([key_of(998, 0, 0)], [0])
            self._context.require_shared_store()
            if self.reader.connector.capabilities.one_process:
                raise NotChecked("each process has a store of its own, as the connector declares (one_process)")
            expected = "the blocks of another process to load, as decode loads those of prefill"
            raise Broken(
                f"expected {expected}, saw none: names may differ between processes, or each has its own store"
            )
