"""Rules about several processes, for stores that they share. Whether they do is tried, not asked."""

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
from pdserve.kv_transfer.rules.trial import (
    Broken,
    Instance,
    MiB,
    NotChecked,
    Trial,
    expect,
    mark,
    random_rows,
    size_text,
)

COUNT = 8  # blocks of one pass
BLOCK_BYTES = MiB
ENDLESS = 1 << 30
MIN_KILLS, MAX_KILLS = 6, 60
LONGEST_S = 0.04  # for which a writer is let go on before it is killed


def between_processes(trial: Trial) -> str:
    """Processes that store the same keys at the same moment all succeed, and others load the blocks."""
    with _Nursery(trial) as nursery:
        for seed in range(1 if trial.tickets else 3):
            writers = [nursery.start(seed, passes=1, lease_s=10.0) for _ in range(3)]
            for writer in writers:
                writer.begin()
            nursery.forget(seed, 0)
            for writer in writers:
                seen = writer.outcomes()
                if set(seen) - {Outcome.OK} == {Outcome.FULL}:
                    raise NotChecked(f"no room for more blocks of {size_text(BLOCK_BYTES)}")
                expect(set(seen) == {Outcome.OK}, "every process to store all blocks", ", ".join(sorted(set(seen))))
            for writer in writers:
                nursery.take_tickets(writer, seed)
                loaded = nursery.compare(seed, 0)
                expect(loaded == COUNT, f"{COUNT} blocks of another process to load", loaded)
            for writer in writers:
                writer.end()
    return ""


def killed_writer(trial: Trial) -> str:
    """A writer that is killed at any moment leaves each block whole or missing, and the store usable."""
    dice, kills, torn, tidy = random.Random(), 0, 0, True
    with _Nursery(trial) as nursery:
        if trial.tickets:
            return _killed_while_it_is_read(trial, nursery)
        give_up = time.monotonic() + trial.seconds
        while kills < MIN_KILLS or (time.monotonic() < give_up and kills < MAX_KILLS):
            kills += 1
            seed = 1000 + kills
            writer = nursery.start(seed, passes=ENDLESS, lease_s=0.0)
            writer.begin()
            writer.has_begun()
            time.sleep(dice.uniform(0.0, LONGEST_S))
            last = writer.kill()
            there = [nursery.compare(seed, number) for number in range(max(0, last - 3), last + 1)]
            torn += there[-1] < COUNT
            nursery.forget(seed, last)
            tidy = trial.tidy(nursery.one)  # a store that never evicts would be full of whole blocks, not of torn ones
        one, keys = nursery.one, [key_of(0, 0, n) for n in range(COUNT)]
        one.must_store(keys, range(COUNT), room=tidy)  # what the dead held has to be free again
        one.must_load(keys, range(COUNT, 2 * COUNT), one.rows[:COUNT])
    return f"{kills} writers killed, {torn} of them in the middle of a store"


def _killed_while_it_is_read(trial: Trial, nursery: "_Nursery") -> str:
    """Where blocks stay with the process that stored them: it is killed while another one loads them."""
    dice, kills, cut = random.Random(), 0, 0
    give_up = time.monotonic() + trial.seconds
    while kills < MIN_KILLS // 2 or (time.monotonic() < give_up and kills < MAX_KILLS):
        kills += 1
        seed = 1000 + kills
        writer = nursery.start(seed, passes=1, lease_s=60.0)
        writer.begin()
        writer.outcomes()
        nursery.take_tickets(writer, seed)
        killer = threading.Timer(dice.uniform(0.0, LONGEST_S), os.kill, (writer.pid, signal.SIGKILL))
        killer.start()
        cut += nursery.compare(seed, 0) < COUNT
        killer.join()
        nursery.read(writer.pid, "dead")
        nursery.forget(seed, 0)
        trial.tidy(nursery.one)  # where the blocks outlive their writer, many writers would fill the store
    one, keys = nursery.one, [key_of(0, 0, n) for n in range(COUNT)]
    one.must_store(keys, range(COUNT))
    one.must_load(keys, range(COUNT, 2 * COUNT), one.rows[:COUNT])
    return f"{kills} processes killed whose blocks were read, {cut} of them before all were"


# What writers write: block n of pass p of seed s has this key and these bytes.


def key_of(seed: int, number: int, n: int) -> bytes:
    return struct.pack("<QII", seed, number, n)


def rows_of(seed: int) -> Row:
    return random_rows(COUNT, BLOCK_BYTES, seed)


_WAIT = object()


class _Writer:
    """A process that is attached, and stores when it is told to."""

    def __init__(self, nursery: "_Nursery", pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self._last = 0

    def begin(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def has_begun(self) -> None:
        self._last = int(self._nursery.read(self.pid, "pass"))

    def outcomes(self) -> list[str]:
        return list(self._nursery.read(self.pid, "outcomes"))

    def end(self) -> None:
        """Also of one that waits because it has given tickets."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self._nursery.read(self.pid, "dead")

    def kill(self) -> int:
        """The number of the last pass that it began."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._nursery.read(self.pid, "dead")
        return int(self._nursery.read(self.pid, "pass", default=self._last))


class _Nursery:
    """A process that has imported everything and forks writers, because starting one anew takes half a second each."""

    def __init__(self, trial: Trial) -> None:
        self.one: Instance = trial.instance(BLOCK_BYTES, 2 * COUNT)
        self._trial = trial
        self._seed, self._content = 0, rows_of(0)
        self._answers: dict[tuple[int, str], Any] = {}
        command = [
            sys.executable,
            "-m",
            "pdserve.kv_transfer.rules.writer",
            trial.url,
            self.one.layout.model_fingerprint,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def __enter__(self) -> "_Nursery":
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
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'seed': seed, 'passes': passes, 'lease_s': lease_s})}\n")
        self._process.stdin.flush()
        writer = _Writer(self, self.read(0, "pid"))
        self.read(writer.pid, "ready")
        return writer

    def read(self, pid: int, what: str, default: Any = _WAIT) -> Any:
        """The answer of this kind, the default if it has not come; others are kept until they are asked for."""
        assert self._process.stdout is not None
        while (pid, what) not in self._answers:
            if default is not _WAIT:
                return default
            line = self._process.stdout.readline()
            if not line:
                raise NotChecked("another process could not be started")
            answer = json.loads(line)
            if answer["what"] == "error":
                raise Broken(f"expected another process to store, saw {answer['value']}")
            if answer["what"] == "refused":
                raise NotChecked(f"another process cannot attach: {answer['value']}")
            self._answers[answer["pid"], answer["what"]] = answer["value"]
        return self._answers.pop((pid, what))

    def compare(self, seed: int, number: int) -> int:
        """How many blocks of this pass are there. Those have to be right, and the others missing."""
        if self._seed != seed:
            self._seed, self._content = seed, rows_of(seed)
        mark(self._content, number)
        keys = [key_of(seed, number, n) for n in range(COUNT)]
        return self.one.may_load(keys, range(COUNT), list(self._content))

    def take_tickets(self, writer: _Writer, seed: int) -> None:
        """What the hand-over of its last pass would carry, the pass having the number 0."""
        for ticket in self.read(writer.pid, "tickets"):
            keys = [key_of(seed, 0, n) for n in range(COUNT)]
            self._trial.tickets.update({(self.one.layout.namespace, key): bytes.fromhex(ticket) for key in keys})

    def forget(self, seed: int, last: int) -> None:
        for number in range(last + 1):
            self._trial.remember(self.one.layout, [key_of(seed, number, n) for n in range(COUNT)])

    def _probe(self) -> None:
        writer = self.start(seed=999, passes=1, lease_s=60.0)
        writer.begin()
        seen = writer.outcomes()
        if Outcome.FULL in seen:
            raise NotChecked(f"the store has no room for {COUNT} blocks of {size_text(BLOCK_BYTES)}")
        self.forget(999, 0)
        self.take_tickets(writer, 999)
        found = self.compare(999, 0)
        writer.end()
        if found == 0:
            self.one.must_store([key_of(998, 0, 0)], [0])
            self._trial.needs_store()
            raise NotChecked("a block that another process stored is not found: each process has a store of its own")
