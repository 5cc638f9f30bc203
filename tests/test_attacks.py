"""The attacks of scripts/attacking are judged: by what a server does, but not by what their own client could not do."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
ATTACK = """
import sys
sys.path.insert(0, sys.argv[1])
from attacking.judge import Attacks
with Attacks(sys.argv[2], 1) as attacks:
    attacks.attack("foreign pages")
print(dict(attacks.judged), dict(attacks.unjudged))
"""


@pytest.fixture(scope="session")
def attacks() -> ModuleType:
    """The module attacking.judge (scripts/ is not a package)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        from attacking import judge

        return judge


@contextmanager
def server(on_request: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve connections one by one, in place of a router, and yield the URL; each is closed after `on_request`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # closed
                with connection:
                    if connection.recv(65536):
                        on_request(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 Internal Server Error\r\n\r\n"])
def test_a_server_that_is_at_fault(attacks: ModuleType, answer: bytes) -> None:
    with server(lambda connection: connection.sendall(answer)) as url, attacks.Attacks(url, 1) as attacking:
        with pytest.raises(RuntimeError, match="foreign pages: "):
            for _ in range(100):  # on a slow machine, some are not judged
                attacking.attack("foreign pages")
        assert not attacking.judged


def test_an_attack_whose_client_was_stalled() -> None:
    client: subprocess.Popen[str] | None = None

    def stall_client(connection: socket.socket) -> None:
        assert client is not None
        os.kill(client.pid, signal.SIGSTOP)
        threading.Event().wait(3)
        connection.close()
        os.kill(client.pid, signal.SIGCONT)

    with server(stall_client) as url:
        command = [sys.executable, "-c", ATTACK, str(SCRIPTS), url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            output, _ = client.communicate(timeout=600)
    assert output == "{} {'foreign pages': 1}\n"


def test_effects_are_judged(attacks: ModuleType) -> None:
    """By wrong and lost answers, by the innocent client's tails compared with the control's, and by the routers' memory."""
    from attacking.effects import Arm, judge  # on the path while the fixture `attacks` lives

    times = [0.01] * 50
    control = Arm(ttft_s=times, e2e_s=times)
    assert judge(Arm(ttft_s=times, e2e_s=times), control) == []
    late = [*times[1:], 0.1]
    assert judge(Arm(ttft_s=late, e2e_s=times, memory_mib=301.0), control) == [
        "ttft p99 is 5.59 times the control's",
        "a router grew by 301 MiB",
    ]
    assert judge(Arm(ttft_s=times, e2e_s=times, faults=["lost: a", "lost: b"]), control) == ["lost: a"]
    slower = Arm(ttft_s=[one + 0.021 for one in times], e2e_s=times)
    assert judge(slower, slower) == judge(slower, slower, slower) == []
    assert judge(slower, slower, control) == ["ttft p99 is 21 ms above that without attacks"]
    lost = Arm(ttft_s=[math.nan], e2e_s=times)
    assert judge(lost, control) == ["ttft p99 is nan times the control's"], "no time is no good time"


@pytest.mark.slow
def test_an_attack_beside_an_innocent_client() -> None:
    command = [str(SCRIPTS / "attacks"), "--rounds", "1", "--seconds", "2", "wrong_keys"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split() for line in done.stdout.split("\n") if line.startswith(("wrong_keys", "control"))]
    assert [name for name, *_ in rows] == ["wrong_keys", "control"], done.stdout + done.stderr
    assert all(int(attacks) and int(answers) for _, attacks, answers, *_ in rows)
    assert "lost" not in done.stdout and "RuntimeError" not in done.stdout
