"""Whether an answer depends on anything but its request: `python benchmarks/exactness.py`.

Every request is answered once by a healthy 1P+1D, one at a time. Then the same requests are answered in other ways and under
faults, and compared token by token and log probability by log probability. Half of them are greedy, half are sampled with a
seed. The model is the demo model in the type that it was trained in, bfloat16, unless --model and --dtype say otherwise.

The last row sends --prompts more requests in waves to 2P+2D, with one fault per wave at a random moment: an instance or the
store is killed, an instance is frozen, drained, or changes its role. Every request of a wave meets that fault.
"""

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Callable, Coroutine
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
WAVE = 32  # requests
ROLE_FLIPS = ("prefill", "decode", "prefill", "decode")
Answer = tuple[list[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    model: str = flag("checkpoint", "demo")
    dtype: str = flag("auto is the checkpoint's", "auto")
    requests: int = flag("in each of the first rows", 96)
    prompts: int = flag("further requests, each of which meets a fault", 2000)
    tokens: int = flag("of each answer", 48)
    seed: int = flag("of prompts and faults", 0)


QUICK = {"requests": 8, "prompts": 32, "tokens": 16}


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
        self._restarting = asyncio.create_task(self._restart_children())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._restarting.cancel()
        await self.http.aclose()
        self._stack.close()

    async def _restart_children(self) -> None:
        while True:
            self.deployment.check_children()
            await asyncio.sleep(0.1)

    async def answer(self, body: dict[str, Any]) -> Answer:
        """Return token ids and log probabilities of a request, which is repeated while no instance is available."""
        while True:
            with suppress(httpx.TransportError):
                reply = await self.http.post("/v1/completions", json={**body, "model": self.deployment.config.name})
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    return choice["token_ids"], choice["logprobs"]["token_logprobs"]
                assert reply.status_code in (429, 503), reply.text
            await asyncio.sleep(0.1)

    async def answers(self, bodies: list[dict[str, Any]], at_once: int) -> list[Answer]:
        turns = asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any]) -> Answer:
            async with turns:
                return await self.answer(body)

        return await asyncio.gather(*map(one, bodies))

    async def attached(self) -> None:
        """Wait until every instance serves, and none is draining."""
        expected = len(self.deployment.children) - 1
        while True:
            with suppress(httpx.TransportError):
                found = (await self.http.get("/debug/instances")).json()["instances"]
                if sum(not instance["draining"] for instance in found) == expected:
                    return
            await asyncio.sleep(0.1)

    async def admin(self, instance: str, action: str, **body: str) -> None:
        await self.http.post(f"/admin/instances/{instance}/{action}", json=body)

    def signal(self, instance: str, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.deployment.child(instance).pid, number)


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
        ways: list[tuple[str, dict[str, Any], Callable[[_Fleet], Coroutine[Any, Any, list[Answer]]]]] = [
            ("32 at a time", {}, self._together),
            ("with 2 threads", {"threads": 2}, self._together),
            ("prompts in chunks of 64", {"max_num_batched_tokens": 64}, self._together),
            ("prompts computed on decode", {"local_prefill_tokens": 1 << 20}, self._together),
            ("by a single `both`", {"prefill": 0, "decode": 0, "both": 1}, self._together),
            ("over a dead store", {}, self._over_dead_store),
            ("while the store is killed", {}, self._while_the_store_dies),
            ("while roles change and instances drain", {"prefill": 2, "decode": 2}, self._while_roles_change),
        ]
        for name, options, way in ways:
            async with _Fleet(self._settings, **options) as fleet:
                rows.append(self._compare(name, await way(fleet)))
            print(rows[-1], flush=True)
        rows.append(await self._turns())
        if self._settings.prompts:
            self._bodies = [self._body(i) for i in range(self._settings.prompts)]
            async with _Fleet(self._settings) as fleet:
                self._expected = await fleet.answers(self._bodies, WAVE)
            async with _Fleet(self._settings, prefill=2, decode=2) as fleet:
                rows.append(self._compare("with a fault at a random moment of each", await self._waves(fleet)))
        return rows

    def _compare(self, name: str, got: list[Answer]) -> dict[str, Any]:
        tokens = sum(answer[0] != expected[0] for answer, expected in zip(got, self._expected, strict=True))
        either = sum(answer != expected for answer, expected in zip(got, self._expected, strict=True))
        return dict(zip(COLUMNS, (name, len(got), tokens, either - tokens), strict=True))

    async def _together(self, fleet: _Fleet) -> list[Answer]:
        return await fleet.answers(self._bodies, WAVE)

    async def _over_dead_store(self, fleet: _Fleet) -> list[Answer]:
        fleet.store.kill()
        return await self._together(fleet)

    async def _while_the_store_dies(self, fleet: _Fleet) -> list[Answer]:
        asking = asyncio.create_task(fleet.answers(self._bodies, 8))
        while not asking.done():
            await asyncio.sleep(self._random.uniform(0.2, 1))
            fleet.store.kill()
            await asyncio.sleep(self._random.uniform(0.2, 1))
            fleet.store.start()
        return await asking

    async def _while_roles_change(self, fleet: _Fleet) -> list[Answer]:
        asking = asyncio.create_task(fleet.answers(self._bodies, 8))
        for role in ROLE_FLIPS:
            await asyncio.sleep(1)
            await fleet.admin("decode-1", "role", role=role)
        for instance in ("prefill-1", "decode-0"):
            await fleet.attached()
            await fleet.admin(instance, "drain")
        return await asking

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

    async def _waves(self, fleet: _Fleet) -> list[Answer]:
        faults: list[Callable[[_Fleet, str], Coroutine[Any, Any, None]]] = [_kill, _freeze, _flip, _drain, _lose_store]
        got: list[Answer] = []
        for number, first in enumerate(range(0, len(self._bodies), WAVE)):
            await fleet.attached()
            wave = asyncio.create_task(fleet.answers(self._bodies[first : first + WAVE], WAVE))
            await asyncio.sleep(self._random.uniform(0.0, 1.5))
            await faults[number % len(faults)](fleet, self._random.choice(["prefill-0", "decode-0", "decode-1"]))
            got += await wave
        return got


async def _kill(fleet: _Fleet, instance: str) -> None:
    fleet.signal(instance, signal.SIGKILL)


async def _freeze(fleet: _Fleet, instance: str) -> None:
    fleet.signal(instance, signal.SIGSTOP)
    await asyncio.sleep(3)
    fleet.signal(instance, signal.SIGCONT)


async def _flip(fleet: _Fleet, instance: str) -> None:
    await fleet.admin("decode-1", "role", role="prefill")
    await asyncio.sleep(0.5)
    await fleet.admin("decode-1", "role", role="decode")


async def _drain(fleet: _Fleet, instance: str) -> None:
    await fleet.admin(instance, "drain")


async def _lose_store(fleet: _Fleet, instance: str) -> None:
    fleet.store.kill()
    await asyncio.sleep(0.5)
    fleet.store.start()


if __name__ == "__main__":
    report.main(command_from_config(Settings, exactness))
