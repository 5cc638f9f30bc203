"""An instance that lies to a real router over its control port is refused with a reason, and costs other clients nothing."""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import Deployment
from pdserve.control.frame_connection import LENGTH_BYTES
from pdserve.output import Failure, Output, pack
from pdserve.proto import pdserve_pb2 as pb

MODEL = "model"
TOKENS = 8
FREE = pb.Costs(prefill=[1e-9] * 3, decode=[1e-9] * 3, transfer=[1e-9] * 2)  # attracts all requests


class RogueInstance:
    """A connection to a router's control port that a test sends frames on.

    Attributes:
        refusal: the router's reason for ending the connection.
        submitted: number of requests that the router has sent.
        ended: set when the router has ended the connection.
    """

    def __init__(self, router: Deployment, hello: pb.Hello) -> None:
        arguments = router.child("router").arguments
        port = int(arguments[arguments.index("--control-port") + 1])
        self.refusal, self.submitted, self.ended = "", 0, threading.Event()
        self._outputs: dict[str, Any] = {}
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()
        self.send(hello=hello)

    def __enter__(self) -> "RogueInstance":
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # the router has ended it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def send(self, **frame: Any) -> None:
        data = pb.InstanceFrame(**frame).SerializeToString()
        try:
            self._connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        except ConnectionError:
            self.ended.wait(600)  # the reason is read

    def answer(self, **output: Any) -> None:
        """Have every request answered with this output."""
        self._outputs = output

    def _receive(self) -> None:
        try:
            while (frame := _read(self._connection, pb.RouterFrame)) is not None:
                self.refusal = self.refusal or frame.refused.message
                if frame.HasField("submit"):
                    self.submitted += 1
                    if self._outputs:
                        output = Output(request_id=frame.submit.request_id, **self._outputs)
                        self.send(outputs=pack([output]))
        except ConnectionError:
            pass
        self.ended.set()


def _read(connection: socket.socket, frame_type: Any) -> Any:
    """Return the next frame; None at the end of the connection."""
    with connection.makefile("rb", buffering=0) as stream:
        header = stream.read(LENGTH_BYTES)
        size, data = int.from_bytes(header, "big"), b""
        while header and len(data) < size:
            part = stream.read(size - len(data))
            if not part:
                return None
            data += part
    return frame_type.FromString(data) if header else None


@pytest.fixture(scope="module")
def hello(fork_server: Any, checkpoint: Callable[[str], Path]) -> pb.Hello:
    """The registration of a real instance."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = ["both", "--model", str(checkpoint("llama")), "--served-model-name", MODEL, "--instance-id", "rogue"]
        command += ["--connector", "memory://", "--router", f"127.0.0.1:{listener.getsockname()[1]}"]
        with open(os.devnull, "w") as output:
            process = fork_server.start(command, os.environ, output.fileno(), output.fileno())
        connection, _ = listener.accept()
        with connection:
            frame = _read(connection, pb.InstanceFrame)
        process.kill()
    assert isinstance(frame.hello, pb.Hello)
    return frame.hello


@pytest.fixture(scope="module")
def log_lines() -> list[str]:
    """What the processes of `deployment` have logged so far."""
    return []


@pytest.fixture(scope="module")
def deployment(
    deploy: Callable[..., Any], checkpoint: Callable[[str], Path], log_lines: list[str]
) -> Iterator[Deployment]:
    """A router with one honest instance."""
    settings = {"model": str(checkpoint("llama")), "served_model_name": MODEL, "prefill": 0, "decode": 0, "both": 1}
    with deploy(**settings, log_lines=log_lines) as deployment:
        yield deployment


def changed(hello: pb.Hello, **fields: Any) -> pb.Hello:
    copy = pb.Hello()
    copy.CopyFrom(hello)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def request(deployment: Deployment) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{deployment.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=600)


def complete(deployment: Deployment) -> list[int]:
    reply = request(deployment)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    ids: list[int] = choice["token_ids"]
    return ids


def serves_others(deployment: Deployment) -> bool:
    """Return whether the router answers requests and shows only what is finite."""
    assert len(complete(deployment)) == TOKENS
    assert httpx.get(f"{deployment.url}/metrics", timeout=600).status_code == 200
    instances = httpx.get(f"{deployment.url}/debug/instances", timeout=600).text
    attached = json.loads(instances, parse_constant=lambda name: pytest.fail(f"{name} in {instances}"))["instances"]
    return [instance["instance_id"] for instance in attached] == ["both-0"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("num_blocks", 2**32 - 1), ("max_model_len", 0), ("vocab_size", 0), ("protocol_version", 1)],
)
def test_an_impossible_registration(deployment: Deployment, hello: pb.Hello, field: str, value: int) -> None:
    with RogueInstance(deployment, changed(hello, **{field: value})) as rogue:
        rogue.send(heartbeat=pb.Heartbeat(costs=FREE))
        assert rogue.ended.wait(600)
        assert field.replace("_version", "").replace("_", " ") in rogue.refusal.replace("_", " ")
    assert serves_others(deployment)


@pytest.mark.parametrize(
    "frame",
    [
        {"heartbeat": pb.Heartbeat(costs=pb.Costs(prefill=[math.nan] * 3, decode=[1] * 3, transfer=[1] * 2))},
        {"heartbeat": pb.Heartbeat(costs=pb.Costs(prefill=[-1] * 3, decode=[1] * 3, transfer=[1] * 2))},
        {"heartbeat": pb.Heartbeat(costs=pb.Costs(prefill=[1]))},
        {"heartbeat": pb.Heartbeat(costs=FREE, counters={"not a name{": 1.0})},
        {"heartbeat": pb.Heartbeat(costs=FREE, counters={"engine_steps": math.nan})},
        {"heartbeat": lambda: pb.Heartbeat(costs=FREE, counters={f"c{i}": 1.0 for i in range(500_000)})},
        {"blocks": pb.Blocks(added=bytes(16 * 1_000_000))},
        {"others": pb.Load(prefill_tokens=2**63)},
    ],
    ids=["NaN", "negative", "missing", "series", "counter", "counters", "keys", "load"],
)
def test_an_impossible_frame(deployment: Deployment, hello: pb.Hello, frame: dict[str, Any]) -> None:
    with RogueInstance(deployment, hello) as rogue:
        rogue.send(**{kind: content() if callable(content) else content for kind, content in frame.items()})
        assert rogue.ended.wait(600)
        assert rogue.refusal
    assert serves_others(deployment)


@pytest.mark.parametrize(
    "output",
    [
        {"token_ids": [5] * 20_000, "finish_reason": "length"},
        {"token_ids": [2**31], "finish_reason": "length"},
        {"token_ids": [5], "finish_reason": "<script>"},
        {"error": Failure(kind="\x1b[2J", message="forged")},
    ],
    ids=["tokens", "vocabulary", "finish reason", "error"],
)
def test_an_impossible_output(deployment: Deployment, hello: pb.Hello, output: dict[str, Any]) -> None:
    honest = complete(deployment)
    with RogueInstance(deployment, hello) as rogue:
        rogue.answer(**output)
        rogue.send(heartbeat=pb.Heartbeat(costs=FREE, free_blocks=1))
        while not rogue.submitted:
            assert complete(deployment) == honest, "a request is repeated on the other instance"
        assert rogue.ended.wait(600)
        assert rogue.refusal
    assert serves_others(deployment)


def test_what_it_says_is_escaped_in_logs(deployment: Deployment, hello: pb.Hello, log_lines: list[str]) -> None:
    before = len(log_lines)
    with RogueInstance(deployment, hello) as rogue:
        rogue.answer(error=Failure(kind="rejected", message="\x1b[2J\r\n12:00:00 E forged"))
        rogue.send(heartbeat=pb.Heartbeat(costs=FREE, free_blocks=1))
        while not rogue.submitted:
            request(deployment)
        while not any("forged" in line for line in log_lines[before:]):
            time.sleep(0.05)
    assert not any("\x1b" in line or line.startswith("12:00:00") for line in log_lines[before:])


def test_an_attached_instance_cannot_be_replaced(deployment: Deployment, hello: pb.Hello) -> None:
    with RogueInstance(deployment, hello) as first:
        with RogueInstance(deployment, changed(hello, nonce=b"x" * 16)) as thief:
            assert thief.ended.wait(600)
            assert thief.refusal.startswith("another instance 'rogue' is attached")
        assert not first.ended.is_set()


@pytest.mark.slow
def test_steps_without_results_hold_no_request(
    deploy: Callable[..., Any], checkpoint: Callable[[str], Path], hello: pb.Hello
) -> None:
    settings = {"model": str(checkpoint("llama")), "served_model_name": MODEL, "prefill": 0, "decode": 0, "both": 1}
    flags = {"router": ["--handover-timeout-seconds", "2"]}
    with deploy(**settings, flags=flags) as deployment, RogueInstance(deployment, hello) as rogue:
        answers: list[list[int]] = []
        requests = [threading.Thread(target=lambda: answers.append(complete(deployment))) for _ in range(8)]
        for thread in requests:
            thread.start()
        steps = 0
        while any(thread.is_alive() for thread in requests):
            steps += 1
            rogue.send(heartbeat=pb.Heartbeat(costs=FREE, free_blocks=1, counters={"engine_steps": float(steps)}))
            time.sleep(0.1)
        assert len(answers) == len(requests)
        assert rogue.submitted, "the rogue instance was never selected"
