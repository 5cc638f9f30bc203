"""ComposeLauncher with a fake of Compose and of the container engine; scripts/compose-check runs it with real ones."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import SetupError
from pdserve.launchers.compose import ComposeLauncher

# Logs its arguments. `ps` and `inspect` report the containers of containers.json, `version` the contents of `version`.
FAKE = """#!/bin/sh
cd "$(dirname "$0")"
echo "$(basename "$0") $*" >>log
case "$*" in
  ps*) echo some ids ;;
  inspect*) cat containers.json ;;
  *version) cat version ;;
  "rm -f"*) rm -f containers.json; echo '[]' >containers.json ;;
  *"--scale both"*) echo "a warning" >&2; echo "no such service: both" >&2; exit 1 ;;
esac
"""

Make = Callable[..., tuple[ComposeLauncher, Callable[[], list[str]]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(("decode", 1, "c0ffee"), …) → a launcher of these containers, and a function that returns the log."""

    def make(*containers: tuple[str, int, str], version: str = "Docker Compose version v2") -> object:
        found = [
            {
                "Id": f"{host}0123456789",
                "Config": {
                    "Hostname": host,
                    "Labels": {"com.docker.compose.service": role, "com.docker.compose.container-number": str(number)},
                },
            }
            for role, number, host in containers
        ]
        (tmp_path / "containers.json").write_text(json.dumps(found))
        (tmp_path / "version").write_text(version)
        for name in ("compose", "engine"):
            (tmp_path / name).write_text(FAKE)
            os.chmod(tmp_path / name, 0o755)
        launcher = ComposeLauncher(
            "cpu.yml", "mine", compose=f"{tmp_path}/compose --verbose", engine=f"{tmp_path}/engine", grace_s=45
        )
        return launcher, lambda: (tmp_path / "log").read_text().splitlines()

    return make  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("version", "scale"),
    [("Docker Compose version v2", 3), ("podman-compose version 1.6.0", 2)],
    ids=["by count", "by number"],
)
def test_one_container_is_added_where_one_of_them_is_gone(make: Make, version: str, scale: int) -> None:
    launcher, log = make(("decode", 1, "aa"), ("decode", 3, "bb"), ("prefill", 1, "cc"), version=version)
    launcher.start("decode")
    up = "compose --verbose -p mine -f cpu.yml up -d --no-deps --no-recreate --no-build"
    assert log()[-1] == f"{up} --scale decode={scale} decode"
    assert log()[0] == "engine ps -a -q --filter label=com.docker.compose.project=mine"


def test_a_role_can_be_scaled_up_from_none(make: Make) -> None:
    launcher, log = make(("router", 1, "aa"))
    launcher.start("prefill")
    assert log()[-1].endswith("--scale prefill=1 prefill")


def test_the_container_of_an_instance_is_stopped_and_removed(make: Make) -> None:
    launcher, log = make(("decode", 1, "aa11"), ("decode", 2, "bb22"))
    launcher.stop("decode-bb22-1")
    for thread in threading.enumerate():
        if thread.name == "decode-bb22-1":
            thread.join()
    assert log()[-2:] == ["engine stop -t 45 bb220123456789", "engine rm -f bb220123456789"]


def test_errors_are_one_line(make: Make, tmp_path: Path) -> None:
    launcher, _ = make(("decode", 1, "aa11"))
    with pytest.raises(SetupError, match=r"--scale both=1 both: no such service: both$"):
        launcher.start("both")
    for name in ("decode-aa1-1", "decode-0", "decode-caa11-1"):
        with pytest.raises(SetupError, match=f"no container of the Compose project mine runs an instance '{name}'"):
            launcher.stop(name)
    launcher, _ = make()
    with pytest.raises(SetupError, match="the Compose project mine is not up"):
        launcher.start("decode")
    missing = ComposeLauncher(engine=f"{tmp_path}/none")
    with pytest.raises(SetupError, match=r"none ps -a -q .*: No such file or directory"):
        missing.start("decode")


def test_an_engine_that_hangs_is_given_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, _ = make(("decode", 1, "aa11"))
    (tmp_path / "engine").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("pdserve.launchers.compose.COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(SetupError, match=r"engine ps -a -q .*: it has not ended within 0\.2 s$"):
        launcher.start("decode")
