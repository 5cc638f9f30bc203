"""KV of one API key's prompts, as another key sees it on every surface: by the numbers of cached tokens, never by time."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

from pdserve.cli.deployment import free_port

KEYS = """
[alice]
key = "of alice"
group = "team"
[bob]
key = "of bob"
group = "team"
[mallory]
key = "of mallory"
"""
LENGTH = 50  # tokens of a prompt, so that three blocks of 16 can be cached
Send = Callable[[str, int], int]


class Surfaces:
    """Sends prompt number n as an API key; each method returns the number of cached tokens in the answer."""

    def __init__(self, url: str, grpc_port: int) -> None:
        self.url, self.grpc_port = url, grpc_port

    def completion(self, key: str, number: int, **body: Any) -> int:
        reply = self._post(key, "completions", prompt=_ids(number), max_tokens=1, **body)
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def choices(self, key: str, number: int) -> int:
        return self.completion(key, number, n=2, temperature=1)

    def beams(self, key: str, number: int) -> int:
        return self.completion(key, number, use_beam_search=True, n=2)

    def salted(self, key: str, number: int) -> int:
        return self.completion(key, number, cache_salt="known to all")

    def chat(self, key: str, number: int) -> int:
        reply = self._post(key, "chat/completions", messages=_messages(number), max_tokens=1)
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def responses(self, key: str, number: int) -> int:
        reply = self._post(key, "responses", input=_messages(number), max_output_tokens=1)
        return int(reply["usage"]["input_tokens_details"]["cached_tokens"])

    def anthropic(self, key: str, number: int) -> int:
        reply = self._post(key, "messages", messages=_messages(number), max_tokens=1)
        return int(reply["usage"]["cache_read_input_tokens"])

    def batch(self, key: str, number: int) -> int:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=f"of {key}", max_retries=0) as client:
            body = {"prompt": _ids(number), "max_tokens": 1}
            data = httpx.Request("POST", self.url, json={**line, "body": body}).content
            file = client.files.create(file=("in.jsonl", data), purpose="batch")
            batch: Any = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            while batch.status in ("validating", "in_progress"):
                batch = client.batches.retrieve(batch.id)
            answer = httpx.Response(200, content=client.files.content(batch.output_file_id).read()).json()
        return int(answer["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])

    def rpc(self, key: str, number: int) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            request = vllm.GenerateRequest(
                tokenized=vllm.TokenizedInput(input_ids=_ids(number)), sampling_params=vllm.SamplingParams(max_tokens=1)
            )
            metadata = [("authorization", f"Bearer of {key}")]
            [answer] = stubs.VllmEngineStub(channel).Generate(request, metadata=metadata)
        return int(answer.complete.cached_tokens)

    def _post(self, key: str, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer of {key}"}
        reply = httpx.post(f"{self.url}/v1/{path}", json={"model": "demo", **body}, headers=headers, timeout=600)
        assert reply.status_code == 200, reply.text
        return reply.json()


SURFACES = [name for name in vars(Surfaces) if not name.startswith("_")]


def _ids(n: int) -> list[int]:
    return [100 + n] * LENGTH


def _messages(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{n} " * LENGTH}]


def serve(deploy: Any, folder: Path, *flags: str) -> Any:
    (folder / "keys.toml").write_text(KEYS)
    router = ["--keys-file", str(folder / "keys.toml"), "--batch-folder", str(folder / "batches"), *flags]
    return deploy(grpc_port=free_port(), flags={"router": router})


@pytest.fixture(scope="module")
def surfaces(deploy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surfaces]:
    with serve(deploy, tmp_path_factory.mktemp("tenants")) as deployment:
        yield Surfaces(deployment.url, deployment.config.grpc_port)


NUMBERS = count()


@pytest.mark.parametrize("name", SURFACES)
def test_a_prompt_of_another_key_is_not_cached(surfaces: Surfaces, name: str) -> None:
    send: Send = getattr(surfaces, name)
    n = next(NUMBERS)
    assert send("alice", n) == 0
    assert send("mallory", n) == 0, "of another key"
    assert send("alice", n) == send("bob", n) > 0, "of its own key and group"


def test_keys_share_their_kv_only_if_told_to(deploy: Any, tmp_path: Path) -> None:
    with serve(deploy, tmp_path, "--share-kv") as deployment:
        shared = Surfaces(deployment.url, deployment.config.grpc_port)
        assert shared.completion("alice", 0) == 0
        assert shared.completion("mallory", 0) > 0
