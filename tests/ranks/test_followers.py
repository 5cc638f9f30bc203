"""Processes of followers: what they answer, and what happens when they end."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pdserve.config import InstanceConfig
from pdserve.engine.memory.kv_memory import KVMemory
from pdserve.errors import SetupError
from pdserve.kernels import reference
from pdserve.keys import Layout
from pdserve.kv_transfer.tickets import join_tickets, ticket_of_rank, tickets_of_rank
from pdserve.ranks.follower import when_done
from pdserve.ranks.followers import FAULT_EXIT_CODE, SETUP_ERROR_EXIT_CODE, Followers
from pdserve.ranks.messages import Failed, OnMemory, Step, decode_command, encode
from pdserve.ranks.rank_config import VISIBLE, config_of_follower, config_of_leader
from pdserve.ranks.runners import _LeadingMemory
from pdserve.ranks.table_changes import pack_ids, unpack_ids

CONFIG = InstanceConfig(tensor_parallel_size=2)


@pytest.fixture
def run_instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Followers]:
    """run_instead("code") → followers that run this code, with `connection`, and the sentences of `on_end` as `ended`."""

    def run(code: str, ended: "queue.Queue[tuple[str, int]]") -> Followers:
        lines = ["import sys, time, socket", "connection = socket.socket(fileno=int(sys.argv[1]))", code]

        def start(descriptor: int, rank: int, port: int) -> "subprocess.Popen[bytes]":
            return subprocess.Popen([sys.executable, "-c", "\n".join(lines), str(descriptor)], pass_fds=[descriptor])

        monkeypatch.setattr("pdserve.ranks.followers.start_process", start)
        return Followers(CONFIG, 0, lambda *end: ended.put(end))

    return run  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("code", "sentence", "exit_code"),
    [
        ("sys.exit(3)", "rank 1 has ended (exit code 3); the instance exits", FAULT_EXIT_CODE),
        ("import os; os.kill(os.getpid(), 9)", "rank 1 has ended (SIGKILL); the instance exits", FAULT_EXIT_CODE),
        ("time.sleep(600)", "rank 1 has not answered for 0.5 s; the instance exits", FAULT_EXIT_CODE),
        (
            f"message = {encode(Failed('no room for KV'))!r}\n"
            "connection.sendall(len(message).to_bytes(4, 'big') + message)\ntime.sleep(600)",
            "rank 1: no room for KV",
            SETUP_ERROR_EXIT_CODE,
        ),
    ],
)
def test_end_of_a_follower(
    code: str, sentence: str, exit_code: int, run_instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "has not answered" in sentence:
        monkeypatch.setattr("pdserve.ranks.followers.START_S", 0.5)
    ended: queue.Queue[tuple[str, int]] = queue.Queue()
    followers = run_instead(code, ended)
    assert ended.get(timeout=600) == (sentence, exit_code)
    followers.kill()


@pytest.mark.slow  # imports torch twice
def test_kernel_kills_a_stopped_follower_with_its_leader() -> None:
    code = """
import time
from pdserve.config import InstanceConfig
from pdserve.ranks.follower import when_done
from pdserve.ranks.followers import Followers
followers = Followers(InstanceConfig(tensor_parallel_size=2), 1)
assert followers._all[0]._connection.poll(600)  # it has set the signal before it reports to be alive
print(followers.pids[0], flush=True)
time.sleep(600)
"""
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    os.kill(follower, signal.SIGSTOP)
    leader.kill()
    leader.communicate()
    deadline = time.monotonic() + 600
    while Path(f"/proc/{follower}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow  # imports torch
def test_a_follower_ends_quietly_with_a_leader_that_has_not_read_its_replies() -> None:
    code = """
import sys
from pdserve.ranks import follower

class WithoutModel:
    def __init__(self, connection, *_):
        self.connection = connection

    def run(self):
        self.connection.send_bytes(b"a reply")
        self.connection.recv_bytes()

follower.Follower = WithoutModel
follower.main(int(sys.argv[1]), 1, 0)
"""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [sys.executable, "-c", code, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    connection = Connection(ours.detach())
    connection.send_bytes(msgspec.json.encode(CONFIG))
    assert connection.poll(600)
    connection.close()
    assert process.communicate(timeout=600)[1] == "" and process.returncode == 0


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "3,0,1,2"), ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", "GPU-d,GPU-a,GPU-b,GPU-c,GPU-e")]
)
def test_a_follower_sees_its_own_gpu_first(visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that move KV begin on the first, where each would make a context of half a gigabyte."""
    monkeypatch.setenv(VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(VISIBLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    leader = config_of_leader(InstanceConfig(device="cuda:1", tensor_parallel_size=3))
    assert leader.device == "cuda:1" and config_of_follower(leader, 2).device == "cuda:0"
    assert os.environ[VISIBLE] == expected
    assert config_of_follower(InstanceConfig(device="cpu", tensor_parallel_size=3), 2).device == "cpu"
    with pytest.raises(SetupError, match="needs as many GPUs, from cuda:2 on; torch finds 4"):
        config_of_leader(InstanceConfig(device="cuda:2", tensor_parallel_size=3))


def test_all_ranks_compile_their_copies_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, compiled = list[Any](), list[str]()
    monkeypatch.setattr(KVMemory, "__init__", lambda *_: None)
    monkeypatch.setattr(KVMemory, "compile_copies", lambda self: compiled.append("own"))
    own: Any = SimpleNamespace(pool_NX=None, host_NX=None)
    others: Any = SimpleNamespace(send=sent.append)
    _LeadingMemory(own, reference, SimpleNamespace(layout=None, spec=None), others).compile_copies()  # type: ignore[arg-type]
    assert compiled == ["own"] and sent == [OnMemory("compile_copies", [])]


def test_messages_survive_the_connection() -> None:
    step = Step(pack_ids([1, 2**31, 7]), [2, 1], [0, 40], [(0, 0, pack_ids([5])), (1, 3, b"")], [1, 2])
    assert decode_command(encode(step)) == step
    assert unpack_ids(step.ids) == [1, 2**31, 7]


def test_tickets_of_ranks() -> None:
    joined = join_tickets([b"a", b"", b"ccc"])
    assert [ticket_of_rank(joined, rank, 3) for rank in range(3)] == [b"a", b"", b"ccc"]
    assert ticket_of_rank(b"whole", 0, 1) == b"whole"
    assert join_tickets([b"", b""]) == b""
    for broken in (b"", b"\xff\xff\xff\xff", joined[:-1], joined + b"x", joined):
        assert tickets_of_rank([broken], 0, 2) == [], "not a ticket of two ranks"


def layout(**fields: Any) -> Layout:
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "block_size": 16}
    return Layout(**{"model_fingerprint": "m", "dtype": "float32", "itemsize": 4, **shape, **fields})


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [(4, 1, [(0, 4)]), (4, 2, [(0, 2), (2, 4)]), (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]), (1, 2, [(0, 1), (0, 1)])],
)
def test_heads_of_ranks(heads: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    layouts = [layout(num_kv_heads=heads, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [(one.heads.start, one.heads.stop) for one in layouts] == expected
    assert len({one.namespace for one in layouts}) == ranks
    assert sum(one.block_bytes for one in layouts) >= layout(num_kv_heads=heads).block_bytes


def test_a_failed_operation_ends_the_follower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 waits for its reply."""
    exits: list[int] = []
    monkeypatch.setattr("pdserve.ranks.follower.os._exit", exits.append)
    monkeypatch.setattr("pdserve.ranks.follower.logging.shutdown", lambda: None)
    failed, done = Future[int](), Future[int]()
    when_done(failed, lambda _: None)
    failed.set_exception(ValueError("no such block"))
    assert exits == [FAULT_EXIT_CODE] and "no such block" in caplog.text
    when_done(done, lambda result: exits.append(result // 0))
    done.set_result(1)
    assert exits == [FAULT_EXIT_CODE] * 2
