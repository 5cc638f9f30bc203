"""Cross-encoders over real processes: /score and /rerank return the scores of transformers, and nothing else is served."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

QUERY = "what is a city?"
DOCUMENTS = ["Paris is a city", "", "Rome is another one, and so is every other place of its size", "a town"]


def test_scores_equal_transformers(checkpoint: Callable[..., Path], deploy: Callable[..., Any], tmp_path: Path) -> None:
    base, path = checkpoint("qwen3", dtype="float32"), tmp_path / "model"
    config = transformers.AutoConfig.from_pretrained(base, num_labels=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    expected = []
    for document in DOCUMENTS:
        with torch.inference_mode():
            expected.append(float(model(**tokenizer(QUERY, document, return_tensors="pt")).logits.sigmoid()))
    with deploy(model=str(path), num_blocks=64, prefill=1, decode=1) as deployment:

        def post(url: str, **body: Any) -> Any:
            return httpx.post(deployment.url + url, json=body)

        for _ in range(2):
            scores = post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
            assert [one["score"] for one in scores] == pytest.approx(expected, abs=1e-5)
        [pair] = post("/score", text_1=[QUERY], text_2=DOCUMENTS[2]).json()["data"]
        assert pair["score"] == pytest.approx(expected[2], abs=1e-5)
        ranking = post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=3).json()["results"]
        assert [one["index"] for one in ranking] == sorted(range(4), key=lambda index: -expected[index])[:3]
        assert [one["relevance_score"] for one in ranking] == pytest.approx(
            sorted(expected, reverse=True)[:3], abs=1e-5
        )
        for url, body, code in (
            ("/v1/embeddings", {"input": "a"}, "no_embeddings"),
            ("/v1/completions", {"prompt": "a"}, "not_generative"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "not_generative"),
        ):
            reply = post(url, **body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), reply.text
