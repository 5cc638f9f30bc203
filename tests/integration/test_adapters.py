"""Adapters over real processes: whatever is mixed, an answer is that of merged weights, and its KV is never another's."""

import mmap
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.low_rank import Made, make_adapter, merge, modules, six_adapters, with_settings

Deploy = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "lora.md"
TOKENS = 12
ASKED = [[i, 7, 9] * 12 for i in range(4)]
PD, BOTH = {"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "both": 1}


@pytest.fixture(scope="module")
def six_of(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """six_of(architecture) → `six_adapters` of it."""

    @cache
    def of(architecture: str) -> dict[str, Made]:
        return six_adapters(
            tmp_path_factory.mktemp("adapters"), checkpoint(architecture, dtype="float32"), architecture
        )

    return of


@pytest.fixture(scope="module")
def six(six_of: Callable[[str], dict[str, Made]]) -> dict[str, Made]:
    return six_of("llama")


@pytest.mark.parametrize(
    ("architecture", "topology"),
    [
        pytest.param("llama", PD, id="llama-split"),
        pytest.param("gpt_oss", PD, id="gpt_oss-split"),
        pytest.param("qwen3_moe", BOTH, id="qwen3_moe-colocated"),
        pytest.param("mixtral", PD, id="mixtral-split", marks=pytest.mark.slow),
        pytest.param("llama", BOTH, id="llama-colocated", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", PD, id="qwen3_moe-split", marks=pytest.mark.slow),
    ],
)
def test_mixed_requests_equal_merged_weights(
    architecture: str,
    topology: dict[str, int],
    six_of: Callable[[str], dict[str, Made]],
    checkpoint: Callable[..., Path],
    generate: Any,
    prompts: list[list[int]],
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    blocks_held: Callable[[Any], dict[str, float]],
    tmp_path: Path,
) -> None:
    """With fewer slots than adapters. With cold and warm caches, in which no request finds another adapter's blocks.

    Of mixtures, adapters change the routers, too. KV of windows is handed over in groups of its own.
    """
    base, chosen, six = checkpoint(architecture, dtype="float32"), prompts[2:10], six_of(architecture)
    expected = {"": generate(base, chosen, TOKENS)}
    for name, made in six.items():
        expected[name] = generate(merge(tmp_path / name, base, *made), chosen, TOKENS)
    work = [(name, i) for i in range(len(chosen)) for name in expected]
    settings = {"lora_modules": modules(six), "max_loras": 4, "num_blocks": 1024, "max_num_batched_tokens": 256}
    with deploy(model=str(base), **topology, **settings) as deployment, ThreadPoolExecutor(len(work)) as threads:
        for _ in range(2):
            body = {"max_tokens": TOKENS, "ignore_eos": True}
            replies = threads.map(
                lambda one, body=body: complete(
                    deployment, model=one[0] or deployment.config.name, prompt=chosen[one[1]], **body
                ),
                work,
            )
            for (name, i), reply in zip(work, replies, strict=True):
                assert reply["choices"][0]["token_ids"] == expected[name][i], f"{name or 'the base'}, prompt {i}"
                assert reply["model"] == (name or deployment.config.name)
        assert metric(deployment, "handover_fallbacks_total") == 0
        wait_until(lambda: not any(blocks_held(deployment).values()), "all blocks are freed")
        if topology is PD:
            tokens = sum(map(len, chosen)) * 2 * len(expected)
            source = "prompt_tokens_by_source_total"
            wait_until(lambda: metric(deployment, source, role="decode") == tokens, "the heartbeats after the answers")
            assert metric(deployment, source, role="decode", source="computed") == 0, "all KV was handed over"


def activated(base: Path, merged: Path, prompt: list[int], start: int) -> list[int]:
    """Return the greedy answer of merged weights to a prompt whose KV before `start` is that of the base."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (base, merged)]
    cache, answer = DynamicCache(), list[int]()
    with torch.inference_mode():
        models[0](torch.tensor([prompt[:start]]), past_key_values=cache)
        rest = prompt[start:]
        while len(answer) < TOKENS:
            rest = [int(models[1](torch.tensor([rest]), past_key_values=cache).logits[0, -1].argmax())]
            answer += rest
    return answer


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_an_activated_adapter_shares_the_kv_before_its_invocation(
    architecture: str,
    six_of: Callable[[str], dict[str, Made]],
    checkpoint: Callable[..., Path],
    generate: Any,
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    tmp_path: Path,
) -> None:
    base, invocation, text = checkpoint(architecture, dtype="float32"), [5, 6, 7], [i % 50 + 10 for i in range(70)]
    six = six_of(architecture)
    made = six["small"]
    path = with_settings(tmp_path / "act", made.path, alora_invocation_tokens=invocation)
    merged = merge(tmp_path / "merged", base, *made)
    prompts = [text + invocation + [8, 9, i] for i in range(3)] + [text[:30] + invocation + text + invocation]
    expected = [activated(base, merged, one, len(one) - (3 if i == 3 else 6)) for i, one in enumerate(prompts)]
    assert not any(
        answer in others
        for answer, *others in zip(expected, *(generate(one, prompts, TOKENS) for one in (base, merged)), strict=True)
    )
    settings = {"lora_modules": f"act={path},{modules(six)}", "served_model_name": "base", "num_blocks": 512}
    with deploy(model=str(base), **PD, **settings) as deployment, ThreadPoolExecutor(8) as threads:
        body = {"max_tokens": TOKENS, "ignore_eos": True}
        complete(deployment, model="base", prompt=text, **body)
        # With others in the same steps, and in chunks that begin before the invocation and end behind it.
        work = [(name, one) for one in prompts for name in ("act", "large")]
        replies = [*threads.map(lambda one: complete(deployment, model=one[0], prompt=one[1], **body), work)][::2]
        assert [reply["choices"][0]["token_ids"] for reply in replies] == expected
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert cached[0] >= 64 and cached[3] >= 16, "the blocks before the invocation are the base's"
        assert metric(deployment, "handover_fallbacks_total") == 0
        again = complete(deployment, model="base", prompt=prompts[0], **body)
        assert again["choices"][0]["token_ids"] == generate(base, prompts[:1], TOKENS)[0]
        refused = httpx.post(f"{deployment.url}/v1/completions", json={"model": "act", "prompt": text, **body})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "adapter_not_invoked"


def test_what_clients_see(
    six: dict[str, Made],
    checkpoint: Callable[..., Path],
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Models, chats, choices, grammars, beams and errors; `merged` answers with an adapter's weights in the base's."""
    base = checkpoint("llama", dtype="float32")
    merged_model = merge(tmp_path / "merged", base, *six["small"])
    settings: dict[str, Any] = {"num_blocks": 512, "served_model_name": "base"}
    with (
        deploy(model=str(base), lora_modules=f"sql={six['small'].path},{modules(six)}", **settings) as deployment,
        deploy(model=str(merged_model), **BOTH, **settings) as merged,
    ):
        bodies: list[dict[str, Any]] = [
            {"prompt": [1, 2, 3] * 20, "n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True},
            {"prompt": [4, 5, 6] * 9, "guided_regex": "[a-z]{9}"},
            {"prompt": [7, 8] * 11, "use_beam_search": True, "n": 3, "temperature": 0, "ignore_eos": True},
            {"prompt": [9, 9, 1], "repetition_penalty": 1.3, "logprobs": 1, "ignore_eos": True},
        ]
        for body in bodies:
            body["max_tokens"] = 12
            answers = [
                [choice["token_ids"] for choice in complete(one, model=name, **body)["choices"]]
                for one, name in ((deployment, "small"), (merged, "base"), (deployment, "base"))
            ]
            assert answers[0] == answers[1] != answers[2], body
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        texts = [
            httpx.post(f"{one.url}/v1/chat/completions", json={"model": name, **chat}).json()
            for one, name in ((deployment, "small"), (merged, "base"))
        ]
        assert texts[0]["choices"] == texts[1]["choices"] and texts[0]["model"] == "small"

        cards = {card["id"]: card for card in httpx.get(f"{deployment.url}/v1/models").json()["data"]}
        assert cards.keys() == {"base", "sql", *six}
        assert (cards["base"]["parent"], cards["small"]["parent"]) == (None, "base")
        assert cards["small"]["root"] == str(six["small"].path)
        assert httpx.get(f"{deployment.url}/v1/models/small").json() == cards["small"]
        unknown = httpx.post(f"{deployment.url}/v1/completions", json={"model": "other", "prompt": "x"})
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
        exec(compile(example.replace("http://localhost:8000", deployment.url), DOCUMENT.name, "exec"), {})
        assert "\nsql " in capsys.readouterr().out
        counted = httpx.post(f"{deployment.url}/tokenize", json={"model": "small", "prompt": "abc"})
        assert counted.json()["count"] == 3


def test_streams_with_adapters_migrate(
    six: dict[str, Made],
    checkpoint: Callable[..., Path],
    generate: Any,
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    """A decode instance is killed while it generates; the router restarts at the end, and knows the adapters all the same."""
    base, tokens = checkpoint("llama", dtype="float32"), 400
    chosen = [[i, 7, 9] * 12 for i in range(4)]
    merged = merge(tmp_path / "small", base, *six["small"])
    expected = {"small": generate(merged, chosen, tokens), "base": generate(base, chosen, tokens)}
    settings = {"lora_modules": modules(six), "served_model_name": "base", "num_blocks": 512}
    with deploy(model=str(base), prefill=1, decode=2, **settings) as deployment, ThreadPoolExecutor(8) as threads:
        futures = {
            (name, i): threads.submit(
                complete, deployment, model=name, prompt=chosen[i], max_tokens=tokens, ignore_eos=True
            )
            for i in range(4)
            for name in expected
        }

        def busy() -> list[str]:
            names = ("decode-0", "decode-1")  # which of them have requests, the router decides
            return [one for one in names if metric(deployment, "generation_tokens_total", instance=one) > 40]

        wait_until(busy, "one of them works")
        os.kill(deployment.child(busy()[0]).pid, signal.SIGKILL)
        for (name, i), future in futures.items():
            assert future.result(600)["choices"][0]["token_ids"] == expected[name][i], (name, i)
        assert metric(deployment, "migrations_total") > 0
        assert metric(deployment, "adapter_requests_total", adapter="small") == len(chosen)
        assert metric(deployment, "adapter_tokens_total", adapter="small", of="output") == len(chosen) * tokens
        os.kill(deployment.child("router").pid, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return bool(deployment.poll_ready())
            except httpx.TransportError:
                return False

        wait_until(is_back, "the router is back")
        reply = complete(deployment, model="small", prompt=chosen[0], max_tokens=8, ignore_eos=True)
        assert reply["choices"][0]["token_ids"] == expected["small"][0][:8]


def test_two_fleets_with_other_weights_of_one_name(
    checkpoint: Callable[..., Path],
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    shm_url: str,
    tmp_path: Path,
) -> None:
    """They share a store, and not one block: neither for other tensors nor for another alpha."""
    base = checkpoint("llama", dtype="float32")
    settings: dict[str, Any] = {"model": str(base), "connector": shm_url, "num_blocks": 128, **BOTH}
    first = make_adapter(tmp_path / "first", base, seed=1)
    other = make_adapter(tmp_path / "other", base, seed=2)
    alpha = with_settings(tmp_path / "alpha", first, lora_alpha=20)
    same = with_settings(tmp_path / "same", first, lora_dropout=0.1)
    for path in (first, other, alpha, same):
        with deploy(**settings, lora_modules=f"x={path}", store_generated="on") as deployment:
            complete(deployment, model="x", prompt=[3, 5, 8] * 40, max_tokens=4, ignore_eos=True)
            name = "prompt_tokens_by_source_total"
            wait_until(lambda: metric(deployment, name) == 120, "the heartbeats after the answer")  # noqa: B023
            assert (metric(deployment, name, source="loaded") > 0) == (path is same)


def test_adapters_are_loaded_replaced_and_unloaded_under_load(
    checkpoint: Callable[..., Path],
    generate: Any,
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """In vLLM's words, with the admin key: requests keep the weights with which they began."""
    base, folder, tokens = checkpoint("llama", dtype="float32"), tmp_path / "adapters", 100
    make_adapter(folder / "first", base, seed=1)
    with_settings(folder / "second", folder / "first", lora_alpha=40)
    prompt = [[4, 9, 2] * 15]
    first, second = (
        generate(merge(tmp_path / name, base, folder / name, {"": alpha / 8}), prompt, tokens)[0]
        for name, alpha in (("first", 16), ("second", 40))
    )
    assert first != second
    settings: dict[str, Any] = {"served_model_name": "base", "num_blocks": 512, "lora_folder": str(folder)}
    with (
        deploy(model=str(base), admin_key="secret", **settings) as deployment,
        ThreadPoolExecutor(16) as threads,
    ):

        def change(action: str, **body: Any) -> tuple[int, str]:
            url = f"{deployment.url}/v1/{action}_lora_adapter"
            reply = httpx.post(url, json={"lora_name": "sql", **body}, headers={"Authorization": "Bearer secret"})
            return reply.status_code, reply.text

        def answer() -> list[int]:
            body = {"model": "sql", "prompt": prompt[0], "max_tokens": tokens, "ignore_eos": True}
            ids: list[int] = complete(deployment, **body)["choices"][0]["token_ids"]
            return ids

        assert httpx.post(f"{deployment.url}/v1/load_lora_adapter", json={"lora_name": "sql"}).status_code == 401
        assert change("load", lora_path="first") == (200, "Success: LoRA adapter 'sql' added successfully.")
        status, text = change("load", lora_path="second")
        assert status == 400 and "has already been loaded" in text and "load_inplace" in text
        for name, path, message in (
            ("x", "nowhere", "cannot be read"),
            ("x", "../first", "outside of --lora-folder"),
            ("base", "first", "name of the model"),
        ):
            status, text = change("load", lora_name=name, lora_path=path)
            assert status == 400 and message in text, text
        old = [threads.submit(answer) for _ in range(4)]
        assert old[0].result(600) == first
        old += [threads.submit(answer) for _ in range(4)]
        assert change("load", lora_path="second", load_inplace=True)[0] == 200
        new = [threads.submit(answer) for _ in range(4)]
        assert all(future.result(600) == second for future in new)
        assert all(future.result(600) in (first, second) for future in old)
        os.kill(deployment.child("prefill-0").pid, signal.SIGKILL)
        os.kill(deployment.child("router").pid, signal.SIGKILL)
        deployment.wait_ready(600)
        assert answer() == second, "decode has told the new router, and that the new prefill"
        status, text = change("unload")
        assert (status, text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert change("unload")[0] == 404
        gone = httpx.post(f"{deployment.url}/v1/completions", json={"model": "sql", "prompt": "x"})
        assert gone.status_code == 404


def test_two_routers_know_the_same_adapters(
    folder: Path,
    away: dict[str, Any],
    answers: Callable[[str], list[list[int]]],
    deploy: Deploy,
    wait_until: Callable[..., None],
) -> None:
    """Whichever router was told to load, replace or unload; one that restarts knows them, too."""
    with deploy(**away, workers=2) as deployment:
        urls = [*deployment.routers]

        def order(router: int, action: str, **body: Any) -> None:
            url, headers = f"{urls[router]}/v1/{action}_lora_adapter", {"Authorization": "Bearer secret"}
            reply = httpx.post(url, json={"lora_name": "sql", **body}, headers=headers, timeout=600)
            assert reply.status_code == 200, reply.text

        def asked(router: int) -> list[list[int]] | int:
            found = []
            for prompt in ASKED:
                body = {"model": "sql", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
                url = f"{urls[router]}/v1/completions"
                reply = httpx.post(url, json=body | {"return_token_ids": True}, timeout=600)
                if reply.status_code != 200:
                    return reply.status_code
                found.append(reply.json()["choices"][0]["token_ids"])
            return found

        def restart_prefill() -> None:
            pid = deployment.child("prefill-0").pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: deployment.poll_ready() and deployment.child("prefill-0").pid != pid, "prefill is back")

        for router, name in ((0, "first"), (1, "second"), (0, "first")):
            order(router, "load", lora_path=name, load_inplace=True)
            assert asked(router) == answers(name)
            wait_until(lambda other=1 - router, name=name: asked(other) == answers(name), "the other router knows it")
        restart_prefill()
        wait_until(lambda: asked(0) == asked(1) == answers("first"), "prefill is told of it")
        order(1, "unload")
        assert asked(1) == 404
        wait_until(lambda: asked(0) == 404, "the other router knows it")
        restart_prefill()
        assert asked(0) == asked(1) == 404, "what was unloaded stays so"


def flip(url: str, of: Path) -> bool:
    """Invert a bit of an adapter's weights in a KV store; return whether they are there."""
    data = (of / "adapter_model.safetensors").read_bytes()
    piece = data[len(data) // 2 :][:24]
    if url.startswith("shm://"):
        for path in Path("/dev/shm").glob(f"pdserve-{url.removeprefix('shm://').partition('?')[0]}@*"):
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
                if (at := segment.find(piece)) >= 0:
                    segment[at] ^= 1
                    return True
        return False
    with closing(redis.Redis.from_url(url)) as client:
        for key in client.scan_iter(count=1000):
            value: Any = client.get(key)
            if (at := value.find(piece)) >= 0:
                client.setrange(key, at, bytes([piece[0] ^ 1]))
                return True
    return False


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with the adapters "first" and "second"; only instances that were started with it have them."""
    base, folder = checkpoint("llama", dtype="float32"), tmp_path / "adapters"
    make_adapter(folder / "first", base, seed=1)
    make_adapter(folder / "second", base, seed=2)
    return folder


@pytest.fixture
def answers(checkpoint: Callable[..., Path], generate: Any, folder: Path) -> Callable[[str], list[list[int]]]:
    """answers(name) → what the base, merged with this adapter, answers to ASKED."""
    base = checkpoint("llama", dtype="float32")

    @cache
    def of(name: str) -> list[list[int]]:
        merged = merge(folder.parent / f"merged {name}", base, folder / name, {"": 2.0})
        return generate(merged, ASKED, TOKENS)  # type: ignore[no-any-return]

    return of


@pytest.fixture
def away(folder: Path, checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """Settings of a fleet whose prefill instance has no folder, and takes adapters from the KV store."""
    flags = {"prefill": ["--lora-folder", str(folder.parent / "empty")]}
    model = {"model": str(checkpoint("llama", dtype="float32")), "served_model_name": "base", "num_blocks": 256}
    return {**model, "flags": flags, "lora_folder": str(folder), "admin_key": "secret"}


def change(deployment: Any, action: str, **body: Any) -> tuple[int, str]:
    url, headers = f"{deployment.url}/v1/{action}_lora_adapter", {"Authorization": "Bearer secret"}
    reply = httpx.post(url, json={"lora_name": "sql", **body}, headers=headers, timeout=600)
    return reply.status_code, reply.text


def ask(deployment: Any, complete: Callable[..., dict[str, Any]], model: str = "sql") -> list[list[int]]:
    body = {"model": model, "max_tokens": TOKENS, "ignore_eos": True}
    return [complete(deployment, prompt=prompt, **body)["choices"][0]["token_ids"] for prompt in ASKED]


@pytest.mark.parametrize(("kind", "ranks"), [("shm", 2), ("redis", 1)])
def test_an_instance_without_the_folder_takes_adapters_from_the_kv_store(
    kind: str,
    ranks: int,
    folder: Path,
    away: dict[str, Any],
    answers: Callable[[str], list[list[int]]],
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    shm_url: str,
    start_redis: Callable[..., Any],
) -> None:
    """It answers exactly after an order to load, after a restart, and after a byte was flipped in the store."""
    url = shm_url if kind == "shm" else start_redis().url
    with deploy(**away, connector=url, tensor_parallel_size=ranks) as deployment:
        count = partial(metric, deployment, "adapter_transfers_total")

        def check(name: str) -> None:
            assert ask(deployment, complete) == answers(name)
            assert metric(deployment, "handover_fallbacks_total") == 0

        assert change(deployment, "load", lora_path="first")[0] == 200
        check("first")
        for role, direction in (("prefill", "load"), ("decode", "store")):  # each has heartbeats of its own
            one = partial(count, role=role, direction=direction, outcome="ok")
            wait_until(lambda one=one: one() == 1, f"the adapter is counted by {role}")
        assert flip(url, folder / "first")
        os.kill(deployment.child("prefill-0").pid, signal.SIGKILL)
        back = deployment.poll_ready  # which starts it again
        wait_until(lambda: back() and count(role="prefill", outcome="corrupt") == 1, "the byte is found")
        wait_until(lambda: count(role="prefill", direction="load", outcome="ok") >= 1, "it is stored again")
        check("first")
        assert change(deployment, "load", lora_path="second", load_inplace=True)[0] == 200
        check("second")
        status, text = change(deployment, "load", lora_name="x", lora_path="nowhere")
        assert status == 400 and "nowhere/adapter_config.json cannot be read" in text
        assert change(deployment, "unload")[0] == 200
        assert change(deployment, "load", lora_path="first")[0] == 200
        check("first")


def test_adapters_without_a_store_that_answers(
    folder: Path,
    away: dict[str, Any],
    answers: Callable[[str], list[list[int]]],
    generate: Any,
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    start_redis: Callable[..., Any],
) -> None:
    """Dead or hanging: the order ends in a sentence, no instance keeps the adapter, and the base answers on."""
    server = start_redis()
    with deploy(**away, connector=f"{server.url}?timeout=2") as deployment:
        expected, log = generate(Path(away["model"]), ASKED, TOKENS), dict[str, str]()
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(server.pid, fault)
            status, log[fault.name] = change(deployment, "load", lora_path="first")
            assert status == 400 and "prefill" in log[fault.name] and "cannot be read" in log[fault.name]
            models = [one["id"] for one in httpx.get(f"{deployment.url}/v1/models").json()["data"]]
            assert models == ["base"]
            assert ask(deployment, complete, "base") == expected
        count = partial(metric, deployment, "adapter_transfers_total", role="decode", direction="store")
        wait_until(lambda: count(outcome="unavailable") == 2, "both are counted")
        server.kill()
        server.start()
        assert change(deployment, "load", lora_path="first")[0] == 200
        assert ask(deployment, complete) == answers("first")


def test_an_instance_is_killed_while_it_loads_an_adapter(
    away: dict[str, Any],
    answers: Callable[[str], list[list[int]]],
    deploy: Deploy,
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    start_redis: Callable[..., Any],
) -> None:
    """The order ends without it, and once it is back, it takes the adapter from the KV store."""
    server = start_redis()
    with deploy(**away, connector=server.url) as deployment, ThreadPoolExecutor(1) as thread:
        prefill = deployment.child("prefill-0").pid
        os.kill(prefill, signal.SIGSTOP)
        loaded = thread.submit(change, deployment, "load", lora_path="first")
        os.kill(prefill, signal.SIGKILL)
        assert loaded.result(600)[0] == 200
        back, count = deployment.poll_ready, partial(metric, deployment, "adapter_transfers_total", role="prefill")
        wait_until(lambda: back() and count(direction="load", outcome="ok") == 1, "it is back, and has the adapter")
        assert ask(deployment, complete) == answers("first")
        assert metric(deployment, "handover_fallbacks_total") == 0
        os.kill(server.pid, signal.SIGSTOP)  # decode stores it, or prefill loads it, until the end of a time-out
        loaded = thread.submit(change, deployment, "load", lora_path="second", load_inplace=True)
        os.kill(deployment.child("prefill-0").pid, signal.SIGKILL)
        os.kill(server.pid, signal.SIGCONT)
        assert loaded.result(600)[0] == 200
        wait_until(lambda: back() and count(outcome="ok") >= 1, "it is back again")
        assert ask(deployment, complete) == answers("second")
