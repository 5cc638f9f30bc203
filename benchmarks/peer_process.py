"""Other engines, each in its own process and environment, which `peers/install` creates; `peers/peer.py` runs there."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import httpx
import report

from pdserve.cli.deployment import free_port
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.parent import receive_at_end

PEER = Path(__file__).parent / "peers" / "peer.py"
PEERS = ("transformers", "openvino", "llama_cpp", "vllm")
CONVERTED = ("openvino", "llama_cpp")  # need a converted checkpoint
SERVER_START_S = 300.0  # the first start compiles
SERVER_STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    """Settings of benchmarks with peers."""

    peers: str = flag(f"also measure, each in its own environment: {', '.join(PEERS)}; by comma", "")
    peers_folder: str = flag("where peers/install has put them; converted checkpoints stay there too", "")

    def named(self, known: tuple[str, ...] = PEERS) -> list[str]:
        """Those that were asked for.

        Raises:
            SetupError: there is no such peer here, or no environment for it.
        """
        names = self.peers.split(",") if self.peers else []
        for name in names:
            if name not in known:
                raise SetupError(f"--peers {name} is not known; there is: {', '.join(known)}")
            python(name, self.peers_folder)
        return names


class _Process:
    """`peer.py` in a peer's environment with all its processes, which are stopped (SIGSTOP) while idle."""

    def __init__(self, action: str, name: str, folder: str, path: Path, threads: int, *options: str) -> None:
        """`folder` contains the environments, `path` the checkpoint."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.pop("OMP_WAIT_POLICY", None)
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python(name, folder), str(PEER), action, name, str(path), str(threads), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            process_group=0,  # same session: if we are killed, the kernel continues and ends the stopped processes
            preexec_fn=receive_at_end,  # for the processes that are not stopped
        )

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes that still exist."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self) -> SetupError:
        self._log.seek(0)
        return SetupError(f"{self._name} exited; the end of its log: {self._log.read()[-2000:]}")


class Peer(_Process):
    """Another engine, controlled over pipes."""

    def __init__(
        self,
        name: str,
        folder: str,
        path: Path,
        threads: int,
        dtype: str,
        device: str,
        context: int,
        quantization: str = "none",
    ) -> None:
        """Start the engine. `context`: tokens of the longest prompt and its output.

        Raises:
            SetupError: the engine does not start.
        """
        super().__init__("run", name, folder, path, threads, dtype, device, str(context), quantization)
        try:
            self._answer()
        except SetupError:
            self.close()
            raise

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Return the times measured by `peer.py`."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "output_tokens": output_tokens}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        """Return the next line; the processes are stopped afterwards."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        self._signal(signal.SIGSTOP)
        return line


class Server(_Process):
    """Another engine behind OpenAI's API, which serves the model under the name `model`.

    Attributes:
        url: base URL of the server.
    """

    def __init__(
        self, name: str, folder: str, path: Path, threads: int, dtype: str, context: int, role: str = ""
    ) -> None:
        """Begin to start. `context`: tokens of a prompt and its answer; `role`: `kv_producer` or `kv_consumer`, for one half
        of a disaggregated pair.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        ports = str(port), str(free_port(exclude=port))
        super().__init__("serve", name, folder, path, threads, dtype, str(context), *ports, role)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Let the server clean up resources shared among its processes, then kill the remaining ones."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SERVER_STOP_S)
        super().close()

    def wait_ready(self) -> None:
        """Wait for the server, then stop its processes until `at_work`.

        Raises:
            SetupError: the server does not start.
        """
        deadline = time.monotonic() + SERVER_START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._ended()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=1.0).status_code == 200:
                    self._signal(signal.SIGSTOP)
                    return
            time.sleep(0.2)
        raise SetupError(f"{self._name} was not ready within {SERVER_START_S:.0f} s")


def python(name: str, folder: str, purpose: str = "") -> str:
    """Return the interpreter of a peer's environment; for transformers, that of ours.

    Raises:
        SetupError: the environment does not exist.
    """
    if name == "transformers":
        return sys.executable
    interpreter = Path(folder) / (name + purpose) / "bin/python"
    if purpose and not interpreter.exists():
        return python(name, folder)
    if not interpreter.exists():
        raise SetupError(f"{name} is not there: benchmarks/peers/install FOLDER {name}, then --peers-folder FOLDER")
    return str(interpreter)


def convert(name: str, folder: str, path: Path, quantization: str = "none") -> None:
    """Write the files that the peer loads, unless an earlier run has.

    Raises:
        SetupError: the conversion failed.
    """
    target = f"{path.name}-{name}" + f"-{quantization}" * (quantization != "none")
    if name in CONVERTED and not path.with_name(target).exists():
        command = [python(name, folder, "_convert"), str(PEER), "convert", name, str(path), quantization]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SetupError(f"the checkpoint could not be converted for {name}: {done.stderr[-2000:]}")


@contextmanager
def checkpoint(shape: checkpoints.Shape, folder: str) -> Iterator[Path]:
    """Return a new checkpoint, or the one of this shape in the peers' folder, which keeps the peers' converted files."""
    if not folder:
        with tempfile.TemporaryDirectory() as temporary:
            yield checkpoints.make(shape, Path(temporary) / "checkpoint")
        return
    path = Path(folder) / f"checkpoint-{hashlib.sha256(repr(shape).encode()).hexdigest()[:8]}"
    if not path.exists():
        unfinished = path.with_name(f"{path.name}-unfinished")
        checkpoints.make(shape, unfinished).rename(path)
    yield path.resolve()
