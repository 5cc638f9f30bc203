"""Embeddings over real processes: those of transformers' hidden states, whole, shortened, and in either encoding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

INPUTS = [[i % 90 for i in range(length)] for length in (1, 16, 70, 100)]
MODES = {"last": lambda states: states[-1], "cls": lambda states: states[0], "mean": lambda states: states.mean(dim=0)}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": []}, "empty"),
    ("/v1/embeddings", {"input": [[10**6]]}, "token id"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions must be from 1 to 64"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": [[1] * 2000]}, "has 2000 tokens; there is room for"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "as many texts"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
]


def reference(path: Path, mode: str) -> list[Any]:
    model = transformers.AutoModel.from_pretrained(path).eval()
    vectors = []
    for ids in INPUTS:
        with torch.inference_mode():
            vector = MODES[mode](model(torch.tensor([ids])).last_hidden_state[0])
        vectors.append((vector / vector.norm()).numpy())
    return vectors


@pytest.mark.parametrize(
    ("mode", "topology"),
    [("last", {}), pytest.param("mean", {}, marks=pytest.mark.slow), ("cls", {"prefill": 0, "decode": 0, "both": 1})],
)
def test_embeddings_equal_hidden_states(
    mode: str, topology: dict[str, int], checkpoint: Callable[..., Path], deploy: Callable[..., Any]
) -> None:
    path = checkpoint("qwen3")
    roles = ("prefill", "decode", "both")
    flags = {role: ["--pooling", mode] for role in roles}
    topology = topology or {"prefill": 1, "decode": 1}
    with deploy(model=str(path), num_blocks=256, max_num_batched_tokens=32, flags=flags, **topology) as deployment:
        name = deployment.config.name
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
        expected = reference(path, mode)
        for _ in range(2):  # the second time with prefix hits, where they are of use
            answer = client.embeddings.create(model=name, input=INPUTS, encoding_format="float")
            for one, vector in zip(answer.data, expected, strict=True):
                assert one.embedding == pytest.approx(vector.tolist(), abs=2e-5)
        assert answer.usage.prompt_tokens == sum(map(len, INPUTS))
        in_base64 = client.embeddings.create(model=name, input=INPUTS)  # the client asks for base64 and decodes it
        assert [one.embedding for one in in_base64.data] == [one.embedding for one in answer.data]
        short = client.embeddings.create(model=name, input=INPUTS[2], dimensions=8).data[0].embedding
        assert short == pytest.approx((expected[2][:8] / np.linalg.norm(expected[2][:8])).tolist(), abs=2e-5)
        last = [prompt[-16:] for prompt in INPUTS]
        cut = client.embeddings.create(model=name, input=INPUTS, extra_body={"truncate_prompt_tokens": 16})
        assert cut.data == client.embeddings.create(model=name, input=last).data and cut.usage.prompt_tokens == 49
        for url, body, message in BAD:
            reply = httpx.post(deployment.url + url, json=body)
            assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text
        texts = ["Paris is a city", "Rome", "Paris is a town"]
        vectors = [np.array(one.embedding) for one in client.embeddings.create(model=name, input=texts).data]
        similarities = [float(vectors[0] @ vector) for vector in vectors]
        scores = httpx.post(f"{deployment.url}/score", json={"text_1": texts[0], "text_2": texts}).json()["data"]
        assert [score["score"] for score in scores] == pytest.approx(similarities, abs=1e-5)
        ranking = httpx.post(
            f"{deployment.url}/rerank", json={"query": texts[0], "documents": texts, "top_n": 2}
        ).json()
        assert ranking == httpx.post(
            f"{deployment.url}/v1/rerank", json={"query": texts[0], "documents": texts, "top_n": 2}
        ).json() | {"id": ranking["id"]}
        order = sorted(range(3), key=lambda i: -similarities[i])[:2]
        assert [one["index"] for one in ranking["results"]] == order
        assert [one["document"]["text"] for one in ranking["results"]] == [texts[i] for i in order]
        completion = client.completions.create(model=name, prompt=INPUTS[1], max_tokens=3)
        assert completion.usage is not None and completion.usage.completion_tokens == 3, "it generates as well"


def test_sentence_transformers_files_decide(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    for file in checkpoint("qwen3").iterdir():
        (path / file.name).symlink_to(file)
    with deploy(model=str(path), prefill=0, decode=0, both=1) as deployment:
        reply = httpx.post(f"{deployment.url}/v1/embeddings", json={"input": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_embeddings")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    types = [
        {"idx": i, "path": at, "type": f"sentence_transformers.models.{name}"} for i, (at, name) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(types))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with deploy(model=str(path), prefill=0, decode=0, both=1) as deployment:
        found = httpx.post(f"{deployment.url}/v1/embeddings", json={"input": INPUTS[1]}).json()
        expected = reference(path, "mean")[1].tolist()
        assert found["data"][0]["embedding"] == pytest.approx(expected, abs=2e-5)
