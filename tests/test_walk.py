"""scripts/walk: what it counts, and that the path of a chat through the source does not get longer."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
MOST = {"files": 65, "functions": 459, "returns": 179}
# By which machines differ: in their kernels, in which connection speaks first and, if they are busy, in what watches a chat
# and in whether the cost model has decode look for drafts.
SLACK = {"files": 2, "functions": 30, "returns": 15}
PLAYED_FLEET = """
import os, time
from pdserve.parent import end_with_parent
end_with_parent()
with open(os.environ["PIPE"], "w") as pipe:
    print("up", file=pipe, flush=True)
    time.sleep(120)
    print("it was left", file=pipe)
"""
WALKS = 4  # the shortest counts: what else happens on a busy machine lengthens a path


@pytest.fixture(scope="module")
def walk_path() -> ModuleType:
    """The module walk_path (scripts/ is not a package)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import walk_path

        return walk_path


def calls(*functions: str) -> list[tuple[str, str, str]]:
    """Return calls from words such as `main:a.py:f`."""
    return [(thread, file, name) for thread, file, name in (function.split(":") for function in functions)]


@pytest.mark.integration
def test_the_path_is_not_longer() -> None:
    """A feature does not lengthen the path of a request that does not use it: shorten the path, do not raise `MOST`."""
    command = [sys.executable, str(SCRIPTS / "walk_path.py"), "--json"]
    least = dict.fromkeys(MOST, sys.maxsize)
    for _ in range(WALKS):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        numbers = json.loads(done.stdout)["numbers"]["all"]
        least = {name: min(count, numbers[name]) for name, count in least.items()}
        longer = {name: f"{least[name]} > {most}" for name, most in MOST.items() if least[name] > most + SLACK[name]}
        if not longer:
            break
    assert not longer, f"{longer}; scripts/walk --list prints the path"


def test_a_thread_may_record_a_call_as_the_recording_ends(
    walk_path: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of the handler would end whatever the process was doing."""
    handlers: dict[int, Callable[[], None]] = {}
    profiles: list[Callable[..., None]] = []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(threading, "setprofile", profiles.append)
    monkeypatch.setattr(sys, "setprofile", lambda _: None)
    is_late, is_writing = threading.Event(), threading.Event()

    class Late:
        co_filename, co_qualname = "b.py", "g"

    class Early:
        co_qualname = "f"

        @property
        def co_filename(self) -> str:
            is_writing.set()
            late.join()
            return "a.py"

    class Frame:
        seen = 0

        @property
        def f_code(self) -> Late:
            self.seen += 1
            if self.seen == 2:  # it shall be recorded
                is_late.set()
                assert is_writing.wait(60)
            return code

    code = Late()
    walk_path.Recorder(tmp_path)
    handlers[signal.SIGUSR1]()
    [profile] = profiles
    profile(SimpleNamespace(f_code=Early()), "call", None)
    late = threading.Thread(target=profile, args=(Frame(), "call", None))
    late.start()
    assert is_late.wait(60)
    handlers[signal.SIGUSR2]()
    [recorded] = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    assert recorded[1:] == ["a.py", "f"]


def test_returns_are_counted_by_thread(walk_path: ModuleType) -> None:
    path = calls("main:a.py:f", "main:b.py:g", "main:a.py:h", "main:b.py:i", "engine:b.py:j")
    assert walk_path.measure(path) == {"files": 2, "functions": 5, "stays": 5, "returns": 3}


def test_a_function_of_two_processes_counts_once(walk_path: ModuleType) -> None:
    numbers = walk_path.measure_all([calls("main:a.py:f", "main:b.py:g"), calls("main:a.py:f", "main:a.py:h")])
    assert numbers == {"files": 2, "functions": 3, "stays": 3, "returns": 0}


def test_the_path_is_what_all_chats_and_all_silences_call(walk_path: ModuleType) -> None:
    silences = [calls("main:a.py:beat", "main:a.py:rare"), calls("main:a.py:beat")]
    chats = [
        calls("main:b.py:parse", "engine:c.py:step", "main:a.py:beat", "main:b.py:send"),
        calls("main:b.py:parse", "engine:c.py:step", "main:b.py:retry", "main:b.py:send"),
    ]
    path = calls("main:a.py:beat", "main:b.py:parse", "main:b.py:send", "engine:c.py:step")
    assert walk_path.path_of(silences, chats) == path


def test_only_files_of_the_project_count(
    walk_path: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "router").mkdir()
    (tmp_path / "pdserve").mkdir()
    os.symlink(tmp_path / "router", tmp_path / "pdserve/router")
    recorded = [
        ("main", f"{tmp_path}/pdserve/router/a.py", "f"),
        ("engine", f"{tmp_path}/router/a.py", "f"),
        ("main", f"{tmp_path}/.venv/b.py", "g"),
        ("main", "<string>", "__init__"),
    ]
    assert walk_path.first_calls(tmp_path, recorded) == calls("main:router/a.py:f")


def test_a_tree_that_does_not_start(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no model\nexit 2\n")
    python.chmod(0o755)
    done = subprocess.run([SCRIPTS / "walk", "--tree", tmp_path], capture_output=True, text=True)
    assert done.returncode != 0
    assert "did not get ready" in done.stderr
    assert "no model" in done.stderr


def test_a_killed_script_leaves_no_fleet(tmp_path: Path) -> None:
    """The tree's Python plays a fleet that ends with its parent, as `pdserve up` does."""
    python, pipe = tmp_path / ".venv/bin/python", tmp_path / "pipe"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{PLAYED_FLEET}")
    python.chmod(0o755)
    os.mkfifo(pipe)
    script = f"import walk_path; from pathlib import Path; walk_path.recordings(Path({str(tmp_path)!r}))"
    walk = subprocess.Popen([sys.executable, "-c", script], cwd=SCRIPTS, env=os.environ | {"PIPE": str(pipe)})
    with walk, pipe.open() as fleet:
        assert fleet.readline() == "up\n"
        walk.kill()
        assert fleet.read() == ""
