"""Fixtures: small tokenizers, a scripted fake backend, the HTTP application on top of both, and clients for it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import structs
from pydantic import BaseModel
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from pdserve.beam_search import Hypothesis
from pdserve.config import RouterConfig
from pdserve.errors import RequestError
from pdserve.lifetime import Stage
from pdserve.output import Output
from pdserve.request import TokenLogprobs
from pdserve.router.api import answers
from pdserve.router.backend import ModelInfo, ServedAdapter
from pdserve.router.dialects.messages import schemas as messages
from pdserve.router.dialects.responses import schemas as responses
from pdserve.router.instances.fleet import Fleet
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.server import HttpServer
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.telemetry.timeline import Timeline, TimelineLog
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.application import Application
from tests.waiting import wait_until

CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def _byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of France is Paris", "hello world, the quick brown fox"] * 20, trainer)
    return tokenizer


def _byte_fallback() -> RustTokenizer:
    """Return a tokenizer like Llama 2's: ▁ for spaces (a leading one is trimmed), <0xE6> for bytes. Id 1 is unused."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdehlortw") + ["▁the", "▁cat", "▁▁"]
    vocab = {"<unk>": 0} | {piece: i for i, piece in enumerate(pieces, start=2)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _save(tokenizer: RustTokenizer, path: Path, settings: dict[str, str]) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return _save(_byte_level(), tmp_path_factory.mktemp("byte-level"), settings)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer(tokenizer_dir)


TOOL_TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    + TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
    ),
    "llama": '{% if tools %}Answer as {"name": …, "parameters": {…}}: {{ tools | tojson }}{% endif %}' + TEMPLATE,
}


@pytest.fixture(scope="session")
def tool_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers by the tool-call format of their chat template."""
    return {
        name: Tokenizer(
            _save(_byte_level(), tmp_path_factory.mktemp(name), {"eos_token": "<|end|>", "chat_template": template})
        )
        for name, template in TOOL_TEMPLATES.items()
    }


# As Qwen3's: reasoning of turns before the last question is left out.
REASONING_TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first else '' }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def reasoning_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a template like Qwen3's, whose tags are tokens."""
    tokenizer = _byte_level()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    settings = {"eos_token": "<|end|>", "chat_template": REASONING_TEMPLATE}
    return Tokenizer(_save(tokenizer, tmp_path_factory.mktemp("reasoning"), settings))


@pytest.fixture(scope="session")
def harmony_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as gpt-oss has, whose delimiters are special tokens, and arguments of calls are appended as strings."""
    tokenizer = _byte_level()
    tags = ["<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"]
    tokenizer.add_special_tokens(tags)
    template = (
        "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}{% for c in m.tool_calls or [] %}"
        "{{ ' to=' + c.function.name + '<|channel|>analysis<|message|>' + c.function.arguments + '<|call|>' }}{% endfor %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    )
    settings = {"eos_token": "<|return|>", "chat_template": template}
    return Tokenizer(_save(tokenizer, tmp_path_factory.mktemp("harmony"), settings))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with byte fallback, without EOS and chat template."""
    return Tokenizer(_save(_byte_fallback(), tmp_path_factory.mktemp("byte-fallback"), {}))


@dataclass
class Script:
    """The output of the fake backend: choice i produces `chunks[i % len(chunks)]`.

    Attributes:
        error: raised after the chunks, or by `open` if `error_at_open` is set.
        hang: wait after the chunks until cancelled.
        pause: seconds before each chunk.
        gate: a semaphore that each chunk acquires first.
        at_once: yield all chunks in one iteration.
        cached_tokens: prompt tokens that the timeline reports as prefix hits.
    """

    chunks: list[list[Output]] = field(default_factory=list)
    error: Exception | None = None
    error_at_open: bool = False
    hang: bool = False
    pause: float = 0.0
    gate: threading.Semaphore | None = None
    at_once: bool = False
    cached_tokens: int = 0


class ScriptedStream:
    """A fake TokenStream. It plays the next part of its script when the last one has been taken."""

    def __init__(self, request: RoutedRequest, chunks: list[Output], script: Script) -> None:
        self.timeline = Timeline(request.request_id, prompt_tokens=len(request.prompt))
        self.timeline.stamp(Stage.RECEIVED, time.monotonic())
        self.cancelled = False
        self._chunks = chunks
        self._script = script
        self._num_logprobs = request.sampling.logprobs
        self._scored = request.prompt[1:] if request.sampling.prompt_logprobs is not None else []
        self.on_readable: Callable[[], object] = lambda: None
        self._parts = self._play()
        self._next: asyncio.Future[list[Output]] | None = None

    def take(self) -> list[Output]:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._parts))
            self._next.add_done_callback(lambda _: self.on_readable())
        if not self._next.done():
            return []
        part, self._next = self._next.result(), None
        return part

    async def _play(self) -> AsyncIterator[list[Output]]:
        self.timeline.local_hit_tokens = self._script.cached_tokens
        chunks = self._chunks
        if self._num_logprobs is not None:
            chunks = [structs.replace(chunk, logprobs=self._logprobs(chunk, self._num_logprobs)) for chunk in chunks]
        if self._scored and chunks:
            scores = [TokenLogprobs(-1.0, ((40, -0.5), (token_id, -1.0)), 2) for token_id in self._scored]
            chunks = [structs.replace(chunks[0], prompt_logprobs=scores), *chunks[1:]]
        for batch in [chunks] if self._script.at_once else [[chunk] for chunk in chunks]:
            await asyncio.sleep(self._script.pause)
            if self._script.gate is not None:
                assert await asyncio.to_thread(self._script.gate.acquire, timeout=600)
            yield batch
        if self._script.error is not None:
            raise self._script.error
        if self._script.hang:
            await asyncio.Event().wait()
        raise AssertionError("the script has no finish reason")

    def _logprobs(self, chunk: Output, count: int) -> list[TokenLogprobs]:
        """Return logprobs whose top tokens are the sampled token and 40."""
        return [TokenLogprobs(-0.5, ((token_id, -0.5), (40, float("-inf")))[:count]) for token_id in chunk.token_ids]

    def cancel(self, finish_reason: str = "cancelled") -> None:
        self.cancelled = True
        self.timeline.finish_reason = finish_reason


class ScriptedBackend:
    """A fake Backend without instances: plays its script and records the requests that it was given."""

    def __init__(self, vocab_size: int) -> None:
        self.script = Script()
        self.info: ModelInfo | None = ModelInfo(
            "demo", CONTEXT, CONTEXT, vocab_size, frozenset([0]), b"digest", frozenset([16]), supports_grammars=True
        )
        self.info = replace(self.info, embedding_size=2)
        self.not_ready = ""
        self.requests: list[RoutedRequest] = []
        self.streams: list[ScriptedStream] = []
        self.log = TimelineLog(100)
        self.drained: list[tuple[str, str]] = []

    @property
    def model(self) -> ModelInfo | None:
        return self.info

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    def open_choices(self, requests: Sequence[RoutedRequest]) -> list[ScriptedStream]:
        return [self.open(request) for request in requests]

    def open(self, request: RoutedRequest) -> ScriptedStream:
        self.requests.append(request)
        if self.script.error is not None and self.script.error_at_open:
            raise self.script.error
        chunks = self.script.chunks[len(self.streams) % len(self.script.chunks)] if self.script.chunks else []
        if request.sampling.embed:
            chunks = [Output([], "stop", embedding=np.array([3, 4], np.float32).tobytes())]
        if request.sampling.beam_width:
            answer = Hypothesis((1,), 0.0, "stop")
            chunks = [Output([], "stop", hypotheses=[answer] * request.sampling.num_answers)]
        stream = ScriptedStream(request, chunks, self.script)
        self.streams.append(stream)
        self.log.add(stream.timeline)
        return stream

    num_instances = 1

    def instances(self) -> list[dict[str, object]]:
        return [{"instance_id": "p0", "role": "prefill"}]

    def timeline(self, request_id: str) -> Timeline | None:
        return self.log.get(request_id)

    def drain(self, instance_id: str, role: str = "") -> None:
        if self.script.error is not None:
            raise self.script.error
        self.drained.append((instance_id, role))

    def change_adapter(self, name: str, path: str, replaces: bool, on_done: Callable[[str], None]) -> None:
        assert self.info is not None
        adapters = {**self.info.adapters, name: ServedAdapter(bytes(16), path)}
        self.info = replace(self.info, adapters={key: one for key, one in adapters.items() if one.path})
        on_done("")

    def reset_prefix_cache(self, now_ms: int) -> tuple[list[str], list[str]]:
        return ["decode-0", "prefill-0"], ["shm"]

    def generates(self, ids: list[int], finish_reason: str | None = "length", **script: Any) -> None:
        """Script one token per chunk, the same for every choice."""
        chunks = [Output([token_id]) for token_id in ids]
        if finish_reason is not None:
            chunks[-1] = Output(chunks[-1].token_ids, finish_reason)
        self.script = Script(chunks=[chunks], **script)

    def fails(self, error: RequestError, **script: Any) -> None:
        """Script an error."""
        self.script = Script(error=error, **script)


@pytest.fixture
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    backend = ScriptedBackend(tokenizer.vocab_size)
    backend.generates(tokenizer.encode(" Paris."))
    return backend


@pytest.fixture
def metrics() -> Metrics:
    """The metrics of the application's admission controller."""
    return Metrics(Fleet("router", "demo", 1.0, time.monotonic))


@pytest.fixture
def make_app(backend: ScriptedBackend, metrics: Metrics) -> Callable[..., Application]:
    """Factory: make_app(tokenizer, now, **settings) returns the application on top of the fake backend."""

    def make(tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic, **settings: Any) -> Application:
        config = RouterConfig(**{"model": "demo", "max_body_bytes": 20_000, "max_n": 8, **settings})
        admission = AdmissionController(load_api_keys(config.api_key, config.keys_file), config, metrics, now)
        latest = backend.log.latest
        return create_app(config, tokenizer, backend, admission, lambda **_: [b"pdserve_up 1\n"], latest, dict)

    return make


@pytest.fixture
def app(tokenizer: Tokenizer, make_app: Callable[..., Application]) -> Application:
    return make_app(tokenizer)


ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/completions": answers.Completion,
    "/v1/chat/completions": answers.ChatCompletion,
    "/v1/responses": responses.ResponseObject,
    "/v1/messages": messages.MessageAnswer,
}


class Client:
    """Synchronous in-process client of an application. Generated answers must be those that /openapi.json declares."""

    def __init__(self, app: Application) -> None:
        self._app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, options))

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        response = self.request("POST", path, content=json.dumps(body).encode(), **options)
        if path in ANSWERS and response.status_code == 200 and response.headers["content-type"] == "application/json":
            ANSWERS[path].model_validate(response.json())
        return response

    async def _request(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)


@pytest.fixture
def client(app: Application) -> Client:
    return Client(app)


@pytest.fixture
def make_client() -> type[Client]:
    return Client


@pytest.fixture
def serving() -> Callable[..., AbstractContextManager[str]]:
    """Context manager: `with serving(app, **settings) as url` runs a real server on a free port or on a given socket."""
    return serve


@pytest.fixture
def url(app: Application) -> Iterator[str]:
    """The URL of the application on a real server."""
    with serve(app) as url:
        yield url


@contextmanager
def serve(
    app: Any,
    listener: socket.socket | None = None,
    on_start: Callable[[HttpServer], None] = lambda server: None,
    **settings: Any,
) -> Iterator[str]:
    with listener or socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app, RouterConfig(**settings), Metrics(Fleet("router", "demo", 1.0, time.monotonic)))
        server.config.timeout_graceful_shutdown = 1
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            on_start(server)
            yield f"{'https' if server.tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(600)
    assert not thread.is_alive()


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def events() -> Callable[[httpx.Response], list[dict[str, object]]]:
    """Function that returns the events of a stream, which must end with [DONE]."""

    def read(response: httpx.Response) -> list[dict[str, object]]:
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return read


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[threading.Thread]]:
    """Function `threads_of(owner, name)` that returns a list; it gets the thread of each later call of a function."""

    def watch(owner: Any, name: str) -> list[threading.Thread]:
        threads, original = list[threading.Thread](), getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)
        return threads

    return watch
