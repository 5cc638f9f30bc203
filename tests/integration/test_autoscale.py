"""`pdserve autoscale` beside a real router and paced instances, which sleep for the profiled time instead of computing."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import Deployment, free_port
from pdserve.profile.profile import EngineFacts, Profile, StepModel, TransferModel

Deploy = Callable[..., AbstractContextManager[Deployment]]
PROFILE = Profile(
    model="demo",
    engine=EngineFacts(16, 16384, 1000, 2048, 16, 4096),
    step=StepModel(decode=((1, 0.1), (16, 0.2)), context_s=0.0, prefill=((1, 0.05), (500, 0.6)), pair_s=0.0),
    transfers={"shm": TransferModel(2e-3, 5e8, 2e-3, 5e8, 1e9)},
)


@contextmanager
def sending(url: str, interval_s: float) -> Iterator[None]:
    """Send a prompt of 500 tokens every `interval_s`, without waiting for the answers."""
    stop, threads = threading.Event(), list[threading.Thread]()

    def send(number: int) -> None:
        body = {"model": "demo", "prompt": [number + 3] * 500, "max_tokens": 3, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()

    def run() -> None:
        while not stop.wait(interval_s):
            threads.append(threading.Thread(target=send, args=(len(threads),)))
            threads[-1].start()

    sender = threading.Thread(target=run)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        for thread in (sender, *threads):
            thread.join()


@pytest.fixture
def autoscale(fork_server: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """autoscale("--apply", …) → the process of a controller that decides every second."""
    PROFILE.save(tmp_path / "profile.json")
    flags = ["--profile", str(tmp_path / "profile.json"), "--slo", "ttft.p90=1500ms", "--local-prefill-tokens", "0"]
    flags += ["--interval", "1", "--window", "20", "--horizon", "20", "--cooldown", "2", "--block-size", "16"]
    processes: list[Any] = []

    def start(*more: str) -> Any:
        processes.append(fork_server.spawn(["autoscale", *flags, *more], os.environ))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait() in (0, -signal.SIGKILL)


def roles(url: str, key: str = "") -> dict[str, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    instances = httpx.get(f"{url}/debug/instances", headers=headers).json()["instances"]
    return {one["instance_id"]: "draining" if one["draining"] else one["role"] for one in instances}


def rows(decisions: Path) -> list[dict[str, Any]]:
    """Return the decisions of a file, which is perhaps being written."""
    text = decisions.read_text() if decisions.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.long
def test_a_controller_changes_a_role_another_one_only_watches_and_a_person_is_respected(
    deploy: Deploy, autoscale: Callable[..., Any], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    PROFILE.save(tmp_path / "profile.json")
    with deploy(model="demo", decode=2, paced=str(tmp_path / "profile.json")) as deployment:
        with sending(deployment.url, 0.3):
            decisions = tmp_path / "decisions.jsonl"
            flags = ["--router", deployment.url, "--apply", "--holder", "first", "--decisions", str(decisions)]
            first = autoscale(*flags)
            changed = ["decode", "prefill", "prefill"]
            wait_until(lambda: first.poll() is not None or sorted(roles(deployment.url).values()) == changed)
            second = autoscale("--router", deployment.url, "--apply", "--holder", "second")
            assert second.stdout is not None and first.stdout is not None
            line = next(line for line in second.stdout if "watches" in line)
            assert "it only watches: the controller first holds the lease" in line
            settled = {"prefill": 2, "decode": 1}
            wait_until(lambda: first.poll() is not None or rows(decisions)[-1]["fleet"] == settled)
            by_hand = next(name for name, role in roles(deployment.url).items() if name[0] == "d" and role == "prefill")
            order = f"{deployment.url}/admin/instances/{by_hand}/role"
            httpx.post(order, json={"role": "decode"}).raise_for_status()
            noticed = "because others changed the fleet, which was 1 decode, 2 prefill"
            wait_until(lambda: first.poll() is not None or noticed in decisions.read_text())
        events = httpx.get(f"{deployment.url}/debug/overview").json()["events"]
        shown = [event["text"] for event in events if event["event"] == "autoscaler"]
        assert any("1 decode to prefill: TTFT p90" in text for text in shown), shown
        assert "1P+2D: 1 decode to prefill: " in next(line for line in first.stdout if "decode to prefill" in line)
        assert not any(row["error"] for row in httpx.get(f"{deployment.url}/debug/requests").json()["requests"])


@pytest.mark.long
def test_a_controller_that_is_killed_in_mid_flip_leaves_it_to_the_next(
    deploy: Deploy, autoscale: Callable[..., Any], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """Decode instances are stopped for a while, so that the drain lasts until a second controller is there."""
    PROFILE.save(tmp_path / "profile.json")
    earlier, later = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    with deploy(model="demo", decode=2, paced=str(tmp_path / "profile.json")) as deployment:
        flags = ["--router", deployment.url, "--apply"]
        stopped = [child.pid for child in deployment.children if child.name.startswith("decode")]
        with sending(deployment.url, 0.3):
            try:
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                first = autoscale(*flags, "--holder", "first", "--decisions", str(earlier))
                wait_until(lambda: first.poll() is not None or "draining" in roles(deployment.url).values())
                os.kill(first.pid, signal.SIGKILL)
                second = autoscale(*flags, "--holder", "second", "--decisions", str(later))
                wait_until(lambda: second.poll() is not None or len(rows(later)) >= 3)
                assert all("drains" in row["reason"] and not row["change"] for row in rows(later)), rows(later)
                assert sorted(roles(deployment.url).values()) == ["decode", "draining", "prefill"]
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            wait_until(lambda: sorted(roles(deployment.url).values()) == ["decode", "prefill", "prefill"])
            wait_until(lambda: second.poll() is not None or rows(later)[-1]["fleet"] == {"prefill": 2, "decode": 1})
        flipping = [row for row in rows(later) if row["fleet"] != {"prefill": 2, "decode": 1}]
        assert not any(row["change"] for row in flipping), flipping
        assert not any(row["error"] for row in httpx.get(f"{deployment.url}/debug/requests").json()["requests"])


@pytest.mark.slow
def test_up_starts_and_ends_instances_by_itself(
    fork_server: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    PROFILE.save(tmp_path / "profile.json")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--model", "demo", "--paced", str(tmp_path / "profile.json"), "--port", str(port)]
    flags += [
        "--local-prefill-tokens",
        "0",
        "--autoscale",
        "ttft.p90=1500ms",
        "--admin-key",  # by which the controller would be refused
        "secret",
        "--max-instances",
        "3",
        "--kv-cache-memory",
        "128MiB",
        "--threads",
        "1",
    ]
    process = fork_server.spawn(["up", *flags], os.environ)
    lines = list[str]()
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    wait_until(lambda: process.poll() is not None or any("ready on" in line for line in lines), lines)
    with sending(url, 0.4):
        wait_until(lambda: process.poll() is not None or len(roles(url, "secret")) == 3, lines)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert any("1P+1D: start 1 prefill: TTFT p90 " in line for line in lines), lines


def test_a_wrong_setting_of_the_controller_is_said_at_once(pdserve: Callable[..., Any]) -> None:
    done = pdserve("up", "--autoscale", "ttft.p90=1s")
    assert done.returncode == 2 and "--autoscale needs the --profile" in done.stderr
    done = pdserve("autoscale", "--slo", "ttft.p90=1s", "--profile", "/nowhere.json")
    assert done.returncode == 2 and "/nowhere.json cannot be read" in done.stderr
    done = pdserve("autoscale", "--slo", "ttft.p90=1s", "--launcher", "compose")
    assert done.returncode == 2 and "is not such as compose://" in done.stderr
