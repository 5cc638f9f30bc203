"""Other engines, each in a process and an environment of its own, which `peers/install` makes; `peers/peer.py` runs there."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError

PEER = Path(__file__).parent / "peers" / "peer.py"
PEERS = ("transformers", "openvino", "llama_cpp", "vllm")
CONVERTED = ("openvino", "llama_cpp")  # do not load the checkpoint itself


class Peer:
    """Another engine in a process of its own, which is stopped while nothing is asked of it."""

    def __init__(self, name: str, folder: str, path: Path, threads: int, dtype: str, device: str) -> None:
        """`folder` has the environments, `path` the checkpoint.

        Raises:
            SetupError: it does not start.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.pop("OMP_WAIT_POLICY", None)
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python(name, folder), str(PEER), "run", name, str(path), str(threads), dtype, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self._answer()
        except SetupError:
            self.close()
            raise

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """What `peer.py` has timed."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "output_tokens": output_tokens}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self) -> str:
        """The next line; the process is stopped after that."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SetupError(f"{self._name} ended; the last that it said: {self._log.read()[-2000:]}")
        self._process.send_signal(signal.SIGSTOP)
        return line


def python(name: str, folder: str, purpose: str = "") -> str:
    """The interpreter of a peer's environment; of ours for transformers.

    Raises:
        SetupError: there is no such peer, or no environment for it.
    """
    if name not in PEERS:
        raise SetupError(f"--peers {name} is not known; there is: {', '.join(PEERS)}")
    if name == "transformers":
        return sys.executable
    interpreter = Path(folder) / (name + purpose) / "bin/python"
    if purpose and not interpreter.exists():
        return python(name, folder)
    if not interpreter.exists():
        raise SetupError(f"{name} is not there: benchmarks/peers/install FOLDER {name}, then --peers-folder FOLDER")
    return str(interpreter)


def convert(name: str, folder: str, path: Path) -> None:
    """Writes what the peer loads, unless an earlier run has.

    Raises:
        SetupError: it could not.
    """
    if name in CONVERTED and not path.with_name(f"{path.name}-{name}").exists():
        command = [python(name, folder, "_convert"), str(PEER), "convert", name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SetupError(f"the checkpoint could not be converted for {name}: {done.stderr[-2000:]}")
