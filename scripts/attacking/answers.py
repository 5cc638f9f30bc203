"""Attacks by answers: left, never read, many at once, or many kept."""

import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from attacking.target import Target, expect

BURST = 100
VALID_BURST = 10  # as often as an attacker sends its bursts, what its quota allows
SHORT = [{"stream": True, "max_tokens": 40}] * 8
LONG = [{"stream": True, "n": 2, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}] * 6


def left_streams(target: Target) -> None:
    with _streams(target, SHORT) as connections:
        for connection in connections:
            if random.random() < 0.5:
                connection.recv(1)


def unread_streams(target: Target) -> None:
    with _streams(target, LONG):
        time.sleep(2)


def read_streams(target: Target, bodies: list[dict[str, Any]]) -> None:
    """Ask for streams at once and read each to its end: what the quota refuses, too."""
    with _streams(target, bodies) as connections:
        for connection in connections:
            expect(connection, {200, 429})


@contextmanager
def _streams(target: Target, bodies: list[dict[str, Any]]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        connections = [stack.enter_context(target.connect()) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            connection.sendall(target.completion(**body))
        yield connections


def burst(target: Target, size: int = BURST) -> None:
    with ExitStack() as stack:
        connections = []
        for _ in range(size):  # each at once: a connection that stays silent is closed
            connections.append(stack.enter_context(target.connect()))
            connections[-1].sendall(target.completion(prompt="one two three " * 20, max_tokens=1))
        for connection in connections:
            expect(connection, {200, 429})


def invalid_batch(target: Target) -> None:
    """A batch of lines that are no requests."""
    file_id = upload(target, b"x\n" * 20_000)
    batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    if file_id:
        target.ask(target.post("/v1/batches", batch), {200, 400, 429})


def many_batches(target: Target, metadata: Sequence[dict[str, str]] = ({}, {"a": "b" * 1_000_000})) -> None:
    """Many batches of one file, half of them with much metadata, and their listing."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 1}}
    file_id = upload(target, json.dumps(line).encode() * 1)
    batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    if file_id:
        for data in metadata:
            for _ in range(10):
                target.ask(target.post("/v1/batches", batch | {"metadata": data}), {200, 400, 429})
        target.ask(target.get("/v1/batches"), {200, 429})
        target.ask(target.get(f"/v1/files/{random.choice(['batch_1', file_id])}/content"), {200, 404, 429})


def upload(target: Target, content: bytes) -> str:
    """Return the id of an uploaded file; "" if it was refused by a limit."""
    fields = [b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch']
    fields += [b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + content]
    body = b"".join(b"--limit\r\n" + field + b"\r\n" for field in fields) + b"--limit--\r\n"
    headers = ("Content-Type: multipart/form-data; boundary=limit", f"Content-Length: {len(body)}", "Connection: close")
    answer = json.loads(target.ask(target.head("POST", "/v1/files", *headers) + body, {200, 429}))
    return str(answer.get("id", ""))


def stored_responses(target: Target) -> None:
    body = {"input": "hi", "max_output_tokens": 1, "store": True, "metadata": {"a": "b" * 500}}
    target.ask(target.post("/v1/responses", body), {200, 429})
    target.ask(target.post("/v1/responses", body | {"metadata": {"a": "b" * 1_000_000}}), {400, 413, 429})
