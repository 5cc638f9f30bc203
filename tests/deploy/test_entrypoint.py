"""The image's entry point: each container of a pool gets GPUs that no other one of its role has."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "scripts" / "entrypoint"


class Containers:
    """Processes of the entry point, with a `pdserve` that prints its arguments and GPUs, and runs until it is killed."""

    def __init__(self, folder: Path) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._folder = folder
        (folder / "locks").mkdir()
        (folder / "pdserve").write_text('#!/bin/sh\necho "$@ on ${CUDA_VISIBLE_DEVICES:-none}"\nexec sleep 600\n')
        (folder / "pdserve").chmod(0o755)

    def start(self, role: str, **variables: str) -> str:
        """Return the first line that a new container prints on stdout, or its error."""
        environment = os.environ | {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "GPU_LOCKS": f"{self._folder}/locks",
        }
        process = subprocess.Popen(
            ["sh", str(ENTRYPOINT), role],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        assert process.stdout is not None and process.stderr is not None
        return process.stdout.readline().strip() or process.stderr.read().strip()

    def stop(self, number: int) -> None:
        process = self._running[number]
        process.kill()
        process.communicate()

    def stop_all(self) -> None:
        for number in range(len(self._running)):
            self.stop(number)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    containers = Containers(tmp_path)
    yield containers
    containers.stop_all()


def test_one_gpu_each(containers: Containers) -> None:
    assert containers.start("decode", GPUS="1,2", FLAGS="--dtype bfloat16") == "decode --dtype bfloat16 on 1"
    assert containers.start("decode", GPUS="1,2") == "decode on 2"
    assert containers.start("prefill", GPUS="1,2") == "prefill on 1", "pools may share GPUs"
    assert containers.start("decode", GPUS="1,2").startswith("decode: every GPU of 1,2 is in use by another instance")
    containers.stop(0)
    assert containers.start("decode", GPUS="1,2") == "decode on 1", "the lock ends with its process"


def test_a_secret_in_a_file_wins_over_its_variable(containers: Containers, tmp_path: Path) -> None:
    printed = '#!/bin/sh\necho "$PDSERVE_API_KEY $PDSERVE_ADMIN_KEY $REDIS_PASSWORD"\nexec sleep 600\n'
    (tmp_path / "pdserve").write_text(printed)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "api-key").write_text("sk-one,sk-two\n")
    (tmp_path / "secrets" / "redis-password").write_text("word")
    variables = {"PDSERVE_API_KEY": "sk-old", "PDSERVE_ADMIN_KEY": "adm", "SECRETS_FOLDER": str(tmp_path / "secrets")}
    assert containers.start("router", **variables) == "sk-one,sk-two adm word"
    (tmp_path / "secrets" / "admin-key").mkdir()
    refused = containers.start("router", **variables)
    assert f"cannot read {tmp_path}/secrets/admin-key" in refused and "chmod" in refused


def test_several_gpus_each(containers: Containers) -> None:
    variables = {"GPUS": "0,1,2,3,4", "TENSOR_PARALLEL_SIZE": "2"}
    assert containers.start("decode", **variables) == "decode --tensor-parallel-size 2 on 0,1"
    assert containers.start("decode", **variables) == "decode --tensor-parallel-size 2 on 2,3"
    assert "every GPU of 0,1,2,3,4 is in use" in containers.start("decode", **variables)


def test_without_gpus(containers: Containers) -> None:
    assert containers.start("router") == "router on none"
    assert containers.start("decode", TENSOR_PARALLEL_SIZE="2") == "decode --tensor-parallel-size 2 on none"
