"""Whether an answer depends on anything but its request: `python benchmarks/exactness.py`.

Every request is answered once by a healthy 1P+1D, one at a time. Then the same requests are answered in other ways, and
compared token by token and log probability by log probability, as `chaos.py` does under faults. Half of them are greedy, half
are sampled with a seed. The model is the demo model in the type that it was trained in, bfloat16, unless --model and --dtype
say otherwise.
"""

import asyncio
import random
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import report
import stores
from tokenizers import Tokenizer

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag, parse_size
from pdserve.model_path import resolve_model

WORDS = " ".join(path.read_text() for path in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))).split()
COLUMNS = ("answered", "requests", "differ in tokens", "differ in log probabilities only")
AT_ONCE = 32  # requests
DEAD_STORE = "over a dead store"
PATIENCE_S = 300.0  # with a fleet whose instances may be starting again
Answer = tuple[list[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    model: str = flag("checkpoint", "demo")
    dtype: str = flag("auto is the checkpoint's", "auto")
    requests: int = flag("in each row", 96)
    tokens: int = flag("of each answer", 48)
    seed: int = flag("of prompts", 0)


QUICK = {"requests": 8, "tokens": 16}


def exactness(settings: Settings) -> None:
    """Count the answers that depend on more than their request."""
    settings = settings.sized(QUICK)
    rows = asyncio.run(_Bench(settings).rows())
    report.show(rows)
    print(report.write("exactness", settings, {"rows": rows}))
    if any(row[COLUMNS[2]] or row[COLUMNS[3]] for row in rows):
        raise SystemExit(1)


class _Fleet:
    """A deployment over a Redis of its own, and the clients' connection to it."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-benchmark-"))
        self.store = stores.RedisServer(folder, parse_size("1GiB"))
        self._stack.callback(self.store.kill)
        defaults = {"local_prefill_tokens": 0, "threads": 1, "num_blocks": 2048}
        config = UpConfig(
            model=settings.model,
            dtype=settings.dtype,
            port=free_port(),
            connector=f"redis://127.0.0.1:{self.store.port}/0",
            **{**defaults, **options},
        )
        self.deployment = self._stack.enter_context(Deployment(config, lambda _: None))
        self.deployment.wait_ready()

    async def __aenter__(self) -> "_Fleet":
        self.http = httpx.AsyncClient(base_url=self.deployment.url, timeout=600.0, limits=httpx.Limits())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self._stack.close()

    async def answer(self, body: dict[str, Any]) -> Answer:
        """Return token ids and log probabilities of a request, which is repeated while no instance is available.

        Raises:
            RuntimeError: for `PATIENCE_S` seconds there was none.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            with suppress(httpx.TransportError):
                reply = await self.http.post("/v1/completions", json={**body, "model": self.deployment.config.name})
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    return choice["token_ids"], choice["logprobs"]["token_logprobs"]
                assert reply.status_code in (429, 503), reply.text
            await asyncio.sleep(0.1)
        raise RuntimeError(f"no instance of the fleet has answered within {PATIENCE_S:g} s")

    async def answers(self, bodies: list[dict[str, Any]], at_once: int) -> list[Answer]:
        turns = asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any]) -> Answer:
            async with turns:
                return await self.answer(body)

        return await asyncio.gather(*map(one, bodies))


class _Bench:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer.from_file(str(Path(resolve_model(settings.model)) / "tokenizer.json"))
        self._random = random.Random(settings.seed)
        self._bodies = [self._body(i) for i in range(settings.requests)]

    def _body(self, number: int) -> dict[str, Any]:
        length = self._random.randint(5, 300)
        first = self._random.randrange(len(WORDS) - length)
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
        prompt = self._tokenizer.encode(" ".join(WORDS[first : first + length])).ids
        limits = {"max_tokens": self._settings.tokens, "ignore_eos": True}
        return {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **limits, **sampling}

    async def rows(self) -> list[dict[str, Any]]:
        async with _Fleet(self._settings) as fleet:
            self._expected = await fleet.answers(self._bodies, 1)
            rows = [self._compare("again, with warm caches", await fleet.answers(self._bodies, 1))]
        ways: dict[str, dict[str, Any]] = {
            "32 at a time": {},
            "with 2 threads": {"threads": 2},
            "prompts in chunks of 64": {"max_num_batched_tokens": 64},
            "prompts computed on decode": {"local_prefill_tokens": 1 << 20},
            "by a single `both`": {"prefill": 0, "decode": 0, "both": 1},
            DEAD_STORE: {},
        }
        for name, options in ways.items():
            async with _Fleet(self._settings, **options) as fleet:
                if name == DEAD_STORE:
                    fleet.store.kill()
                rows.append(self._compare(name, await fleet.answers(self._bodies, AT_ONCE)))
            print(rows[-1], flush=True)
        return [*rows, await self._turns()]

    def _compare(self, name: str, got: list[Answer]) -> dict[str, Any]:
        tokens = sum(answer[0] != expected[0] for answer, expected in zip(got, self._expected, strict=True))
        either = sum(answer != expected for answer, expected in zip(got, self._expected, strict=True))
        return dict(zip(COLUMNS, (name, len(got), tokens, either - tokens), strict=True))

    async def _turns(self) -> dict[str, Any]:
        """Second turns, whose prompts contain what the first turns decoded: from its KV, and computed anew."""
        first, expected = self._bodies, self._expected
        turns = [
            {**body, "prompt": [*body["prompt"], *tokens, *body["prompt"][:20]]}
            for body, (tokens, _) in zip(first, expected, strict=True)
        ]
        async with _Fleet(self._settings) as fleet:
            self._expected = await fleet.answers(turns, 1)
        async with _Fleet(self._settings, store_generated="on") as fleet:
            await fleet.answers(first, 1)
            row = self._compare("as second turns, after what the first decoded", await fleet.answers(turns, 1))
        return row


if __name__ == "__main__":
    report.main(command_from_config(Settings, exactness))
