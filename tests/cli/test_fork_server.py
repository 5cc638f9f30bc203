"""The preloaded parent of `pdserve up`: what it forks is as what Popen starts, and ends as that does."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.cli import fork_server
from pdserve.cli.fork_server import ForkedProcess, ForkServer, request
from pdserve.cli.supervisor import Child, Supervisor
from tests.waiting import wait_until

DECODE = [
    "decode",
    "--router",
    "127.0.0.1:1",
    "--connector",
    "memory://",
    "--kv-cache-memory",
    "16MiB",
    "--threads",
    "1",
]
UP = f"""
import sys
from pdserve.cli.supervisor import Child, Supervisor
with Supervisor([Child("decode-0", {DECODE})], on_line=lambda line: print(line, flush=True), preload=True) as supervisor:
    print(supervisor._fork_server.process.pid, supervisor.child("decode-0").pid, flush=True)
    sys.stdin.read()
"""


# They start parents that import for seconds. One of test_up.py, of a stop by Ctrl-C, always runs.
pytestmark = [pytest.mark.timeout(600), pytest.mark.until_recorded("pdserve/cli", "pdserve/parent.py")]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with closing(ForkServer()) as server:
        yield server


def run(server: ForkServer, *arguments: str, **environment: str) -> tuple[int, str]:
    process = server.spawn(list(arguments), os.environ | environment)
    assert process.stdout is not None
    with process.stdout as output:
        return process.wait(), output.read()


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def serving(server: ForkServer) -> ForkedProcess:
    process = server.spawn(DECODE, os.environ)
    assert process.stdout is not None
    assert any("not reachable" in line for line in process.stdout)  # so it has its signal handlers
    return process


def test_output_and_exit_codes_are_those_of_the_command(server: ForkServer) -> None:
    import pdserve

    assert run(server, "version") == (0, f"{pdserve.__version__}\n")
    code, output = run(server, "decode", "--model", "nowhere")
    assert code == 2 and output.startswith("pdserve: model 'nowhere'")
    assert run(server, "up", "--both", "0", "--prefill", "0", "--decode", "0")[0] == 2


def test_an_end_is_reported_without_a_signal() -> None:
    """That of the last process may come just before the parent waits, when Python runs no handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # as the parent inherits it
    server = ForkServer()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with closing(server):
        assert server.spawn(["version"], os.environ).wait(timeout=500) == 0


def test_output_may_be_any_bytes() -> None:
    (status, _), (output, printed) = os.pipe(), os.pipe()
    process = ForkedProcess(None, status, output)
    os.write(printed, b"a\xe9b\nmore\n")
    os.close(printed)
    assert process.stdout is not None and [*process.stdout] == ["a\N{REPLACEMENT CHARACTER}b\n", "more\n"]


def test_a_signal_to_a_process_that_has_just_ended() -> None:
    """The server has reaped it, and is about to report its code."""
    ended = subprocess.Popen(["true"])
    assert ended.wait() == 0
    status, written = os.pipe()
    with open(written, "wb", buffering=0) as server:
        server.write(f"{ended.pid}\n".encode())
        process = ForkedProcess(None, status)
        process.send_signal(signal.SIGINT)
        server.write(b"0\n")
        assert process.wait(60) == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_forked_holds_nothing_of_another_request(steps: int) -> None:
    """Else the reader of its output waits for the end of a stranger. Both requests are there when the server looks."""
    code = """
import socket, sys, time
from pdserve.cli.fork_server import Server
loading, *descriptors = map(int, sys.argv[1:])
arguments = Server([socket.socket(fileno=one) for one in descriptors]).wait_for_command(range(loading))
time.sleep(float(arguments[-1]))
"""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    processes = []
    for (ours, _), seconds in zip(pairs, ("3600", "0"), strict=True):
        output, printed = os.pipe()
        light = ["router", "--model", "demo"]
        processes.append(ForkedProcess(None, request(ours, [*light, seconds], {}, printed, printed), output))
        os.close(printed)
    theirs = [one.fileno() for _, one in pairs]
    with subprocess.Popen([sys.executable, "-c", code, str(steps), *map(str, theirs)], pass_fds=theirs) as server:
        for _, one in pairs:
            one.close()
        try:
            assert processes[1].wait(500) == 0 and processes[1].stdout is not None
            assert select.select([processes[1].stdout], [], [], 60)[0], "no end of its output"
        finally:
            processes[0].kill()
            for ours, _ in pairs:
                ours.close()
            server.wait(500)
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()


def test_a_router_that_needs_no_torch_does_not_wait_for_it() -> None:
    with closing(ForkServer()) as server:
        others = [server.spawn(command, os.environ) for command in (["version"], ["router", "--model", "x", "--help"])]
        router = server.spawn(["router", "--help"], os.environ)
        assert router.pid < min(process.pid for process in others), "though it was asked for last"
        assert [process.wait() for process in (router, *others)] == [0, 0, 0]


def test_a_parent_that_was_started_early_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_early", [])
    fork_server.start_early()
    [early] = fork_server._early
    assert fork_server.take() is early and not fork_server._early
    early.close()
    fork_server.start_early()
    [early] = fork_server._early
    with Supervisor([], lambda line: None):
        assert not early.is_running, "without preloading, it is not needed"


def test_the_parent_is_fit_to_fork(server: ForkServer) -> None:
    run(server, "version")
    process = Path(f"/proc/{server.process.pid}")
    assert len(list((process / "task").iterdir())) == 1
    assert sum(os.readlink(one).startswith("socket:") for one in (process / "fd").iterdir()) == 1
    assert (process / "cmdline").read_bytes().rstrip(b"\0").count(b"\0") == 3  # python -m pdserve.cli.fork_server 4


def test_signals_and_titles_are_those_of_a_process_of_its_own(server: ForkServer) -> None:
    process = serving(server)
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert [part.decode() for part in command] == [sys.executable, "-m", "pdserve", *DECODE]
    assert os.getsid(process.pid) == process.pid
    assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # without effect

    process = serving(server)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_arrives_with_the_fork_ends_the_process_at_once(server: ForkServer, number: int) -> None:
    for pause in [0, 0, 0.01, 0.02]:
        process = server.spawn(DECODE, os.environ)
        assert process.pid and process.stdout is not None
        time.sleep(pause)  # it runs as soon as the pid is known
        process.send_signal(number)
        try:
            assert process.wait(60) == 128 + number
            assert "Traceback" not in process.stdout.read()
        finally:
            process.kill()


def test_the_environment_is_that_of_the_request(server: ForkServer) -> None:
    widths = [
        max(map(len, run(server, "health", "--help", COLUMNS=columns)[1].splitlines())) for columns in ("60", "90")
    ]
    assert widths == [60, 90]


def test_a_crashed_child_is_forked_again_and_a_lost_parent_is_replaced() -> None:
    lines: list[str] = []
    with Supervisor([Child("decode-0", DECODE)], lines.append, preload=True) as supervisor:
        child = supervisor.child("decode-0")

        def is_again(pid: int) -> bool:
            supervisor.check_children()
            return child.running and child.pid != pid

        first, parent = child.pid, supervisor._fork_server
        assert parent is not None
        os.kill(first, signal.SIGSEGV)
        wait_until(lambda: is_again(first))
        second = child.pid
        assert supervisor._fork_server is parent and not is_alive(first)
        assert any(line.startswith("[decode-0] exited (SIGSEGV); restarting") for line in lines)
        parent.kill()
        wait_until(lambda: is_again(second))
        assert supervisor._fork_server is not parent and not is_alive(second)
        last = child.pid
    assert not is_alive(last)


def test_it_can_be_stopped_while_it_loads() -> None:
    with Supervisor([Child("decode-0", DECODE)], lambda line: None, preload=True) as supervisor:
        server, process = supervisor._fork_server, supervisor.child("decode-0").process
        assert server is not None and process is not None
    assert server.process.returncode == -signal.SIGKILL and process.pid == 0


def test_it_ends_though_a_fork_of_this_program_has_its_connection() -> None:
    server = ForkServer()
    assert run(server, "version")[0] == 0
    connection = server._connection.fileno()
    with subprocess.Popen(["sleep", "600"], pass_fds=[connection]) as fork:  # as one of multiprocessing's
        server.close()
        assert fork.poll() is None and server.process.returncode == 0
        fork.kill()


def test_it_ends_with_its_supervisor() -> None:
    with subprocess.Popen([sys.executable, "-c", UP], stdin=-1, stdout=-1, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert all(map(is_alive, pids))
        supervisor.kill()
        wait_until(lambda: not any(map(is_alive, pids)))
