"""The path of one chat through the source: its files, its functions, and its returns to a file that it had left.

A router, a prefill and a decode instance on the demo model, over `shm://`, answer warm streamed greedy chats of 12 tokens,
and each process records with `sys.setprofile` the functions of the project in the order in which its threads first call them.
What is counted:

- A function is a file and a qualified name. Comprehensions and lambdas are functions too, but several of one kind in one
  function have one name, and count once. Code that dataclasses generate is in no file, and does not count.
- To the path belongs what every chat calls, and what idle processes call in every 3 s before: heartbeats, fits of cost
  models, checks of memory. Timers of 5 s or more, and what a busy machine causes in some chats, do not.
- A stay is a run of first calls in one file by one thread, and all stays in a file but one are returns to it. Which of two
  connections speaks first differs from chat to chat: that with the median of returns counts.
- Files and functions of all processes are distinct ones, stays and returns of all processes are sums.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from types import CodeType, FrameType

Call = tuple[str, str, str]  # thread, file from the project's root, qualified name
Function = tuple[str, str]  # file, qualified name
Recording = dict[str, list[Call]]  # first calls in order, by process

ROLES = ("router", "prefill", "decode")
TOKENS = 12
SILENCES = 4  # idle windows that are recorded: a timer of 5 s cannot fire in all of them
SILENCE_S = 3.05  # an idle instance wakes up once a second, and fits its cost models when the last fit is 2 s old
AFTER_S = 0.3  # recorded after a chat: the instances release its blocks
CHATS = 5
STALLED_S = (
    0.5  # an idle machine needs a tenth of it; a chat that takes longer meets the router's timer of slow requests
)
# A prompt about each of these has a block of 16 tokens that no cache has, and 2 or 3 more tokens; the answer is shorter than
# the rest of their block.
SUBJECTS = ascii_uppercase
TIMEOUT_S = 600.0  # only a hang takes that long
FOLDER_VARIABLE = "WALK_FOLDER"
REPOSITORY = Path(__file__).resolve().parents[1]


class Recorder:
    """Records the first calls of functions in this process, from SIGUSR1 to SIGUSR2, which writes them to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recording = False
        self._calls: dict[int, tuple[CodeType, str]] = {}  # by the code's id: its hash takes long
        # Threads that exist already get no profile function from another one, so each gets it when it starts. The main
        # thread, which loads torch, gets it when the recording starts.
        threading.setprofile(self._profile)
        signal.signal(signal.SIGUSR1, self._start)
        signal.signal(signal.SIGUSR2, self._stop)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._recording and event == "call" and id(frame.f_code) not in self._calls:
            self._calls[id(frame.f_code)] = frame.f_code, threading.current_thread().name

    def _start(self, *_: object) -> None:
        self._calls.clear()
        self._recording = True
        self._path("started").touch()
        sys.setprofile(self._profile)

    def _stop(self, *_: object) -> None:
        sys.setprofile(None)
        self._recording = False
        calls = [
            (thread, code.co_filename, code.co_qualname)
            for code, thread in list(self._calls.values())  # at once: other threads may just add one
            if code.co_filename != __file__
        ]
        self._path("new").write_text(json.dumps(calls))
        self._path("new").replace(self._path("json"))

    def _path(self, kind: str) -> Path:
        return self._folder / f"{os.getpid()}.{kind}"


def record() -> None:
    """Make this process, which is about to start, listen to the signals that start and stop a recording."""
    Recorder(Path(os.environ[FOLDER_VARIABLE]))


@contextmanager
def deployment(tree: Path, folder: Path, port: int) -> Iterator[dict[str, int]]:
    """Run `pdserve up` of a source tree with recorders in its processes, and yield the process ids by role."""
    start = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import walk_path; walk_path.record()"
    (folder / "sitecustomize.py").write_text(start)  # Python imports it in each process that it starts
    command = [str(tree / ".venv/bin/python"), "-m", "pdserve", "up", "--prefill", "1", "--decode", "1"]
    command += ["--port", str(port), "--local-prefill-tokens", "0", "--threads", "1", "--kv-cache-memory", "128MiB"]
    command += [
        "--reasoning-parser",
        "none",
        "--tool-call-parser",
        "none",
    ]  # the template of the demo model would open both
    ends_with_this = f"{os.getpid()} {int(signal.SIGTERM)}"  # as in pdserve/parent.py, even if this process is killed
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        FOLDER_VARIABLE: str(folder),
        "PDSERVE_PARENT": ends_with_this,
    }
    log = folder / "log"
    with log.open("w") as output:
        up = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_ready(port):
            if up.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} did not get ready")
            time.sleep(0.1)
        yield processes_of(up.pid)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text()}") from error
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            up.kill()  # its children end with it
            raise RuntimeError(f"{' '.join(command)} did not stop:\n{log.read_text()}") from None


def processes_of(parent: int) -> dict[str, int]:
    """Return the process ids of the router and the instances that a process started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    for pid, command in commands.items():
        if "pdserve.cli.fork_server" in command:
            return processes_of(pid)
    return {role: pid for role in ROLES for pid, command in commands.items() if role in command}


def free_port() -> int:
    """Return a TCP port that is unused on 127.0.0.1, below those that the system gives to outgoing connections."""
    for port in range(10_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no port is free on 127.0.0.1")


def request(port: int, target: str, body: object = None) -> str:
    """Return the answer to an HTTP request, with its head. The request is sent at once, so that it arrives in one piece."""
    data = b"" if body is None else json.dumps(body).encode()
    fields = f"Host: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(f"{target} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
        answer, deadline = b"", time.monotonic() + TIMEOUT_S  # `recv` limits a silence only
        while part := connection.recv(65_536):
            answer += part
            if time.monotonic() > deadline:
                raise RuntimeError(f"{target} has not ended within {TIMEOUT_S:g} s:\n{answer.decode()}")
        return answer.decode()


def is_ready(port: int) -> bool:
    try:
        head, _, body = request(port, "GET /ready").partition("\r\n\r\n")
    except OSError:
        return False
    return " 200 " in head.partition("\n")[0] and json.loads(body)["instances"] == len(ROLES) - 1


def chat(port: int, subject: str) -> float:
    """Stream the answer to a question, and return the seconds that it took.

    Raises:
        RuntimeError: the answer has fewer than `TOKENS` tokens.
    """
    messages = [{"role": "user", "content": f"I like {subject}. Tell me a long story."}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "stream": True, "max_tokens": TOKENS}
    started = time.monotonic()
    answer = request(port, "POST /v1/chat/completions", body)
    seconds = time.monotonic() - started
    if '"finish_reason":"length"' not in answer.replace(" ", ""):
        raise RuntimeError(f"an answer of {TOKENS} tokens was expected, not:\n{answer}")
    return seconds


def recordings(tree: Path) -> tuple[list[Recording], list[Recording]]:
    """Return what each process calls while it is idle, several times, and for each of the quickest of several chats."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        with deployment(tree, folder, port) as processes:
            recorded = partial(recording_of, tree, folder, processes)
            chats: list[tuple[float, Recording]] = []
            warm_up, subjects = SUBJECTS[:2], SUBJECTS[2:]
            for subject in warm_up:
                chat(port, subject)
            while subjects and sum(seconds < STALLED_S for seconds, _ in chats) < CHATS:
                chats.append(recorded(partial(chat, port, subjects[0]), AFTER_S))
                subjects = subjects[1:]
            silences = [recorded(lambda: 0.0, SILENCE_S) for _ in range(SILENCES)]
    quickest = sorted(chats, key=lambda chat: chat[0])[:CHATS]
    if quickest[-1][0] > STALLED_S:
        print(
            f"the machine is busy: a chat took {quickest[-1][0]:.1f} s, and what watches it may count", file=sys.stderr
        )
    return [recording for _, recording in silences], [recording for _, recording in quickest]


def recording_of(
    tree: Path, folder: Path, processes: dict[str, int], action: Callable[[], float], silence_s: float
) -> tuple[float, Recording]:
    """Return an action's result, and what each process calls during it and for some time after it."""
    for pid in processes.values():
        os.kill(pid, signal.SIGUSR1)
    for pid in processes.values():
        take(folder / f"{pid}.started")
    result = action()
    time.sleep(silence_s)
    for pid in processes.values():
        os.kill(pid, signal.SIGUSR2)
    return result, {
        role: first_calls(tree, json.loads(take(folder / f"{pid}.json"))) for role, pid in processes.items()
    }


def take(path: Path) -> str:
    """Return the content of a file that a recorder writes, as soon as it is there, and remove the file."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no process wrote {path.name} within {TIMEOUT_S:g} s of its signal")
        time.sleep(0.01)
    content = path.read_text()
    path.unlink()
    return content


def first_calls(tree: Path, calls: list[Call]) -> list[Call]:
    """Return the calls of a recording that are the first of a function of the project."""
    first: dict[Function, Call] = {}
    for thread, filename, name in calls:
        path = Path(filename).resolve()  # folders of the root are linked into pdserve/
        if Path(filename).is_absolute() and path.is_relative_to(tree) and not path.is_relative_to(tree / ".venv"):
            file = str(path.relative_to(tree))
            first.setdefault((file, name), (thread, file, name))
    return list(first.values())


def path_of(silences: list[list[Call]], chats: list[list[Call]]) -> list[Call]:
    """Return the functions on the path of a chat in a process, thread by thread in the order of their first calls."""
    idle = common(silences)[0]
    paths = []
    for calls in common(chats):
        first = {call[1:]: call for call in reversed([*idle, *calls])}
        ordered = [call for call in dict.fromkeys([*idle, *calls]) if first[call[1:]] == call]
        threads = dict.fromkeys(thread for thread, _, _ in ordered)
        paths.append([call for thread in threads for call in ordered if call[0] == thread])
    return sorted(paths, key=stays)[len(paths) // 2]


def common(recordings: list[list[Call]]) -> list[list[Call]]:
    """Return the recordings without the functions that one of them lacks."""
    functions = set.intersection(*({call[1:] for call in calls} for calls in recordings))
    return [[call for call in calls if call[1:] in functions] for calls in recordings]


def stays(calls: list[Call]) -> int:
    return sum(1 for _ in groupby(calls, key=lambda call: call[:2]))


def measure(calls: list[Call]) -> dict[str, int]:
    """Return the numbers of files, functions, stays and returns of a process."""
    files = len({file for _, file, _ in calls})
    return {"files": files, "functions": len(calls), "stays": stays(calls), "returns": stays(calls) - files}


def measure_all(processes: list[list[Call]]) -> dict[str, int]:
    """Return the numbers of distinct files and functions, and the sums of stays and returns, of several processes."""
    parts = [measure(calls) for calls in processes]
    functions = {call[1:] for calls in processes for call in calls}
    sums = {name: sum(part[name] for part in parts) for name in ("stays", "returns")}
    return {"files": len({file for file, _ in functions}), "functions": len(functions), **sums}


def walk(tree: Path) -> Recording:
    """Return the functions on the path of a chat, in order, by process."""
    silences, chats = recordings(tree)
    return {role: path_of([one[role] for one in silences], [one[role] for one in chats]) for role in ROLES}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/walk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="source tree, with its .venv; default: this one")
    parser.add_argument("--list", action="store_true", help="print the functions in the order of their first calls")
    parser.add_argument("--json", action="store_true", help="print the numbers and the functions as JSON")
    arguments = parser.parse_args()
    path = walk(arguments.tree.resolve())
    numbers = {role: measure(calls) for role, calls in path.items()} | {"all": measure_all(list(path.values()))}
    if arguments.json:
        print(json.dumps({"numbers": numbers, "calls": path}, indent=1))
        return
    if arguments.list:
        print_calls(path)
    names = list(numbers["all"])
    print(f"{'process':10}" + "".join(f"{name:>11}" for name in names))
    for process, row in numbers.items():
        print(f"{process:10}" + "".join(f"{row[name]:11}" for name in names))


def print_calls(path: Recording) -> None:
    """Print the functions by process, thread and stay."""
    for process, calls in path.items():
        for thread, of_thread in groupby(calls, key=lambda call: call[0]):
            print(f"{process}, thread {thread}")
            for file, of_file in groupby(of_thread, key=lambda call: call[1]):
                print(f"  {file}")
                for _, _, name in of_file:
                    print(f"    {name}")
        print()


if __name__ == "__main__":
    main()
