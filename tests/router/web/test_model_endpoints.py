"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.types import Message
from tokenizers import Tokenizer as RustTokenizer

from pdserve.router.api import http_responses, parsing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application

if TYPE_CHECKING:
    from tests.router.conftest import Client, ScriptedBackend

MAX_TEXT = 4_194_304  # characters
CHATTING: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def test_models(client: Client, backend: ScriptedBackend) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card.items() >= {"id": "demo", "object": "model", "owned_by": "pdserve", "max_model_len": 256}.items()
    assert Path(card["root"], "tokenizer.json").exists(), "vLLM's benchmark client loads it from there"
    assert client.get("/v1/models/demo").json() == card
    assert client.get("/v1/models/org/other").json()["error"]["message"] == "the model 'org/other' does not exist"
    assert len(client.get("/v1/models/" + "a" * 60_000).text) < 400
    backend.info = None
    assert client.get("/v1/models").json() == {"object": "list", "data": []}


def test_tokenize_and_back(client: Client, tokenizer: Tokenizer) -> None:
    text = "hello 漢<|end|>"
    answer = client.post("/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    strings = [tokenizer.id_to_token(token_id) for token_id in ids]
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert client.post("/detokenize", {"model": "demo", "tokens": ids}).json() == {"prompt": text}


def test_the_text_of_few_tokens_may_be_too_long(
    make_app: Callable[..., Application], make_client: type[Client], tokenizer_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    with_spaces = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with_spaces.add_tokens([" " * 128])
    with_spaces.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    client, tokens = (
        make_client(make_app(tokenizer, max_body_bytes=1 << 20)),
        [tokenizer.vocab_size - 1] * (MAX_TEXT // 128),
    )
    assert len(client.post("/detokenize", {"tokens": tokens}).json()["prompt"]) == MAX_TEXT
    refused = client.post("/detokenize", {"tokens": [*tokens, 5]})
    assert refused.status_code == 400 and f"at most {MAX_TEXT} are returned at once" in refused.text


def test_tokenize_a_chat(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.post("/tokenize", CHATTING).json()
    assert answer["tokens"] == tokenizer.render_chat(CHATTING["messages"])
    assert answer["token_strs"] is None
    shorter = client.post("/tokenize", {**CHATTING, "add_generation_prompt": False}).json()
    assert shorter["count"] < answer["count"]
    said = [*CHATTING["messages"], {"role": "assistant", "content": "he"}]
    opened = client.post("/tokenize", {"messages": said, "continue_final_message": True}).json()
    assert opened["tokens"] == [*answer["tokens"], *tokenizer.encode("he")]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "send either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "send either prompt or messages"),
        (
            "/tokenize",
            {**CHATTING, "add_special_tokens": True},
            "add_special_tokens needs a prompt: the chat template writes those of messages",
        ),
        ("/tokenize", {"promt": "a"}, "unknown field 'promt'; did you mean 'prompt'?"),
        ("/detokenize", {}, "tokens is required"),
        ("/detokenize", {"tokens": [300]}, "tokens holds the token id 300; this model's ids are 0 to 299"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be a valid integer, not a string"),
        ("/v1/embeddings", {"input": [[40] * 256]}, "a text of input has 256 tokens; there is room for 255"),
        ("/v2/rerank", {"query": "a", "documents": ["b", ""]}, "a text of documents is empty: it has no tokens"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "a text of text_1 is empty: it has no tokens"),
        ("/v1/embeddings", {"prompt": "a"}, "unknown field 'prompt'; did you mean 'input'?"),
    ],
)
def test_invalid_bodies(client: Client, path: str, body: object, message: str) -> None:
    response = client.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_others_are_served_while_many_texts_are_embedded(app: Application, backend: ScriptedBackend) -> None:
    turns = set[int]()
    body = [{"type": "http.request", "body": json.dumps({"input": ["a"] * 1000}).encode()}]

    async def receive() -> Message:
        return body.pop() if body else await asyncio.Future()

    async def send(message: Message) -> None:
        pass

    async def watch() -> None:
        while True:
            turns.add(len(backend.streams))
            await asyncio.sleep(0)

    async def scenario() -> None:
        other = asyncio.create_task(watch())
        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "query_string": b"", "headers": []}
        await app(scope, receive, send)
        other.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 600))
    assert len(turns) > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 40_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [1] * 20_000}),
        ("/detokenize", {"tokens": ["1"] * 20_000}),
        ("/detokenize", {"tokens": [10**6] * 20_000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 40_000}]}),
        ("/v1/embeddings", {"input": ["a" * 200] * 200}),
        ("/v1/embeddings", {"input": ["a"] * 1000}),
        ("/rerank", {"query": "a", "documents": ["a" * 200] * 200}),
    ],
)
def test_large_bodies_are_parsed_and_answered_in_threads(
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
    threads_of: Callable[..., list[threading.Thread]],
    path: str,
    body: dict[str, Any],
) -> None:
    """The client's event loop, which is also the server's, runs in this thread."""
    parsing_in, decoding_in = threads_of(parsing, "parse_json"), threads_of(tokenizer, "decode")
    answering_in = threads_of(http_responses, "to_json")
    response = make_client(make_app(tokenizer, max_body_bytes=1_000_000)).post(path, body)
    long = response.status_code == 200 and path != "/v1/messages/count_tokens"
    threads = [*parsing_in, *decoding_in, *(answering_in if long else ())]
    assert parsing_in and answering_in and threading.current_thread() not in threads
