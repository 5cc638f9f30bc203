"""Instances with several ranks (--tensor-parallel-size): identity, hand-overs between different degrees, and lost ranks."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import free_port
from pdserve.counters import series

Complete = Callable[..., dict[str, Any]]
CompleteAll = Callable[..., list[list[int]]]
Deploy = Callable[..., Any]
Generate = Callable[..., list[list[int]]]
Metric = Callable[..., float]
WaitUntil = Callable[..., None]

TWO = ["--tensor-parallel-size", "2"]
FOUR = ["--tensor-parallel-size", "4"]
ARCHITECTURES = ("llama", "qwen3", "gemma3", "olmo2", "qwen3_moe")
STORES = ("shm", "file", "redis")
OTHERS = [  # than llama over shm
    pytest.param(architecture, store, TWO, TWO, marks=pytest.mark.slow)
    for architecture in ARCHITECTURES
    for store in STORES
    if (architecture, store) != ("llama", "shm")
]


def follower_of(name: str, log_lines: list[str]) -> int:
    """Return the process id of the latest rank 1 of an instance."""
    pattern = re.compile(rf"\[{name}\] .*started ranks 1 to 1 in processes (\d+)")
    return int([match[1] for line in log_lines if (match := pattern.search(line))][-1])


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("architecture", "connector_url", "prefill", "decode"),
    [
        ("llama", "shm", TWO, TWO),
        *OTHERS,
        pytest.param("llama", "shm", [], TWO, marks=pytest.mark.slow),
        pytest.param("llama", "redis", TWO, [], marks=pytest.mark.slow),
        pytest.param("llama", "tiered", TWO, TWO, marks=pytest.mark.slow),
        pytest.param("llama", "nixl", TWO, TWO, marks=pytest.mark.slow),
        pytest.param("llama", "nixl", TWO, [], marks=pytest.mark.slow),
        pytest.param("llama", "shm?codec=lz4", TWO, TWO, marks=pytest.mark.slow),
        pytest.param("llama", "shm", FOUR, TWO, marks=pytest.mark.slow),
        pytest.param("llama", "file", [*TWO, "--block-size", "32"], [], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "shm", TWO, TWO, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "file", [], TWO, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "redis", TWO, [], marks=pytest.mark.slow),
    ],
    indirect=["connector_url"],
)
def test_tokens_equal_transformers(
    architecture: str,
    connector_url: str,
    prefill: list[str],
    decode: list[str],
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    deploy: Deploy,
    loads_all_kv: Callable[..., None],
) -> None:
    path, some, log_lines = checkpoint(architecture), prompts[:10], list[str]()
    settings = {"model": str(path), "connector": connector_url, "num_blocks": 512, "max_num_batched_tokens": 256}
    flags = {"prefill": prefill, "decode": [*decode, "--convert-kv"]}
    with deploy(flags=flags, log_lines=log_lines, **settings) as deployment:
        loads_all_kv(deployment, some, generate(path, some, 32), has_window=architecture == "gemma3")
        shown = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
        assert {one["role"]: one["ranks"] for one in shown} == {
            "prefill": int(prefill[1]) if prefill else 1,
            "decode": int(decode[1]) if decode else 1,
        }
        followers = [int(pid) for line in log_lines for pid in re.findall(r"in processes (\d+)", line)]
        assert followers
    assert all(map(has_ended, followers))


@pytest.mark.slow
@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_preemption_changes_no_token(
    swap_space: float,
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    deploy: Deploy,
    complete_all: CompleteAll,
    metric: Metric,
    wait_until: WaitUntil,
) -> None:
    path, some = checkpoint("llama"), [prompt for prompt in prompts if 30 < len(prompt) <= 100]
    tight = {"num_blocks": 24, "swap_space": swap_space}
    with deploy(model=str(path), tensor_parallel_size=2, max_num_batched_tokens=64, **tight) as deployment:
        for _ in ("cold", "with warm caches"):
            assert complete_all(deployment, some) == generate(path, some, 32)
        wait_until(lambda: metric(deployment, "num_preemptions_total", role="decode") > 0)
        if swap_space:
            wait_until(lambda: metric(deployment, "swapped_blocks_total", direction="in") > 0)


@pytest.mark.parametrize(("prefill", "decode", "moves"), [([1], [2], False), ([2], [1], False), ([1], [2, 1], True)])
def test_hand_overs_between_degrees(
    prefill: list[int],
    decode: list[int],
    moves: bool,
    checkpoint: Callable[..., Path],
    generate: Generate,
    load_test_module: Callable[[str], Any],
    fork_server: Any,
    shm_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and streams move between instances with one and with two ranks, driven in this process by a real dispatcher."""
    monkeypatch.setattr("pdserve.ranks.followers.start_process", fork_server.start_follower)
    driver = load_test_module("integration/test_moves")
    degrees = {f"prefill-{i}": ranks for i, ranks in enumerate(prefill)}
    degrees |= {f"decode-{i}": ranks for i, ranks in enumerate(decode)}
    path = checkpoint("llama")
    instances = [driver.LocalInstance(name, path, shm_url, ranks) for name, ranks in degrees.items()]
    requests = driver.requests(instances)
    migrate_at = driver.random_migrations(random.Random(11), len(requests)) if moves else [[] for _ in requests]
    num_migrations = [len(due) for due in migrate_at]
    states = driver.serve(instances, "round_robin", migrate_at)
    greedy = [request.prompt for request in requests if request.sampling.temperature == 0]
    assert [state.emitted for state in states][::2] == generate(path, greedy, driver.TOKENS)
    assert [len(state.timeline.migrations) for state in states] == num_migrations
    assert {state.timeline.error for state in states} == {""}
    if not moves:
        sources = instances[-1].instance.reporter.counts
        assert sources[series("prompt_tokens_by_source", source="loaded")] == sum(len(one.prompt) for one in requests)
    for instance in instances:
        instance.instance.close()
        if (group := instance.instance.engine.checkpoint.group) is not None:
            group.close()


@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
def test_different_degrees_need_convert_kv(
    connector_url: str, checkpoint: Callable[..., Path], deploy: Deploy, wait_until: WaitUntil
) -> None:
    log_lines: list[str] = []
    settings = {"model": str(checkpoint("llama", dtype="float32")), "connector": connector_url, "num_blocks": 64}
    with deploy(flags={"prefill": TWO}, log_lines=log_lines, wait=False, **settings):
        sentence = "prefill-0 has KV blocks of 16 tokens in float32 on 2 ranks, decode-0 of 16 tokens in float32; make"
        wait_until(lambda: any(sentence in line for line in log_lines), log_lines)


@pytest.mark.parametrize(
    ("victim", "signum"),
    [
        ("follower", signal.SIGKILL),
        pytest.param("leader", signal.SIGKILL, marks=pytest.mark.until_recorded("pdserve/ranks")),
        pytest.param("follower", signal.SIGSTOP, marks=pytest.mark.slow),  # waits for HANG_S
    ],
)
def test_streams_migrate_when_a_rank_is_lost(
    victim: str,
    signum: signal.Signals,
    checkpoint: Callable[..., Path],
    deploy: Deploy,
    complete: Complete,
    wait_until: WaitUntil,
    metric: Callable[..., float],
    stop_busy: Callable[..., list[Future[Any]]],
) -> None:
    """A killed or hung follower ends its leader, and followers end with a killed leader. No stream notices."""
    prompts, log_lines = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(6)], list[str]()
    settings = {"model": str(checkpoint("llama")), "num_blocks": 256, "decode": 2, "policy": "round_robin"}
    with (
        deploy(log_lines=log_lines, tensor_parallel_size=2, **settings) as deployment,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):

        def send(prompt: list[int]) -> list[int]:
            reply = complete(deployment, prompt=prompt, max_tokens=120, ignore_eos=True)
            ids: list[int] = reply["choices"][0]["token_ids"]
            return ids

        expected = list(threads.map(send, prompts))
        futures = stop_busy(deployment, "decode-1", lambda: [threads.submit(send, prompt) for prompt in prompts])
        leader, follower = deployment.child("decode-1").pid, follower_of("decode-1", log_lines)
        os.kill(follower if victim == "follower" else leader, signum)
        os.kill(leader, signal.SIGCONT)
        assert [future.result(600) for future in futures] == expected
        wait_until(lambda: has_ended(leader), "the leader has ended")
        if signum == signal.SIGSTOP:  # the kernel kills followers that the leader has started itself
            os.kill(follower, signal.SIGKILL)
        wait_until(lambda: has_ended(follower), "the follower has ended")
        assert metric(deployment, "migrations_total", kind="instance_lost") >= 2
        assert send(prompts[0]) == expected[0], "the others serve"


def test_role_changes_and_drains(
    checkpoint: Callable[..., Path],
    generate: Generate,
    prompts: list[list[int]],
    deploy: Deploy,
    complete_all: CompleteAll,
    pdserve: Callable[..., Any],
) -> None:
    path, some = checkpoint("llama"), prompts[:9]
    expected = generate(path, some, 32)
    with deploy(model=str(path), tensor_parallel_size=2, num_blocks=256, prefill=2) as deployment:
        assert complete_all(deployment, some) == expected
        changed = pdserve("role", "prefill-1", "decode", "--router", deployment.url)
        assert changed.returncode == 0, changed.stderr
        assert complete_all(deployment, some) == expected
        leader = deployment.child("decode-0")
        os.kill(leader.pid, signal.SIGTERM)
        assert leader.process.wait(600) == 0
        assert complete_all(deployment, some) == expected


def open_sockets(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets that processes have."""
    links = [os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}


@pytest.mark.slow  # all processes import torch
def test_up_by_command_line_and_what_it_leaves() -> None:
    """Both instances have two ranks, as /debug/instances shows. Ctrl-C leaves no process, no segment and no socket."""
    port, pids = free_port(), list[int]()
    command = [sys.executable, "-m", "pdserve", "up", *TWO, "--prefill", "1", "--decode", "1", "--port", str(port)]
    command += ["--num-blocks", "256", "--local-prefill-tokens", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        pids += [int(pid) for pid in re.findall(r"in processes (\d+)", line)]
        if "ready on" in line:
            break
    url = f"http://127.0.0.1:{port}"
    shown = httpx.get(f"{url}/debug/instances").json()["instances"]
    assert [one["ranks"] for one in shown] == [2, 2] and len(pids) == 2
    question = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=question, timeout=600)
    assert "Paris" in reply.json()["choices"][0]["text"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids += [process.pid, *map(int, children)]
    sockets = open_sockets(pids)
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 0, process.stdout.read()
    assert len(pids) == 6 and all(map(has_ended, pids))
    assert not list(Path("/dev/shm").glob(f"pdserve-up-{process.pid}*"))
    listed = {word for name in ("tcp", "unix") for word in Path(f"/proc/net/{name}").read_text().split()}
    assert sockets and not sockets & listed


def test_start_up_errors_are_one_sentence(pdserve: Callable[..., Any], checkpoint: Callable[..., Path]) -> None:
    result = pdserve("decode", "--model", str(checkpoint("llama")), "--tensor-parallel-size", "3", "--num-blocks", "64")
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("pdserve: ")]
    assert "LlamaForCausalLM is not supported with --tensor-parallel-size 3: neither divides 3 its 2 KV heads" in line
    assert "Traceback" not in result.stderr
