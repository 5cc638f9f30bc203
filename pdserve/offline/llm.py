"""Offline use, in vLLM's words: `LLM(model).generate(prompts, params)`, and `AsyncLLM` for programs with an event loop.

Both start the processes of `pdserve up` and are clients of the router, so everything that holds for a server holds here:
topologies, restarts, validation. Nothing of the engine runs in the caller's process: scripts need no main guard.
"""

import asyncio
import atexit
import operator
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic_core import from_json
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from pdserve.cli.deployment import START_TIMEOUT_S, Deployment, free_port, with_own_admin_key
from pdserve.config import RouterConfig, UpConfig
from pdserve.errors import PdserveError, SetupError
from pdserve.lines.event_stream import read_events_async
from pdserve.model_path import resolve_model
from pdserve.offline.arguments import settings_of
from pdserve.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from pdserve.offline.params import BeamSearchParams, LoRARequest, SamplingParams
from pdserve.router.web.listening import listen

Prompt = str | dict[str, Any]
Messages = list[dict[str, Any]]
One = TypeVar("One")

ATTEMPTS = 60  # of a request that the fleet cannot take now, for example as an instance restarts
RETRY_S = 1.0
CLOSED = "the fleet was stopped by close(); make another LLM"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class _Client:
    """Common part of LLM and AsyncLLM: the processes, their start and their end.

    Args:
        model: a directory, a hub id or `demo`.
        prefill, decode, both: instances of each role; by default one with the role both.
        max_in_flight: requests that are sent to the router at once.
        settings: further flags of `pdserve up`, with underscores (`pdserve up --help`), and vLLM's arguments
            (`arguments.py`).

    Raises:
        SetupError: a process cannot start.
        TypeError: there is no such setting.
        ValueError: a setting can never work.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        prefill: int = 0,
        decode: int = 0,
        both: int | None = None,
        max_in_flight: int = 256,
        **settings: Any,
    ) -> None:
        both = int(not (prefill or decode)) if both is None else both
        counts: dict[str, Any] = {"prefill": prefill, "decode": decode, "both": both}
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
        self._max_in_flight = max_in_flight
        self._loaded: dict[str, str] = {}  # folders of adapters, by name
        self._model = str(model)
        config = UpConfig(**{"port": free_port(), **settings_of({**settings, **counts})}, model=self._model)
        config.check_effects()
        self._fleet = Fleet(config)
        weakref.finalize(self, self._fleet.close)

    def close(self) -> None:
        """Stop all processes. Further calls do nothing."""
        self._fleet.close()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(resolve_model(self._model))

    def _http(self, key: str | None = None) -> httpx.AsyncClient:
        if self._fleet.closed:
            raise PdserveError(CLOSED)
        limits, key = httpx.Limits(max_connections=None), self._fleet.api_key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(
            base_url=self._fleet.url, headers=headers, timeout=None, limits=limits, trust_env=False, verify=False
        )


class LLM(_Client):
    """Answers many prompts at once. Also a context manager; at the end of the program it closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: int | Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the prompts with their answers, in the prompts' order.

        Args:
            prompts: texts, or dictionaries with `prompt` or `prompt_token_ids`; one or several.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar.
            lora_request: adapter of all prompts, or one or None for each.
            priority: one for all prompts, or one for each; lower ones are first with scheduling_policy="priority".

        Raises:
            ValueError: a prompt or a parameter is not valid. The other requests are cancelled.
            PdserveError: the fleet cannot serve for a minute.
        """
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        each = _each(given, listed, "sampling parameters")
        bodies = [_body(prompt, params) for prompt, params in zip(listed, each, strict=True)]
        if priority is not None:
            priorities = _each(priority, listed, "priorities")
            bodies = [{**body, "priority": one} for body, one in zip(bodies, priorities, strict=True)]
        adapters = _each(lora_request, listed, "adapters")
        self._load([one for one in adapters if one and one.lora_path])
        bodies = [{**body, "model": one.lora_name} if one else body for body, one in zip(bodies, adapters, strict=True)]
        outputs = [_new_output(str(index), body, adapters[index]) for index, body in enumerate(bodies)]
        for output, answer in zip(outputs, self._ask("/v1/completions", bodies, show=use_tqdm), strict=True):
            output.add(answer)
        return outputs

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one or several conversations, through the model's chat template; errors as in `generate`.

        Args:
            template: of /tokenize: `tools`, `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        bodies = [{"messages": one, **template} for one in conversations]
        prompts: list[Prompt] = [{"prompt_token_ids": one["tokens"]} for one in self._ask("/tokenize", bodies)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, as in vLLM; errors as in `generate`."""
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        answers = self._ask("/v1/completions", [_body(prompt, params) for prompt in listed])
        beams = [
            (answer["prompt_token_ids"] + one["token_ids"], one) for answer in answers for one in answer["choices"]
        ]
        texts = [found["prompt"] for found in self._ask("/detokenize", [{"tokens": tokens} for tokens, _ in beams])]
        sequences = [
            BeamSearchSequence(tokens, text, sum(one["logprobs"]["token_logprobs"]), one["finish_reason"])
            for (tokens, one), text in zip(beams, texts, strict=True)
        ]
        width = params.beam_width
        return [BeamSearchOutput(sequences[i : i + width]) for i in range(0, len(sequences), width)]

    def embed(
        self, prompts: Prompt | Iterable[Prompt], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of each text; the model needs a `pooling`. Errors as in `generate`."""
        answers = self._pool("/v1/embeddings", prompts)
        return [PoolingRequestOutput(str(i), EmbeddingOutput(one["embedding"])) for i, one in enumerate(answers)]

    def classify(
        self, prompts: Prompt | Iterable[Prompt], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of a sequence classifier's classes for each text; errors as in `generate`."""
        answers = self._pool("/classify", prompts)
        return [PoolingRequestOutput(str(i), ClassificationOutput(one["probs"])) for i, one in enumerate(answers)]

    def score(
        self, text_1: str | list[str], text_2: str | list[str], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the score of each pair, by a cross-encoder or by embeddings; one first text belongs to all others."""
        [answer] = self._ask("/score", [{"text_1": text_1, "text_2": text_2}])
        return [PoolingRequestOutput(str(i), ScoringOutput(one["score"])) for i, one in enumerate(answer["data"])]

    def _load(self, adapters: list[LoRARequest]) -> None:
        """Load those whose names do not stand for their folders yet. Raises ValueError if two have one name."""
        folders = {one.lora_name: os.path.abspath(one.lora_path) for one in adapters}
        for one in adapters:
            if folders[one.lora_name] != os.path.abspath(one.lora_path):
                raise ValueError(
                    f"two folders of adapters have the name {one.lora_name!r}; give each a name of its own"
                )
        new = {name: folder for name, folder in folders.items() if self._loaded.get(name) != folder}
        bodies = [{"lora_name": name, "lora_path": folder, "load_inplace": True} for name, folder in new.items()]
        self._ask("/v1/load_lora_adapter", bodies, key=self._fleet.admin_key)
        self._loaded |= new

    def _pool(self, path: str, prompts: Prompt | Iterable[Prompt]) -> list[dict[str, Any]]:
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        answers = self._ask(path, [{"input": _prompt_of(prompt)} for prompt in listed])
        return [answer["data"][0] for answer in answers]

    def _ask(
        self, path: str, bodies: list[dict[str, Any]], *, show: bool = False, key: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the answers to bodies; `show` draws how many there are."""
        with start_blocking_portal() as portal:  # leaving it by Ctrl-C cancels the requests
            return portal.call(self._ask_all, path, bodies, show, key)

    async def _ask_all(
        self, path: str, bodies: list[dict[str, Any]], show: bool, key: str | None
    ) -> list[dict[str, Any]]:
        slots = asyncio.Semaphore(self._max_in_flight)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        async with self._http(key) as http:
            # A console for each call, since threads may call at once; stdout belongs to the program.
            with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
                task = progress.add_task("prompts", total=len(bodies))

                async def ask(body: dict[str, Any]) -> dict[str, Any]:
                    async with slots:
                        answer = await self._post(http, path, body)
                    progress.advance(task)
                    return answer

                return await asyncio.gather(*map(ask, bodies))

    async def _post(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer. A request that the fleet cannot take now is repeated."""
        failure = ""
        for _ in range(ATTEMPTS):
            try:
                answer = await http.post(path, json=body)
            except httpx.TransportError as error:
                failure = f"the router does not answer: {error!r}"
            else:
                if answer.status_code == 200:
                    content: dict[str, Any] = answer.json() if "json" in answer.headers["content-type"] else {}
                    return content
                if answer.status_code not in (429, 503):
                    raise _error(answer)
                failure = str(_error(answer))
            if self._fleet.closed:
                raise PdserveError(CLOSED)
            await asyncio.sleep(RETRY_S)
        raise PdserveError(f"gave up after {ATTEMPTS} attempts: {failure}")


class AsyncLLM(_Client):
    """Streams answers: `async for output in llm.generate(prompt, params, request_id)`. Also an async context manager."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output whenever there is more of it: always the same object, which grows. Closing the iterator cancels.

        Raises:
            ValueError: the prompt or a parameter is not valid.
            PdserveError: the fleet could not answer.
        """
        body = _body(prompt, sampling_params or SamplingParams())
        if "prompt_logprobs" in body:
            raise ValueError("prompt_logprobs are not part of a stream, which is what AsyncLLM asks for: use LLM")
        output = _new_output(request_id or uuid.uuid4().hex, body)
        try:
            async with (
                self._http() as http,
                http.stream("POST", "/v1/completions", json={**body, **STREAMED}) as answer,
            ):
                if answer.status_code != 200:
                    await answer.aread()
                    raise _error(answer)
                async for data in read_events_async(answer.aiter_bytes()):
                    if data == "[DONE]":
                        continue
                    event = from_json(data)
                    if "error" in event:
                        raise PdserveError(event["error"]["message"])
                    output.add(event)
                    if event["choices"]:
                        yield output
        except httpx.TransportError as error:
            raise PdserveError(f"the router does not answer: {error!r}") from error


def _each(given: One | Iterable[One], prompts: list[Prompt], what: str) -> list[One]:
    """Return what is given for each prompt. Raises ValueError."""
    if isinstance(given, dict) or not isinstance(given, Iterable):
        return [cast(One, given)] * len(prompts)
    if len(listed := list(given)) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(listed)} {what}: give one, or one for each")
    return listed


def _body(prompt: Prompt, params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise ValueError(f"sampling parameters must be of the class SamplingParams, not {params!r}")
    return {"prompt": _prompt_of(prompt), "return_token_ids": True, **params.body()}


def _prompt_of(prompt: Prompt) -> str | list[int]:
    given = {"prompt": prompt} if isinstance(prompt, str) else prompt
    if not isinstance(given, dict) or set(given) not in ({"prompt"}, {"prompt_token_ids"}):
        raise ValueError(f"a prompt is a text, or a dictionary with prompt or prompt_token_ids, not {prompt!r}")
    [(name, value)] = given.items()
    if name == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt must be a text, not {value!r}")
    try:
        text_or_ids = value if name == "prompt" else [*map(operator.index, value)]  # also those of an array
    except TypeError as error:
        raise ValueError(f"prompt_token_ids must be a list of integers, not {value!r}") from error
    if not text_or_ids:
        raise ValueError("a prompt must not be empty")
    return text_or_ids


def _new_output(request_id: str, body: dict[str, Any], adapter: LoRARequest | None = None) -> RequestOutput:
    prompt = body["prompt"] if isinstance(body["prompt"], str) else None
    answers = [CompletionOutput(index) for index in range(body["n"])]
    return RequestOutput(request_id, prompt, outputs=answers, lora_request=adapter)


def _error(answer: httpx.Response) -> Exception:
    message = answer.json()["error"]["message"]
    return ValueError(message) if 400 <= answer.status_code < 429 else PdserveError(message)


POLL_S = 0.1
KEYS = ("api_key", "admin_key")  # settings that the environment may have, too


class Fleet:
    """Starts a deployment and supervises it in a thread, until `close` or the end of the program.

    Attributes:
        url: base URL of the router.
        api_key, admin_key: random keys of this object alone, for requests and for /admin; empty: the router needs none.
        closed: it has been closed.

    Raises:
        SetupError: the port is in use, or a process cannot start; the text begins with what the processes printed.
    """

    def __init__(self, config: UpConfig) -> None:
        self.closed = False
        # Wakes the thread. No event: the collector may call `close` in this thread as it holds the lock of an event.
        self._closing = SimpleQueue[None]()
        self._lines: deque[str] = deque(maxlen=20)
        self._ready: Future[str] = Future()
        keys: Any = {name: getattr(config, name) or os.environ.get(f"PDSERVE_{name.upper()}", "") for name in KEYS}
        config, self.admin_key = with_own_admin_key(replace(config, **keys))
        self.api_key = self.admin_key if config.api_key else ""
        if config.api_key:  # of which a given one may be a digest
            config = replace(config, api_key=f"{config.api_key},{self.api_key}")
        # Another server there would be taken for the router.
        listen(RouterConfig(host=config.host, port=config.port)).close()
        self._deployment = Deployment(config, self._lines.append)
        # The children end with the thread that starts them.
        self._thread = threading.Thread(target=self._supervise, name="pdserve-fleet", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.url = self._ready.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop all processes and remove their shared memory. Further calls do nothing."""
        self.closed = True
        self._closing.put(None)
        if threading.current_thread() is not self._thread:  # in which the garbage collector may run, too
            self._thread.join()
        atexit.unregister(self.close)

    def _supervise(self) -> None:
        try:
            with self._deployment as deployment:
                self._wait_ready(deployment)
                while not self._closes_within(POLL_S):
                    deployment.check_children()
        except Exception as error:
            if self._ready.done():
                raise
            # Also one that is a fault of ours: the caller waits for nothing else.
            self._ready.set_exception(error if isinstance(error, SetupError) else SetupError(repr(error)))

    def _closes_within(self, seconds: float) -> bool:
        with suppress(Empty):
            self._closing.get(timeout=seconds)
        return self.closed

    def _wait_ready(self, deployment: Deployment) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while not self.closed and not deployment.poll_ready():
                if time.monotonic() > deadline:  # a process ends again and again, and its log is not shown
                    raise SetupError(f"not ready within {START_TIMEOUT_S:g} s")
                self._closes_within(POLL_S)
        except SetupError as error:  # the reason is the last line, until the others are stopped, which print more
            raise SetupError("\n".join([*self._lines, str(error)])) from error
        self._ready.set_result(deployment.url)
