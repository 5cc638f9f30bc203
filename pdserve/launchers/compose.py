"""Launcher for the Compose files: an instance is one container of the service `prefill` or `decode`.

An instance that is not given a name calls itself role-host-pid, and a container's host name is its short id. So the id of an
instance names its container, also after a change of role.
"""

import json
import logging
import re
import shlex
import subprocess
import threading
from itertools import count
from typing import Any

from pdserve.errors import SetupError

log = logging.getLogger(__name__)

PROJECT_LABEL, SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
NUMBER_LABEL = "com.docker.compose.container-number"
COMMAND_TIMEOUT_S = 300.0  # an engine that hangs must not hold the controller for ever; an image may have to be pulled


class ComposeLauncher:
    """Starts and stops containers of a Compose project that is up.

    Compose reads its variables from the environment of this process and the `.env` beside the file, as it did for `up`.

    Args:
        file: Compose file of the project.
        project: name of the project.
        compose: command of Compose, such as `docker compose` or `podman-compose`.
        engine: command of the container engine, `docker` or `podman`.
        grace_s: seconds between SIGTERM and SIGKILL; more than an instance's --drain-seconds.
    """

    def __init__(
        self,
        file: str = "docker-compose.yml",
        project: str = "pdserve",
        compose: str = "docker compose",
        engine: str = "docker",
        grace_s: int = 30,
    ) -> None:
        self._compose = [*shlex.split(compose), "-p", project, "-f", file]
        self._engine = shlex.split(engine)
        self._project = project
        self._grace_s = grace_s
        self._stopping: set[str] = set()
        self._scaling = threading.Lock()  # `up` would start a container again that has exited and is not removed yet

    def start(self, role: str) -> None:
        """Start one more container of the role's service, without touching any other container.

        Raises:
            SetupError: the project is not up, or Compose fails, as for a role for which the file has no service.
        """
        with self._scaling:
            labels = [one["Config"]["Labels"] for one in self._containers()]
            if not labels:
                raise SetupError(f"the Compose project {self._project} is not up")
            numbers = [int(one[NUMBER_LABEL]) for one in labels if one[SERVICE_LABEL] == role]
            scale = f"{role}={self._scale(numbers)}"
            _run([*self._compose, "up", "-d", "--no-deps", "--no-recreate", "--no-build", "--scale", scale, role])

    def stop(self, instance_id: str) -> None:
        """Let the container of an instance drain and exit within the grace time, and then remove it.

        Raises:
            SetupError: no container runs this instance.
        """
        names = {one["Config"]["Hostname"]: one["Id"] for one in self._containers()}
        container = next((names[host] for host in names if re.search(rf"-{re.escape(host)}-\d+$", instance_id)), None)
        if container is None:
            raise SetupError(f"no container of the Compose project {self._project} runs an instance {instance_id!r}")
        if container not in self._stopping:
            self._stopping.add(container)
            threading.Thread(target=self._remove, args=(container, instance_id), name=instance_id).start()

    def _remove(self, container: str, instance_id: str) -> None:
        try:
            _run([*self._engine, "stop", "-t", str(self._grace_s), container], self._grace_s + COMMAND_TIMEOUT_S)
            with self._scaling:
                _run([*self._engine, "rm", "-f", container])
        except SetupError as error:
            log.warning("%s was not removed: %s", instance_id, error)
        finally:
            self._stopping.discard(container)

    def _containers(self) -> list[dict[str, Any]]:
        """Return the state of each container of the project, those that have exited included."""
        ids = _run([*self._engine, "ps", "-a", "-q", "--filter", f"label={PROJECT_LABEL}={self._project}"]).split()
        found: list[dict[str, Any]] = json.loads(_run([*self._engine, "inspect", *ids])) if ids else []
        return found

    def _scale(self, numbers: list[int]) -> int:
        """Return the scale that adds one container to those with these numbers.

        Compose counts containers. podman-compose creates those that are missing of the numbers up to the scale.
        """
        if "podman-compose" in _run([*self._compose, "version"]):
            return next(number for number in count(1) if number not in numbers)
        return len(numbers) + 1


def _run(command: list[str], timeout_s: float | None = None) -> str:
    """Return what a command prints.

    Raises:
        SetupError: it cannot be run, does not end in time, or fails; with the last line of its errors.
    """
    timeout_s = COMMAND_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout
    except OSError as error:
        raise SetupError(f"{shlex.join(command)}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{shlex.join(command)}: it has not ended within {timeout_s:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise SetupError(f"{shlex.join(command)}: {lines[-1]}") from error
