"""Independent load generator for OpenAI-compatible servers, as a second opinion about `pdserve bench serve`.

    python plain_client.py URL MODEL TOKENIZER REQUESTS RATE INPUT_TOKENS OUTPUT_TOKENS SEED

Sends completions at Poisson times, whatever the server does, and prints a JSON object with percentiles in milliseconds.
It uses httpx and tokenizers, and nothing of pdserve.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from typing import Any

import httpx
from tokenizers import Tokenizer


async def request(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, list[float], int]:
    """Return the time to the first text in seconds, the gaps between texts, and the tokens that the server counted."""
    sent = time.perf_counter()
    times, tokens = [], 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        rest = b""
        async for piece in response.aiter_bytes():
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for event in (json.loads(line[6:]) for line in lines if line.startswith(b"data: {")):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if event["choices"]:
                    times.append(now)
    return times[0] - sent, [later - earlier for earlier, later in itertools.pairwise(times)], tokens


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by linear interpolation, in milliseconds."""
    ordered, at = sorted(values), (len(values) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return 1e3 * (ordered[low] + (at - low) * (ordered[high] - ordered[low]))


async def main(url: str, model: str, tokenizer: str, *numbers: str) -> None:
    requests, rate, input_tokens, output_tokens, seed = (float(number) for number in numbers)
    draw = random.Random(seed)
    vocabulary = Tokenizer.from_file(tokenizer)
    words = [vocabulary.decode([number]) for number in range(vocabulary.get_vocab_size())]
    words = [word for word in words if word.isascii() and word.strip().isalpha() and word.startswith(" ")]

    def prompt() -> str:
        ids: list[int] = []
        while len(ids) < input_tokens:
            ids = vocabulary.encode("".join(draw.choices(words, k=int(input_tokens) * 2))).ids
        return vocabulary.decode(ids[: int(input_tokens)])

    common = {"model": model, "max_tokens": int(output_tokens), "temperature": 0.0, "ignore_eos": True, "stream": True}
    bodies = [common | {"prompt": prompt(), "stream_options": {"include_usage": True}} for _ in range(int(requests))]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = at = time.perf_counter()
        tasks, lags = [], []
        for body in bodies:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            lags.append(time.perf_counter() - at)
            tasks.append(asyncio.create_task(request(client, body)))
            at += draw.expovariate(rate)
        done = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    samples = {"ttft": [one[0] for one in done], "itl": [gap for one in done for gap in one[1]]}
    samples["tpot"] = [sum(gaps) / (tokens - 1) for _, gaps, tokens in done]
    figures = {f"p{p}_{name}_ms": percentile(values, p) for name, values in samples.items() for p in (50, 99)}
    figures |= {"output_throughput": sum(one[2] for one in done) / seconds, "p99_lag_ms": percentile(lags, 99)}
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
