"""Many prompts at once on raw sockets, to a router in front of mock instances: each is answered, no instance is lost."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import free_port

MOCK = Path(__file__).parents[2] / "benchmarks" / "mock_instance.py"
REQUESTS, PROMPT_WORDS = 300, 640
START_S = 600.0
SILENT_S = 10.0  # for which a router keeps a connection without a request


async def ask(port: int, body: bytes) -> str:
    """Return the status of one request on a connection of its own, or the name of the error."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        sent_s = time.perf_counter() - started
        answer = await reader.read()
        writer.close()
    except OSError as error:
        return type(error).__name__
    if not answer and sent_s > SILENT_S:
        return "sent too late"  # by this process, on a busy machine
    return answer[9:12].decode() or "no answer"


async def ask_at_once(port: int) -> Counter[str]:
    body = json.dumps({"prompt": "river " * PROMPT_WORDS, "max_tokens": 8}).encode()
    return Counter(await asyncio.gather(*(ask(port, body) for _ in range(REQUESTS))))


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/ready").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    pytest.fail(f"{url} was not ready within {START_S:g} s")


def test_a_burst_is_answered_and_loses_no_instance(start: Callable[..., Any]) -> None:
    port, control = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    start("router", "--model", "demo", "--port", str(port), "--control-port", str(control))
    start(str(MOCK), "0", f"127.0.0.1:{control}", "prefill-0", "decode-0")
    wait_until_ready(url)
    statuses = asyncio.run(ask_at_once(port))
    assert statuses.keys() <= {"200", "429"}, statuses
    lost = re.search(r"^pdserve_instances_lost_total (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert lost is not None and float(lost[1]) == 0
