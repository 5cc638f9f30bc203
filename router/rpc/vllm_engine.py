"""vLLM's gRPC service `vllm.grpc.engine.VllmEngine`, so that clients of vLLM's engines, such as smg, drive this router.

To them the router is one engine that does both phases. A request takes the same way as one to /v1/completions.
"""

import asyncio
import hashlib
import io
import json
import math
import time
import zipfile
from collections import defaultdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Never

from msgspec import structs
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, RequestError, TooLarge
from pdserve.interop.grpc_calls import parse
from pdserve.model_path import model_folder
from pdserve.request import SamplingParams
from pdserve.router.api.generation import Delta, Generation
from pdserve.router.api.logprobs import are_many
from pdserve.router.api.requests import parse_completion
from pdserve.router.api.streaming import ClientConnection, merge
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.rpc.generate_request import to_completion_body
from pdserve.router.rpc.generate_response import chunk, complete
from pdserve.router.rpc.service import Call
from pdserve.router.telemetry import tracing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.application import ID_PATTERN
from pdserve.router.web.dialect import SESSION_HEADER
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.parse_queue import served

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
TOKENIZER_FILES = (
    *("config.json", "generation_config.json", "*token*.json", "vocab.json", "merges.txt"),
    *("chat_template*", "*.jinja", "*.model", "*.tiktoken"),
)
MAX_ABORT_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10  # of the tokenizer in one message


class VllmEngine:
    """The methods of the service, by their names in it."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        backend: Backend,
        admission: AdmissionController,
        grammars: GrammarChecker | None,
    ) -> None:
        self._max_n = min(config.max_n, config.max_requests)
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission
        self._grammars = grammars
        self._folder = model_folder(config.model)
        self._started = time.monotonic()
        self._last_received = 0.0
        self._zipping, self._zipped = asyncio.Lock(), b""
        self._running: defaultdict[tuple[str, str], list[_Answer]] = defaultdict(list)  # by key and request id

    async def Generate(self, call: Call) -> None:
        """Generate the answers to one prompt: a message per delta if it asks for a stream, then one per choice."""
        self._last_received, queue = time.time(), self._admission.queue
        if call.key in queue.limited:
            queue.check(call.key)
        session, traceparent = call.metadata.get(SESSION_HEADER, ""), tracing.traceparent(call.metadata)
        salt = self._admission.kv_salts[call.key]
        draft = RoutedRequest(
            request_id=f"req-{token_hex(12)}",
            prompt=(),
            sampling=SamplingParams(),
            received=time.monotonic(),
            session=session,
            traceparent=traceparent,
            salt=salt,
            alone=not self._admission.has_prefix_cache,
            client=call.key,
        )
        parse_message = partial(_parse, call.raw, draft, self._tokenizer, self._model(), self._max_n)
        generation = await self._admission.parse_queue.run(call.key, call.raw, parse_message)
        grammar = generation.requests[0].sampling.grammar
        if grammar and self._grammars is not None:
            try:
                await self._grammars.check(call.key, grammar, self._model())
            except RequestError as error:
                if error.status < 500:
                    queue.charge(call.key)
                raise
        # gRPC cancels this coroutine if the client leaves or its deadline passes, so this one stays connected.
        slot = await self._admission.enter(call.key, generation, ClientConnection())
        assert slot is not None
        generation.start(self._tokenizer, self._backend, slot.release)
        answer = _Answer(generation, call)
        running = self._running[call.key, generation.id]
        running.append(answer)
        try:
            await answer.run()
        finally:
            generation.close()
            running.remove(answer)
            if not running:
                self._running.pop((call.key, generation.id), None)

    async def Abort(self, call: Call) -> "vllm.AbortResponse":
        """End requests of the same API key; they end with the finish reason `abort`. Unknown ids are ignored."""
        if len(call.raw) > MAX_ABORT_BYTES:
            raise TooLarge(f"an AbortRequest has at most {MAX_ABORT_BYTES} bytes", kind="body_too_large")
        for request_id in call.parse(vllm.AbortRequest).request_ids:
            for answer in self._running.get((call.key, request_id), ()):
                answer.abort()
        return vllm.AbortResponse()

    async def HealthCheck(self, call: Call) -> "vllm.HealthCheckResponse":
        ready, reason = self._backend.ready()
        return vllm.HealthCheckResponse(healthy=ready, message=reason)

    async def GetModelInfo(self, call: Call) -> "vllm.GetModelInfoResponse":
        info, settings = self._model(), self._model_settings()
        return vllm.GetModelInfoResponse(
            model_path=str(self._folder),
            tokenizer_path=str(self._folder),
            served_model_name=info.name,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len,
            vocab_size=info.vocab_size,
            model_type=settings.get("model_type") or "",
            architectures=settings.get("architectures") or (),
            eos_token_ids=sorted(info.eos_token_ids),
            pad_token_id=_first_id(settings.get("pad_token_id")),
            bos_token_id=_first_id(settings.get("bos_token_id")),
        )

    async def GetServerInfo(self, call: Call) -> "vllm.GetServerInfoResponse":
        """Describe the router. It names no connector: no client has to pass anything on between the phases."""
        return vllm.GetServerInfoResponse(
            active_requests=sum(map(len, self._running.values())),
            last_receive_timestamp=self._last_received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=min(self._model().block_sizes),
        )

    async def GetLoads(self, call: Call) -> "vllm.GetLoadsResponse":
        """Return the load of all instances together, as that of one rank."""
        fleet: list[dict[str, Any]] = self._backend.instances()
        total = sum(one["num_blocks"] * one["block_size"] for one in fleet)
        used = sum((one["num_blocks"] - one["free_blocks"]) * one["block_size"] for one in fleet)
        running, waiting = (sum(one[name] for one in fleet) for name in ("running", "waiting"))
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / max(1, total),
            num_waiting_uncached_tokens=sum(one["prefill_tokens"] for one in fleet),
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=f"pdserve {__version__}", dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, call: Call) -> None:
        """Send the files of the tokenizer as one zip in pieces, the last of which has its digest."""
        async with self._zipping:
            data = self._zipped = self._zipped or await asyncio.to_thread(_zip, self._folder)
        digest, num_chunks = hashlib.sha256(data).hexdigest(), math.ceil(len(data) / CHUNK_BYTES)
        for i in range(num_chunks):
            piece = data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            await call.send(common.GetTokenizerChunk(data=piece, sha256=digest if i == num_chunks - 1 else ""))

    async def Embed(self, call: Call) -> Never:
        raise NotImplementedError("embeddings are served at POST /v1/embeddings of the router's HTTP port")

    async def SubscribeKvEvents(self, call: Call) -> Never:
        """Refuse: a block that one pool loses may be in another one, and no frame tells the router a block's tokens."""
        message = (
            "a router publishes no KV events; subscribe to its instances, which do so over ZMQ (--kv-events-config)"
        )
        raise NotImplementedError(message)

    def _model(self) -> ModelInfo:
        return served(self._backend.model)

    def _model_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((self._folder / "config.json").read_text())
        return settings


class _Answer:
    """The running answer to one call."""

    def __init__(self, generation: Generation, call: Call) -> None:
        self._generation = generation
        self._call = call
        self._sending = asyncio.Lock()  # gRPC sends one message at a time
        self._deltas: list[list[Delta]] = [[] for _ in generation.requests]
        self._running = asyncio.create_task(self._send())
        self._aborting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send all messages. Choices that are aborted end with a message too."""
        try:
            await self._running
        except asyncio.CancelledError:
            if self._aborting is None:
                raise
            for index, deltas in enumerate(self._deltas):
                if not deltas or deltas[-1].finish_reason is None:
                    rest = [] if self._generation.stream else deltas
                    await self._call.send(complete(self._generation, merge([*rest, _aborted(index)])))
        finally:
            self._running.cancel()

    def abort(self) -> None:
        """Free the request's resources at once, and end the answer once its current message is sent."""
        self._generation.close()
        self._aborting = self._aborting or asyncio.create_task(self._abort())

    async def _abort(self) -> None:
        async with self._sending:
            self._running.cancel()

    async def _send(self) -> None:
        streams = self._generation.stream
        async for deltas in self._generation.run():
            async with self._sending:
                for delta in deltas:
                    self._deltas[delta.index].append(delta)
                    if streams:
                        await self._call.send(chunk(self._generation, delta))
                    if delta.finish_reason is not None:
                        whole = delta if streams else merge(self._deltas[delta.index])
                        if are_many(whole.logprobs, whole.prompt_logprobs or ()):
                            message = await asyncio.to_thread(complete, self._generation, whole)
                        else:
                            message = complete(self._generation, whole)
                        await self._call.send(message)


def _parse(raw: bytes, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int) -> Generation:
    """Parse a serialized `GenerateRequest`, whose id takes the place of the draft's."""
    request = parse(vllm.GenerateRequest, raw)
    if request.request_id:
        draft = structs.replace(draft, request_id=request.request_id)
    if not ID_PATTERN.fullmatch(draft.request_id):
        message = "request_id must have 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
        raise BadRequest(message, kind="invalid_request_id", param="request_id")
    generation = parse_completion(to_completion_body(request, tokenizer, info), draft, tokenizer, info, max_n)
    generation.stream = request.stream
    return generation


def _aborted(index: int) -> Delta:
    return Delta(index, "", [], "abort", [], [], [])


def _first_id(value: Any) -> int:
    """Return a token id of a model's config, which may be missing or a list."""
    return next(iter(value), 0) if isinstance(value, list) else value or 0


def _zip(folder: Path) -> bytes:
    paths = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            archive.write(path, path.name)
    return buffer.getvalue()
