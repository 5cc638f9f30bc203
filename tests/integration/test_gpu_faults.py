"""A GPU that fails or cannot run a kernel: one sentence, no restart loop at start, and streams that go on elsewhere.

The failures are faked, in real processes: no GPU has run this.
"""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.kv_transfer.connectors.shm.connector import unlink

PROMPTS = [[i, 7, 9] * 12 for i in range(4)]
TOKENS = 200


@pytest.fixture
def failing_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_connectors: Callable[..., None]
) -> Iterator[tuple[str, Path]]:
    """URL of the connector, and the folder of its marks."""
    install_connectors(
        tmp_path, "pdserve_failing_gpu", Path(__file__).parent / "failing_gpu.py", {"gpu+shm": "OnFailingGPU"}
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    name = f"shm://test-{uuid.uuid4().hex}"
    yield f"gpu+{name}?size=64MiB&timeout=600&marks={tmp_path}", tmp_path
    unlink(name)


def test_an_instance_whose_gpu_fails_ends_with_one_sentence_and_its_streams_move(
    failing_gpu: tuple[str, Path],
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    deploy: Callable[..., Any],
    complete_all: Callable[..., list[list[int]]],
    wait_until: Callable[..., None],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    (url, marks), path = failing_gpu, checkpoint("llama")
    expected, lines = generate(path, PROMPTS, TOKENS), list[str]()
    with (
        deploy(model=str(path), connector=url, num_blocks=256, log_lines=lines) as deployment,
        ThreadPoolExecutor(1) as thread,
    ):
        victim = deployment.child("decode-0")
        found = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
        assert {one["kernel"] for one in found} == {"cpu"}
        send = lambda: [thread.submit(complete_all, deployment, PROMPTS, max_tokens=TOKENS)]  # noqa: E731
        [answers] = stop_busy(deployment, "decode-0", send)
        (marks / f"failed.{victim.pid}").touch()
        os.kill(victim.pid, signal.SIGCONT)
        assert answers.result(600) == expected
        wait_until(lambda: not victim.running, "it has ended")
        deployment.check_children()
        wait_until(lambda: any("restarting" in line for line in lines), "it is to be restarted")
    of_victim = [line for line in lines if line.startswith("[decode-0]")]
    assert (
        sum("the GPU failed (CUDA error: an illegal memory access was encountered)" in line for line in of_victim) == 1
    )
    assert any("exited (exit code 70)" in line for line in of_victim)
    assert sum("decode-0 joined" in line for line in lines) == 1
    assert any("decode-0 left: its engine has failed" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_a_gpu_that_cannot_run_a_kernel_is_a_start_up_error(
    failing_gpu: tuple[str, Path], checkpoint: Callable[..., Path], pdserve: Callable[..., Any]
) -> None:
    (url, marks), path = failing_gpu, checkpoint("llama")
    (marks / "too-small").touch()
    result = pdserve("decode", "--model", str(path), "--num-blocks", "32", "--connector", url)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("pdserve: ")]
    assert "a kernel needs more than this GPU has" in line and "Required: 114944" in line
