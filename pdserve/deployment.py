"""A router and its instances as child processes on this machine: started together, restarted one by one, stopped as one.

with Deployment(config) as deployment:
    deployment.wait_ready()
    ...                          # deployment.url answers; call deployment.tend() now and then
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType

import httpx

from pdserve.config import DEFAULT_CONNECTOR, TransferConfig, UpConfig
from pdserve.errors import SetupError

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before a restart; the last one repeats
STABLE_S = 60.0  # a child that ran this long starts over with the first back-off
STOP_S = 10.0  # from SIGTERM to SIGKILL
SETUP_ERROR = 2  # exit code of a start-up error: the same command would fail again
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec there is little that one may do


@dataclass
class Child:
    """One process of the deployment."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    reader: threading.Thread | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Deployment:
    """Everything that `pdserve up` starts. Use it as a context manager.

    Args:
        say: called with each line that a child prints, its name in front.
    """

    def __init__(self, config: UpConfig, say: Callable[[str], None] = print) -> None:
        if config.prefill + config.decode + config.both == 0:
            raise SetupError("nothing to start: give --prefill and --decode, or --both")
        if not config.both and not (config.prefill and config.decode):
            raise SetupError("no request could be served: give at least one --prefill and one --decode, or one --both")
        self.config = config
        self.connector = config.connector
        if self.connector == DEFAULT_CONNECTOR:
            self.connector = f"shm://up-{os.getpid()}"  # ours alone, so that it can be removed at the end
        self.url = f"http://{config.host}:{config.port}"
        self._say = say
        self._was_ready = False  # afterwards, what cannot start now may start later
        self._control = f"127.0.0.1:{config.control_port or free_port(but=config.port)}"
        self.children = [self._router(), *self._instances()]

    def __enter__(self) -> "Deployment":
        for child in self.children:
            self._start(child)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def tend(self) -> None:
        """Restarts children that have died, each after its back-off.

        Raises:
            SetupError: one says that it cannot start at all.
        """
        now = time.monotonic()
        for child in self.children:
            if child.running:
                continue
            if child.restart_at is None:
                self._died(child, now)
            elif now >= child.restart_at:
                self._start(child)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Returns once a request can be served by all instances.

        Raises:
            SetupError: a child cannot start, or the time runs out.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.poll_ready():
                return
            time.sleep(0.05)
        raise SetupError(f"not ready within {timeout_s:.0f} s")

    def poll_ready(self) -> bool:
        """Tends the children, and says whether all instances have registered."""
        self.tend()
        try:
            with httpx.Client(timeout=1.0, verify=False) as http:  # reading certificates takes longer than asking
                ready = http.get(f"{self.url}/ready")
        except httpx.TransportError:
            return False
        if ready.status_code != 200 or ready.json()["instances"] < len(self.children) - 1:
            return False
        self._was_ready = True
        return True

    def stop(self) -> None:
        """Ends all children, the instances first, and removes what they shared."""
        for child in reversed(self.children):
            if child.running:
                os.kill(child.pid, signal.SIGINT)  # SIGTERM would drain an instance first
        for child in self.children:
            if child.process is None:
                continue
            try:
                child.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._say(f"[{child.name}] did not stop within {STOP_S:.0f} s: killed")
                child.process.kill()
                child.process.wait()
            if child.reader is not None:
                child.reader.join(timeout=1.0)
        if self.connector.startswith("shm://") and self.connector != self.config.connector:
            from pdserve.kv_transfer.shm import unlink

            unlink(self.connector)

    def _died(self, child: Child, now: float) -> None:
        assert child.process is not None
        code = child.process.returncode
        if code == SETUP_ERROR and not self._was_ready:
            if child.reader is not None:
                child.reader.join(timeout=1.0)
            raise SetupError(f"{child.name} could not start; its reason stands above")
        if now - child.started > STABLE_S or code == 0:  # it was drained
            child.failures = 0
        pause = BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        child.restart_at = now + pause
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._say(f"[{child.name}] ended ({how}); restarting in {pause:g} s")

    def _start(self, child: Child) -> None:
        child.restart_at = None
        child.started = time.monotonic()
        child.process = self._spawn(child.arguments, os.environ | child.environment)
        child.reader = threading.Thread(target=self._pump, args=(child.name, child.process), daemon=True)
        child.reader.start()

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops them in order
            preexec_fn=_die_with_parent,
        )

    def _pump(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._say(f"[{name}] {line.rstrip()}")

    def _router(self) -> Child:
        config = self.config
        host, port = self._control.rsplit(":", 1)
        arguments = ["router", "--model", config.model, "--served-model-name", config.name]
        arguments += ["--host", config.host, "--port", str(config.port), "--policy", config.policy]
        arguments += ["--slo", config.slo, "--otlp-endpoint", config.otlp_endpoint, "--keys-file", config.keys_file]
        arguments += ["--prefill-policy", config.prefill_policy, "--decode-policy", config.decode_policy]
        if config.local_prefill_tokens is not None:
            arguments += ["--local-prefill-tokens", str(config.local_prefill_tokens)]
        return Child("router", [*arguments, "--control-host", host, "--control-port", port])

    def _instances(self) -> list[Child]:
        config = self.config
        names = [f"prefill-{i}" for i in range(config.prefill)]
        names += [f"decode-{i}" for i in range(config.decode)]
        names += [f"both-{i}" for i in range(config.both)]
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if config.device in ("auto", "cuda") else 0
        settings = _flags(config)
        if not gpus and config.threads is None:
            settings["threads"] = max(1, len(os.sched_getaffinity(0)) // len(names))
        if gpus and len(names) > gpus:
            settings["gpu_memory_utilization"] = config.gpu_memory_utilization / -(-len(names) // gpus)
        children = []
        for i, name in enumerate(names):
            arguments = [name.split("-")[0], "--instance-id", name, "--router", self._control]
            arguments += ["--connector", self.connector]
            for key, value in settings.items():
                arguments += [f"--{key.replace('_', '-')}", str(value)]
            environment = {"CUDA_VISIBLE_DEVICES": str(i % gpus)} if gpus else {}
            children.append(Child(name, arguments, environment))
        return children


def _port_of_the_system() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_port(but: int = 0, draw: Callable[[], int] = _port_of_the_system) -> int:
    """A TCP port that nothing on 127.0.0.1 uses at the moment, and not `but`, which is spoken for."""
    return next(port for port in iter(draw, 0) if port != but)


def _flags(config: UpConfig) -> dict[str, object]:
    """The instances' settings that differ from their defaults, but for the connector, which may be one of our own."""
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(TransferConfig) if f.name != "connector"}
    return {name: value for name, (value, default) in values.items() if value is not None and value != default}


def _die_with_parent() -> None:
    """In the child: a supervisor that is killed takes its children with it."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
