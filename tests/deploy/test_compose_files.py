"""The Compose files agree with the image and the command line. No GPU has run docker-compose.yml."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def services(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text())["services"]


def test_stores_of_the_two_files() -> None:
    """Shared memory between the GPUs of a host, which the base file mounts; Redis without GPUs, and as the choice."""
    cpu, gpu = services("docker-compose.cpu.yml"), services("docker-compose.yml")
    for role in ("prefill", "decode"):
        assert cpu[role]["environment"]["PDSERVE_CONNECTOR"] == "${CONNECTOR:-redis://redis:6379/0}"
        assert gpu[role]["environment"]["PDSERVE_CONNECTOR"].startswith("${CONNECTOR:-shm://")
        assert "--connector" not in cpu[role]["command"], "a flag would win over the variable"
        assert any(volume.startswith("shm:/dev/shm") for volume in cpu[role]["volumes"])


def test_each_pool_has_gpus_and_a_number_of_them_per_instance() -> None:
    """Each service passes its list of GPUs and its number of ranks to the entry point, and reserves all GPUs."""
    for role in ("prefill", "decode"):
        service = services("docker-compose.yml")[role]
        assert service["environment"]["GPUS"].startswith(f"${{{role.upper()}_GPUS:-")
        assert service["environment"]["TENSOR_PARALLEL_SIZE"] == f"${{{role.upper()}_TENSOR_PARALLEL_SIZE:-1}}"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"


def test_compiled_kernels_are_kept_in_a_volume_that_the_user_of_the_image_may_write() -> None:
    image = (ROOT / "Dockerfile").read_text()
    folders = re.findall(r"(?:TRITON|TORCHINDUCTOR)_CACHE_DIR=(\S+)", image)
    assert len(folders) == 2
    for role in ("prefill", "decode"):
        mounted = [volume.partition(":")[2] for volume in services("docker-compose.yml")[role]["volumes"]]
        assert all(any(folder.startswith(f"{mount}/") for mount in mounted) for folder in folders)
    owned = re.search(r"install -d -o pdserve -g pdserve (.*)", image)
    assert owned is not None and "/cache" in owned[1].split()


@pytest.mark.parametrize("gpus", ["GPU-a,GPU-b", "MIG-GPU-a/1/0,MIG-GPU-a/2/0"])
def test_containers_take_gpus_and_slices_in_turn(gpus: str, tmp_path: Path) -> None:
    """Two run at a time and see one each, by any id of CUDA; a third finds none."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "pdserve").write_text("#!/bin/sh\necho $CUDA_VISIBLE_DEVICES; exec sleep 60\n")
    (tmp_path / "pdserve").chmod(0o755)
    script = tmp_path / "entrypoint"
    script.write_text((ROOT / "scripts/entrypoint").read_text().replace("/run/gpus", str(tmp_path / "locks")))
    environment = {"GPUS": gpus, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    running = []
    try:
        for expected in gpus.split(","):
            running.append(
                subprocess.Popen(["sh", str(script), "decode"], env=environment, stdout=subprocess.PIPE, text=True)
            )
            assert running[-1].stdout is not None
            assert running[-1].stdout.readline().strip() == expected
        third = subprocess.run(
            ["sh", str(script), "decode"], env=environment, capture_output=True, text=True, check=False
        )
        assert third.returncode == 2 and "every GPU" in third.stderr
    finally:
        for process in running:
            process.kill()
            process.communicate()
