"""An innocent client: ten greedy streams a second with its own key, each compared with the idle deployment's answer.

    python -m attacking.innocent TARGET FILE

Appends a JSON line for each request to FILE: its number, when it was sent (seconds of the monotonic clock), its TTFT and its
end-to-end latency in seconds, and what was wrong ("": nothing). Runs until it is terminated.
"""

import asyncio
import json
import sys
import time
from typing import TextIO

import httpx

from attacking.target import TIMEOUT_S, Target

PERIOD_S = 0.1
TOKENS = 16
PROMPTS = [f"Once upon a time, there lived a {animal} in a" for animal in ("fox", "bear", "cat", "dog", "hen", "cow")]


async def main(target: Target, file: TextIO) -> None:
    headers = {"Authorization": f"Bearer {target.key}"}
    async with httpx.AsyncClient(base_url=target.url, headers=headers, verify=False, timeout=TIMEOUT_S) as client:
        right = [(await _ask(client, prompt))[0] for prompt in PROMPTS]
        async with asyncio.TaskGroup() as tasks:
            begin, number = time.monotonic(), 0
            while True:
                await asyncio.sleep(begin + number * PERIOD_S - time.monotonic())
                tasks.create_task(_measure(client, number, right, file))
                number += 1


async def _measure(client: httpx.AsyncClient, number: int, right: list[str], file: TextIO) -> None:
    sent = time.monotonic()
    fault, ttft_s = "", float("nan")
    try:
        text, first = await _ask(client, PROMPTS[number % len(PROMPTS)])
        ttft_s = first - sent
        if text != right[number % len(PROMPTS)]:
            fault = f"wrong: {text!r} instead of {right[number % len(PROMPTS)]!r}"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        fault = f"lost: {error!r}"
    e2e_s = time.monotonic() - sent
    row = {"number": number, "sent": sent, "ttft_s": ttft_s, "e2e_s": e2e_s, "fault": fault}
    print(json.dumps(row), file=file, flush=True)


async def _ask(client: httpx.AsyncClient, prompt: str) -> tuple[str, float]:
    """Return the text of a whole stream, and when its first event arrived."""
    text, first = "", 0.0
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        data = b""
        async for part in response.aiter_bytes():
            first = first or time.monotonic()
            data += part
    events = data.split(b"\n\n")
    if events[-2] != b"data: [DONE]":
        raise ValueError(f"the stream ends with {events[-2][:300]!r}")
    for event in events[:-2]:
        text += json.loads(event.removeprefix(b"data: "))["choices"][0]["text"]
    return text, first


if __name__ == "__main__":
    with open(sys.argv[2], "a") as output:
        asyncio.run(main(Target.from_json(sys.argv[1]), output))
