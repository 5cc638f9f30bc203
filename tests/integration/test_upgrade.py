"""A fleet that is upgraded under load, and back, as docs/operations.md says: routers are never behind their instances."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve import __version__, parent
from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig
from pdserve.control.frame_connection import PROTOCOL_VERSION
from pdserve.lines.event_stream import read_events

ROOT = Path(__file__).parents[2]
FOLDERS = ("pdserve", "router", "prefill", "decode", "kv_transfer", "kernels", "proto")
NEXT, FIELD = "0.2.0", "newer"
STREAMS, TOKENS = 32, 64
PROMPTS = [f"Tell a long story about {word}. " * 6 for word in ("a hat", "a dog", "a king", "a ship", "Rome", "rivers")]


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """A copy of this version with the next numbers of version and control protocol, and a new field of requests and Hello."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, pattern, replacement in (
        ("pdserve/__init__.py", f'__version__ = "{__version__}"', f'__version__ = "{NEXT}"'),
        ("pdserve/control/frame_connection.py", r"(?m)^(OLDEST_VERSION) = \d+", r"\1 = PROTOCOL_VERSION - 1"),
        ("pdserve/control/frame_connection.py", r"(?m)^(PROTOCOL_VERSION) = (\d+)", r"\1 = 1 + \2"),
        ("pdserve/request.py", r"(?m)^(SINCE: .*) = \{", rf'\1 = {{"{FIELD}": {PROTOCOL_VERSION + 1}, '),
        ("pdserve/request.py", r"(?m)^    ignore_eos: bool = False$", rf"\g<0>\n    {FIELD}: bool = False"),
        ("pdserve/router/api/field_texts.py", r'(?m)^    "ignore_eos": .*$', rf'\g<0>\n    "{FIELD}": "new",'),
        (
            "pdserve/instance/hello.py",
            r"return (pb\.Hello\((?s:.*?)\n    \))",
            r"hello = \1\n    hello.MergeFromString(_NEW)\n    return hello",
        ),
        ("pdserve/instance/hello.py", r"(?m)^MAX_MODEL_CHARS", r'_NEW = b"\\xf8\\x3f\\x01"  # field 1023: 1\n\g<0>'),
    ):
        path = tmp_path / file
        changed, number = re.subn(pattern, replacement, path.read_text())
        assert number == 1, pattern
        path.write_text(changed)
    return tmp_path


class Streams:
    """Clients that stream answers one after the other, until told to stop.

    Attributes:
        whole: number of answers that were exactly the expected ones.
        lost: what went wrong with the others.
    """

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self.whole, self.lost = 0, list[str]()
        self._url, self._expected = url, expected
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        drawn = random.Random(seed)
        while not self._over.is_set():
            number = drawn.randrange(len(PROMPTS))
            try:
                tokens = stream(self._url, PROMPTS[number])
            except (httpx.HTTPError, AssertionError) as error:
                outcome = f"{type(error).__name__}: {error}"
            else:
                outcome = "" if tokens == self._expected[number] else f"{tokens} is not {self._expected[number]}"
            with self._lock:
                self.whole += not outcome
                self.lost += [outcome] if outcome else []


def stream(url: str, prompt: str) -> list[int]:
    """Return the tokens of a streamed answer. A connection that a router closes before it answers is made again."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    answer: list[int] | None = None
    while answer is None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as reply:
                answer = []
                assert reply.status_code == 200, reply.read()
                *events, end = read_events(reply.iter_bytes())
                assert end == "[DONE]", end
                for event in map(json.loads, events):
                    assert "choices" in event, event
                    answer += event["choices"][0]["token_ids"]
        except httpx.TransportError:
            if answer is not None:
                raise
    return answer


def refusal_of_new_field(url: str) -> str:
    """Return why a request that sets the new field is refused; empty if it is answered."""
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2, FIELD: True}, timeout=None)
    return str(reply.json().get("error", {}).get("message", ""))


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True], ids=["upgrade", "downgrade"])
def test_no_stream_is_lost_while_every_process_is_replaced_by_another_version(
    forked_deployment: type[Deployment], next_version: Path, wait_until: Callable[..., None], back: bool
) -> None:
    class Fleet(forked_deployment):  # type: ignore[misc,valid-type]
        is_next = back

        def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
            if not self.is_next:
                return super()._spawn(arguments, environment)
            command = [sys.executable, "-m", "pdserve", *arguments]
            return subprocess.Popen(
                command,
                cwd=next_version,
                env=environment | parent.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    lines: list[str] = []
    config = UpConfig(
        model="demo", dtype="float32", workers=2, port=free_port(), prefill=1, decode=2, local_prefill_tokens=0
    )
    with Fleet(config, on_line=lines.append) as fleet:
        fleet.wait_ready(600)
        expected = [stream(fleet.url, prompt) for prompt in PROMPTS]
        assert len({*map(tuple, expected)}) == len(PROMPTS)
        with Streams(fleet.url, expected) as streams:

            def wait(condition: Callable[[], bool], what: str) -> None:
                seen = streams.whole
                wait_until(lambda: fleet.poll_ready() and condition(), what)
                wait_until(lambda: streams.whole > seen + STREAMS, f"streams go on after: {what}")

            def replace_routers() -> None:
                for child in [child for child in fleet.children if child.name.startswith("router")]:
                    os.kill(old := child.pid, signal.SIGTERM)
                    wait(partial(lambda child, old: child.pid != old, child, old), f"{child.name} is replaced")

            def replace_instances() -> None:
                for child in [child for child in fleet.children if child.arguments[0] != "router"]:
                    fleet.start(child.arguments[0])
                    wait(lambda: True, f"a successor of {child.name} is attached")
                    fleet.stop(child.name)
                    wait(partial(lambda child: child not in fleet.children, child), f"{child.name} has left")

            wait(lambda: True, "all are of one version")
            fleet.is_next = not back
            steps = [replace_routers, replace_instances]
            steps.pop(-back)()
            assert f"no attached instance knows {FIELD}" in refusal_of_new_field(fleet.url)
            steps.pop()()
            assert bool(refusal_of_new_field(fleet.url)) is back
            for url in fleet.routers:
                instances = httpx.get(f"{url}/debug/instances").json()["instances"]
                versions = [one["version"] for one in (httpx.get(f"{url}/version").json(), *instances)]
                assert versions == [__version__ if back else NEXT] * 4
        assert not streams.lost, [*streams.lost, *lines]
        assert [line for line in lines if "was drained" in line], "streams have moved"
        assert not [line for line in lines if "killed" in line or "aborted" in line or "Traceback" in line], lines
