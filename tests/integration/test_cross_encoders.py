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


Classifier = tuple[Path, Callable[..., torch.Tensor]]


def make_classifier(checkpoint: Callable[..., Path], path: Path, num_labels: int) -> Classifier:
    """Save a random classifier; return its folder and what transformers says of a text or a pair: the logits."""
    base = checkpoint("qwen3", dtype="float32")
    config = transformers.AutoConfig.from_pretrained(base, num_labels=num_labels)
    config.id2label = {number: f"kind {number}" for number in range(num_labels)}
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def logits(*texts: str) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
        return found

    return path, logits


def test_classes_equal_transformers(
    checkpoint: Callable[..., Path], deploy: Callable[..., Any], tmp_path: Path
) -> None:
    path, logits = make_classifier(checkpoint, tmp_path / "model", 3)
    expected = [logits(text).softmax(dim=0).tolist() for text in DOCUMENTS if text]
    texts = [text for text in DOCUMENTS if text]
    with deploy(model=str(path), num_blocks=64, prefill=1, decode=1) as deployment:
        reply = httpx.post(f"{deployment.url}/classify", json={"input": texts}).json()
        assert [one["probs"] for one in reply["data"]] == [pytest.approx(one, abs=1e-5) for one in expected]
        assert [one["label"] for one in reply["data"]] == [f"kind {one.index(max(one))}" for one in expected]
        assert {one["num_classes"] for one in reply["data"]} == {3} and reply["usage"]["prompt_tokens"] > 3
        [one] = httpx.post(f"{deployment.url}/classify", json={"input": texts[0]}).json()["data"]
        assert one["probs"] == pytest.approx(expected[0], abs=1e-5)
        for url, body in (
            ("/classify", {"input": []}),
            ("/classify", {"input": 5}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            assert httpx.post(deployment.url + url, json=body).status_code == 400


def test_scores_equal_transformers(checkpoint: Callable[..., Path], deploy: Callable[..., Any], tmp_path: Path) -> None:
    path, logits = make_classifier(checkpoint, tmp_path / "model", 1)
    expected = [float(logits(QUERY, document).sigmoid()) for document in DOCUMENTS]
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
