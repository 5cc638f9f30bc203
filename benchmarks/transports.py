"""Overhead of connectors over their bare transports: `python benchmarks/transports.py`.

For each connector, four operations alternate: a memcpy of some blocks, the bare transport moving the same bytes, the
connector storing the blocks, and another connector loading them. A connector adds keys, headers, checksums, futures,
deadlines, and the copy into the pool.
"""

import multiprocessing
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import report
import stores
from rich.console import Console

from pdserve.cli.flags import command_from_config
from pdserve.config import flag, parse_size
from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.rules.context import AttachedPool, RuleContext, new_keys


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    connectors: str = flag("comma separated, see the README", "shm,file-tmpfs,redis-unix,nixl")
    block_bytes: str = flag("bytes of a block", "1792KiB")
    blocks: int = flag("blocks of one store or load", 64)
    pieces: int = flag("operations into which they are divided, under way together", 4)
    repeat: int = flag("turns", 9)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        for name in self.connectors.split(","):
            if name not in TRANSPORTS:
                raise ValueError(f"--connectors {name!r} is not known; there are: {', '.join(TRANSPORTS)}")


QUICK = {"block_bytes": "64KiB", "blocks": 16, "pieces": 2, "repeat": 1, "connectors": "shm,file-tmpfs"}
Move = Callable[[], float]  # seconds


@dataclass
class Raw:
    """A bare transport: its description, and functions that move all blocks once in each direction."""

    what: str
    store: Move | None = None
    load: Move | None = None


@dataclass
class Turns:
    """Seconds of each repetition, by operation."""

    memcpy: list[float] = field(default_factory=list)
    raw_store: list[float] = field(default_factory=list)
    raw_load: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def benchmark(settings: Settings) -> None:
    """Measure connectors beside their bare transports and a memcpy."""
    settings = settings.sized(QUICK)
    rows, skipped = [], {}
    with Console(stderr=True).status("measuring") as status:
        for name in settings.connectors.split(","):
            status.update(name)
            try:
                rows += _measure(name, settings)
            except SetupError as error:
                skipped[name] = str(error)
    _print(rows)
    for name, reason in skipped.items():
        print(f"{name} was not measured: {reason}")
    print(report.write("transports", settings, {"skipped": skipped, "rows": rows}))


# ---- transports: each a context manager that gives a connector's URL and the bare transport under it --------------------


@contextmanager
def _shm(nbytes: int, count: int) -> Iterator[tuple[str, Raw]]:
    with stores.shm(4 * nbytes * count) as url:
        yield url, Raw("one memcpy")


@contextmanager
def _file(nbytes: int, count: int) -> Iterator[tuple[str, Raw]]:
    """Write one new file of all blocks with `dd`, and read it."""
    with stores.file("/dev/shm", 4 * nbytes * count) as url, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "raw"

        def store() -> float:
            path.unlink(missing_ok=True)
            return _dd(f"if=/dev/zero of={path} bs={nbytes} count={count}")

        yield url, Raw("dd", store, lambda: _dd(f"if={path} of=/dev/null bs={nbytes}"))


def _dd(arguments: str) -> float:
    """Return the seconds reported by dd, without its start-up."""
    done = subprocess.run(["dd", *arguments.split()], capture_output=True, text=True, check=True, env={"LC_ALL": "C"})
    return float(done.stderr.splitlines()[-1].split(", ")[-2].split()[0])


@contextmanager
def _redis(nbytes: int, count: int) -> Iterator[tuple[str, Raw]]:
    """Use one client on the socket: all commands pipelined, replies received into one buffer and not parsed."""
    with stores.redis("redis+unix://{socket}", 8 * nbytes * count) as url, socket.socket(socket.AF_UNIX) as client:
        client.connect(url.removeprefix("redis+unix://"))
        payload, buffer = np.ones(nbytes, np.uint8), memoryview(bytearray(nbytes + 64))

        def receive(length: int) -> None:
            while length:
                length -= client.recv_into(buffer[: min(length, len(buffer))])

        def store() -> float:
            began = time.perf_counter()
            for i in range(count):
                client.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\nraw%05d\r\n$%d\r\n" % (i, nbytes))
                client.sendall(payload.data)
                client.sendall(b"\r\n")
            receive(count * len(b"+OK\r\n"))
            return time.perf_counter() - began

        def load() -> float:
            began = time.perf_counter()
            client.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$8\r\nraw%05d\r\n" % i for i in range(count)))
            receive(count * (len(b"$%d\r\n\r\n" % nbytes) + nbytes))
            return time.perf_counter() - began

        yield url, Raw("SET and GET on a socket", store, load)


@contextmanager
def _nixl(nbytes: int, count: int) -> Iterator[tuple[str, Raw]]:
    """Read all rows of another process directly into ours in one transfer. There is no store operation."""
    try:
        from pdserve.kv_transfer.connectors.nixl.agent import Agent, NixlError
        from pdserve.kv_transfer.connectors.nixl.memory import HostMemory

        agent = Agent("lo")
    except SetupError as error:
        raise SetupError(f"no NIXL: {error}") from error
    here, there = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_nixl_peer, args=(there, nbytes, count), daemon=True)
    peer.start()
    rows, ids = HostMemory(np.ones((count, nbytes), np.uint8)), np.arange(count, dtype=np.int32)
    try:
        name, metadata, base = here.recv()
        agent.register(rows)
        agent.add_peer(metadata)
        sources, targets = (
            agent.prepare(peer_name, address, nbytes, count, rows.kind, rows.device)
            for peer_name, address in ((name, base), ("", rows.address))
        )

        def load() -> float:
            began = time.perf_counter()
            transfer = agent.make_read(targets, ids, sources, ids)
            over = agent.start_read(transfer)
            while not over:
                over = agent.is_done(transfer)
            seconds = time.perf_counter() - began
            agent.release(transfer)
            return seconds

        yield "nixl://?devices=lo", Raw("one NIXL read", None, load)
        agent.remove_peer(name, sources)
    except (NixlError, EOFError) as error:
        raise SetupError(f"NIXL failed: {error}") from error
    finally:
        here.close()
        peer.join(10)
        agent.close()


def _nixl_peer(pipe: Connection, nbytes: int, count: int) -> None:
    from pdserve.kv_transfer.connectors.nixl.agent import Agent
    from pdserve.kv_transfer.connectors.nixl.memory import HostMemory

    agent, rows = Agent("lo"), HostMemory(np.ones((count, nbytes), np.uint8))
    agent.register(rows)
    pipe.send((agent.name, agent.metadata(), rows.address))
    while not _closed(pipe):
        agent.poll()
        time.sleep(0.01)
    agent.close()


def _closed(pipe: Connection) -> bool:
    try:
        return pipe.poll(0) and pipe.recv() is None
    except EOFError:
        return True


TRANSPORTS: dict[str, Callable[[int, int], AbstractContextManager[tuple[str, Raw]]]] = {
    "shm": _shm,
    "file-tmpfs": _file,
    "redis-unix": _redis,
    "nixl": _nixl,
}


# ---- measuring --------------------------------------------------------------------------------------------------------


def _measure(name: str, settings: Settings) -> list[dict[str, Any]]:
    nbytes, count = parse_size(settings.block_bytes), settings.blocks
    with TRANSPORTS[name](nbytes, count) as (url, raw):
        context = RuleContext(url, 60.0)
        try:
            source, target = context.attach(nbytes, count), context.attach(nbytes, count)
            target.rows[:] = source.rows
            turns = Turns()
            for turn in range(settings.repeat + 1):
                into = turns if turn else Turns()
                _turn(into, context, source, target, raw, settings.pieces)
        finally:
            context.close()
    return [_row(name, way, raw.what, turns, nbytes * count) for way in ("store", "load")]


def _turn(
    turns: Turns, context: RuleContext, source: AttachedPool, target: AttachedPool, raw: Raw, pieces: int
) -> None:
    count = len(source.rows)
    began = time.perf_counter()
    for row in range(count):
        target.rows[row] = source.rows[row]
    turns.memcpy.append(time.perf_counter() - began)
    if raw.store:
        turns.raw_store.append(raw.store())
    if raw.load:
        turns.raw_load.append(raw.load())
    keys = new_keys(count)
    step = -(-count // pieces)
    parts = [(keys[at : at + step], range(at, min(at + step, count))) for at in range(0, count, step)]
    context.register_keys(source.layout, keys)
    began = time.perf_counter()
    futures = [source.connector.store(part, rows, lease_s=60.0) for part, rows in parts]
    stored = [future.result() for future in futures]
    turns.store.append(time.perf_counter() - began)
    for (part, _), result in zip(parts, stored, strict=True):
        source.keep_ticket(part, result)
    began = time.perf_counter()
    futures = [target.connector.load(part, rows, tickets=source.tickets(part)) for part, rows in parts]
    loaded = [future.result() for future in futures]
    turns.load.append(time.perf_counter() - began)
    if any(outcome is not Outcome.OK for result in (*stored, *loaded) for outcome in result.outcomes):
        raise SetupError("some blocks were not moved")
    source.connector.release(keys)
    context.delete_blocks(source)


def _row(name: str, way: str, what: str, turns: Turns, nbytes: int) -> dict[str, Any]:
    """Ratios are medians of the ratios within a turn."""
    ours: list[float] = getattr(turns, way)
    raw: list[float] = getattr(turns, f"raw_{way}") or (turns.memcpy if what == "one memcpy" else [])

    def rate(seconds: list[float]) -> float | None:
        return report.rounded(nbytes / statistics.median(seconds) / 1e9, 3) if seconds else None

    def ratio(seconds: list[float]) -> float | None:
        pairs = zip(seconds, ours, strict=True)
        return report.rounded(statistics.median(other / own for other, own in pairs), 3) if seconds else None

    return {
        "connector": name,
        "operation": way,
        "bytes": nbytes,
        "gb_per_s": rate(ours),
        "raw": what,
        "raw_gb_per_s": rate(raw),
        "memcpy_gb_per_s": rate(turns.memcpy),
        "of_raw": ratio(raw),
        "of_memcpy": ratio(turns.memcpy),
        "seconds": [round(second, 6) for second in ours],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    columns = {"GB/s": "gb_per_s", "bare": "raw", "bare GB/s": "raw_gb_per_s", "of bare": "of_raw"}
    columns |= {"memcpy GB/s": "memcpy_gb_per_s", "of memcpy": "of_memcpy"}
    names = {"connector": "connector", "operation": "operation"} | columns
    report.show([{column: _shown(row[name]) for column, name in names.items()} for row in rows])


def _shown(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.2f}"


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
