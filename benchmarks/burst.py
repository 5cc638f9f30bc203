"""Thousands of prompts at once on raw sockets, before mock instances: `python benchmarks/burst.py [REQUESTS…]`.

Prints how many were answered, by status, how long `/health` took meanwhile, and how many instances were lost. Exit code 1: an
instance was lost, or a request was neither answered nor refused as one too many.
"""

import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter

import httpx
from decisions import prompt_text

from pdserve.cli.deployment import free_port
from router import MOCK

PROMPT_TOKENS = 640
START_S = 600.0
SILENT_S = 10.0  # for which a router keeps a connection without a request
ROLES = ("prefill-0", "decode-0")


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


async def check_health(url: str, longest: list[float]) -> None:
    """Ask for `/health` until cancelled, and keep the longest time that an answer took."""
    async with httpx.AsyncClient(timeout=START_S) as client:
        while True:
            started = time.perf_counter()
            (await client.get(f"{url}/health")).raise_for_status()
            longest[0] = max(longest[0], time.perf_counter() - started)
            await asyncio.sleep(0.05)


async def burst(port: int, requests: int) -> bool:
    """Send all requests at once, and print what became of them. Return True if that is as it should be."""
    url, longest = f"http://127.0.0.1:{port}", [0.0]
    body = json.dumps({"prompt": prompt_text(PROMPT_TOKENS), "max_tokens": 8}).encode()
    health = asyncio.create_task(check_health(url, longest))
    started = time.perf_counter()
    statuses = Counter(await asyncio.gather(*(ask(port, body) for _ in range(requests))))
    seconds = time.perf_counter() - started
    health.cancel()
    metrics = httpx.get(f"{url}/metrics", timeout=START_S).text
    lost = re.search(r"^pdserve_instances_lost_total (\S+)", metrics, re.MULTILINE)
    print(
        f"{requests} requests: {dict(statuses)} in {seconds:.1f} s; /health at most {longest[0]:.2f} s; "
        f"instances lost: {lost and lost[1]}"
    )
    return statuses.keys() <= {"200", "429"} and lost is not None and float(lost[1]) == 0


async def main(counts: list[int]) -> bool:
    """Start a router and its mock instances, and send one burst after the other. Return True if all went well."""
    port, control = free_port(), free_port()
    with tempfile.TemporaryFile() as log:
        arguments = ["-m", "pdserve", "router", "--model", "demo", "--port", str(port), "--control-port", str(control)]
        router = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=log, stdout=log)
        mocks = await asyncio.create_subprocess_exec(sys.executable, MOCK, "0", f"127.0.0.1:{control}", *ROLES)
        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                while True:
                    try:
                        (await client.get(f"http://127.0.0.1:{port}/ready")).raise_for_status()
                        break
                    except httpx.HTTPError:
                        await asyncio.sleep(0.1)
            return all([await burst(port, count) for count in counts])
        finally:
            for process in (mocks, router):
                process.terminate()
                await process.wait()


if __name__ == "__main__":
    sys.exit(not asyncio.run(main([int(count) for count in sys.argv[1:]] or [1000, 5000])))
