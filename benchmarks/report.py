"""JSON reports of benchmarks, which record the machine, the commit and the settings."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.kv_transfer.batched import SWITCH_INTERVAL_S
from pdserve.settings import Settings as CommandSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RESULTS = Path(__file__).parent / "results"
NOTE_HELP = "short description, part of the file's name; default: the number of cores"
QUICK_HELP = "a tiny model and small tasks, for seeing that it works"
OUT_HELP = "folder for the JSON; default: results/ beside this script"
WIDE = 160  # columns
TICKS = os.sysconf("SC_CLK_TCK")  # per second, of CPU times

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does; applies to every measured engine

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Settings of every benchmark."""

    quick: bool = flag(QUICK_HELP, False)
    note: str = flag(NOTE_HELP, "")
    out: str = flag(OUT_HELP, "")

    def sized(self, quick: Mapping[str, Any]) -> Self:
        """The same, or with --quick these values in place of defaults."""
        return with_defaults_replaced(self, quick) if self.quick else self


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """Settings of benchmarks that run the engine in process."""

    device: str = flag("cpu or cuda", "cpu")
    threads: int | None = flag("CPU threads; default: all cores", None)

    def threaded(self) -> Self:
        """Tells torch the number of threads, and says in the settings how many those are."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return replace(self, threads=torch.get_num_threads())


def machine() -> dict[str, Any]:
    """Return the properties of the machine that affect the results, without names or paths."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """Return the checkout's commit, followed by + if tracked files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + "+" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def with_defaults_replaced(settings: S, values: Mapping[str, Any]) -> S:
    """Return `settings` with these values where they still have their defaults."""
    left = {field.name for field in fields(settings) if getattr(settings, field.name) == field.default}
    return replace(settings, **{name: value for name, value in values.items() if name in left})


def write(benchmark: str, settings: "DataclassInstance", content: dict[str, Any]) -> Path:
    """Write settings and `content` after the description of machine and commit; `settings` names note and folder."""
    asked = asdict(settings)
    folder, note = Path(asked.pop("out") or RESULTS), asked.pop("note") or f"{machine()['cores']}-cores"
    now = datetime.now(UTC)
    head = {"benchmark": benchmark, "when": now.isoformat(timespec="seconds"), "note": note}
    head |= {"machine": machine(), "commit": commit(), "settings": asked}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{benchmark}-{note}.json"
    path.write_text(json.dumps(head | content, indent=2) + "\n")
    return path


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def cpu_seconds(pids: list[int]) -> float:
    """Return the user and system CPU seconds of all threads of these processes."""
    times = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in times) / TICKS


def now() -> float:
    """Return the time in seconds after the device has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def rounded(figure: float, digits: int) -> float:
    """Round to significant digits: a small rate must not become 0."""
    return float(f"{figure:.{digits}g}")


def show(rows: Sequence[Mapping[str, object]], title: str | None = None) -> None:
    """Print rows as a table with the columns of the first one, unabridged if the output is not a terminal."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name, cell in rows[0].items():
        table.add_column(name, justify="right" if str(cell)[:1].isdigit() else "left")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in rows[0]))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def main(command: Callable[..., None]) -> None:
    """Run a script's command. A user error is one line on stderr and exit code 2."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as instances do
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # servers and peers exit with the benchmark, even if it is interrupted
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except SetupError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
