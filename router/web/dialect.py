"""The endpoints that run the model: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, and embeddings."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.request import SamplingParams
from pdserve.router.api import answers, embeddings, messages, requests, schemas
from pdserve.router.api.embeddings import Vectors
from pdserve.router.api.generation import Generation, Json
from pdserve.router.api.http_responses import CLIENT_GONE, json_response
from pdserve.router.api.parsing import BodyType, JsonBody, UnknownFields, parse_body
from pdserve.router.api.responses import output as response_output
from pdserve.router.api.streaming import (
    BuildBody,
    ChunkStream,
    EventStream,
    completion_body,
    whole_response,
)
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.client_connection import ClientConnection
from pdserve.router.limits.admission_queue import AdmissionSlot
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.storage.input_items import page_of_items
from pdserve.router.storage.response_store import ResponseStore
from pdserve.router.storage.turns import Turns
from pdserve.router.telemetry import tracing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.endpoint import Access, Endpoints, Method, endpoint, example, generation_examples
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.parse_queue import LARGE_BODY

SESSION_HEADER = "x-session-id"

DOCUMENTS = ["Paris is the capital of France.", "Rome is the capital of Italy."]
QUESTION = "What is the capital of France?"
RerankRequest = Annotated[JsonBody[schemas.RerankBody], example(query="The capital of France", documents=DOCUMENTS)]
Parsed = TypeVar("Parsed", bound=Generation)
MESSAGE_ERRORS: Any = {"error_model": answers.MessageError, "error_body": messages.error_body}
STREAMED_TOO: Any = {200: {"content": {"text/event-stream": {}}}}


def admitted(path: str, id_prefix: str, answer: type[answers.Answer], **options: Any) -> Callable[[Method], Method]:
    """Declare an endpoint whose requests wait for admission; `options` are those of `Endpoint`."""
    options |= {"id_prefix": id_prefix, "response_model": answer}
    return endpoint("POST", path, Access.CLIENT, errors=[404, 429], **options)


class GenerationEndpoints(Endpoints):
    """Parses a body, waits for admission, starts the generation, and answers with its whole text or a stream."""

    tag = "generation"

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        backend: Backend,
        admission: AdmissionController,
        grammars: GrammarChecker | None,
        response_store: ResponseStore | None = None,
    ) -> None:
        # A request for more choices than the router may run at once would stay queued for ever.
        self._max_n = min(config.max_n, config.max_requests)
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission
        self._grammars = grammars
        self._turns = Turns(response_store)
        self._keep_alive_s = config.sse_keep_alive

    @admitted("/v1/completions", "cmpl-", answers.Completion, responses=STREAMED_TOO)
    async def completions(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.CompletionBody], generation_examples(prompt="The capital of France is", max_tokens=8)
        ],
    ) -> Response:
        """Continue a text."""
        return await self._answer(
            request, await self._parsed(request, schemas.CompletionBody, body, requests.parse_completion)
        )

    @admitted("/v1/chat/completions", "chatcmpl-", answers.ChatCompletion, responses=STREAMED_TOO)
    async def chat(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.ChatBody],
            generation_examples(messages=[{"role": "user", "content": QUESTION}], max_completion_tokens=8),
        ],
    ) -> Response:
        """Continue a conversation, through the model's chat template."""
        return await self._answer(request, await self._parsed(request, schemas.ChatBody, body, requests.parse_chat))

    @admitted("/v1/responses", "resp_", answers.ResponseObject, responses=STREAMED_TOO)
    async def responses(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.ResponseBody], generation_examples(input=QUESTION, max_output_tokens=8)],
    ) -> Response:
        """Continue a conversation, in the format of OpenAI's newer endpoint."""
        stream, build_body = response_output.ResponseEventStream, response_output.response_body
        key, previous, has_store = request.state.key, None, self._turns.has_store
        if has_store:
            previous_response = partial(_previous_response, body, self._admission.parse_queue.unknown_fields)
            previous = await self._admission.parse_queue.run(key, body, previous_response)
        turn = await self._turns.begin(key, previous)
        parse = partial(response_output.parse_response, has_store, turn.earlier)
        generation = await self._parsed(request, schemas.ResponseBody, body, parse, turn.num_bytes)
        if generation.echoed["store"]:
            generation.keep = partial(self._turns.keep, key, [*turn.earlier, *generation.messages])
        answer = await self._answer(request, generation, stream, build_body)
        if generation.keep is not None and answer.status_code == 200 and not isinstance(answer, EventStream):
            await generation.keep(await asyncio.to_thread(json.loads, bytes(answer.body)))
        return answer

    @endpoint("GET", "/v1/responses/{response_id}", Access.CLIENT, errors=[404], response_model=answers.ResponseObject)
    async def response(self, request: Request, response_id: str) -> Response:
        """A response that was kept for this API key."""
        stored = await self._turns.stored(request.state.key, response_id)
        return await asyncio.to_thread(json_response, stored.response)

    @endpoint(
        "GET", "/v1/responses/{response_id}/input_items", Access.CLIENT, errors=[404], response_model=answers.InputItems
    )
    async def response_input_items(self, request: Request, response_id: str) -> Response:
        """The messages that a kept response answers; the query parameters are limit, order and after."""
        stored = await self._turns.stored(request.state.key, response_id)
        return await asyncio.to_thread(lambda: json_response(page_of_items(stored, request.query_params)))

    @endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        Access.CLIENT,
        errors=[404],
        response_model=answers.DeletedResponse,
    )
    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Delete a response. Later ones that continue it keep the whole conversation."""
        await self._turns.delete(request.state.key, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @admitted("/v1/messages", "msg_", answers.MessageAnswer, responses=STREAMED_TOO, **MESSAGE_ERRORS)
    async def messages(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.MessagesBody],
            generation_examples(messages=[{"role": "user", "content": QUESTION}], max_tokens=8),
        ],
    ) -> Response:
        """Continue a conversation, in Anthropic's format."""
        stream, build_body = messages.MessageEventStream, messages.message_body
        return await self._answer(
            request, await self._parsed(request, schemas.MessagesBody, body, _parse_message), stream, build_body
        )

    @endpoint(
        "POST",
        "/v1/messages/count_tokens",
        Access.CLIENT,
        errors=[404],
        response_model=answers.CountedTokens,
        **MESSAGE_ERRORS,
    )
    async def count_tokens(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.CountTokensBody], example(messages=[{"role": "user", "content": QUESTION}])],
    ) -> Response:
        """Count the tokens of a conversation, in Anthropic's format."""
        queue = self._admission.parse_queue
        parse = partial(_num_tokens, body, queue.unknown_fields, self._tokenizer, self._backend.model())
        count = await queue.run(request.state.key, body, parse)
        return json_response({"input_tokens": count})

    async def _parsed(
        self,
        request: Request,
        model: type[BodyType],
        body: JsonBody[BodyType],
        parse: Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo, int], Parsed],
        more_bytes: int = 0,
    ) -> Parsed:
        queue, info, draft = self._admission.parse_queue, self._backend.model(), _draft(request, self._admission)
        parse_raw = partial(_parse, model, body, queue.unknown_fields, parse, draft, self._tokenizer, info, self._max_n)
        return await queue.run(request.state.key, body, parse_raw, more_bytes)

    async def _answer(
        self,
        request: Request,
        generation: Generation,
        stream: type[EventStream] = ChunkStream,
        build_body: BuildBody = completion_body,
    ) -> Response:
        grammar = generation.requests[0].sampling.grammar
        if grammar and self._grammars is not None:
            await self._grammars.check(request.state.key, grammar, _served(self._backend.model()))

        async def begin() -> bool:
            slot = await _enter(self._admission, request, generation)
            if slot is not None:
                generation.start(self._tokenizer, self._backend, slot.release)
            return slot is not None

        if generation.stream and self._keep_alive_s:
            events = stream(generation)
            events.keep_alive_s, events.beginning = self._keep_alive_s, begin
            return events
        if not await begin():
            return Response(status_code=CLIENT_GONE)
        if generation.stream:
            return stream(generation)
        return await whole_response(generation, request.state.client, build_body)


class EmbeddingEndpoints(Endpoints):
    """Parses a body, waits for admission, has its texts embedded, and answers with what follows from the vectors."""

    tag = "embeddings"

    def __init__(self, tokenizer: Tokenizer, backend: Backend, admission: AdmissionController) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission

    @admitted("/v1/embeddings", "req-", answers.Embeddings)
    async def embeddings(
        self, request: Request, body: Annotated[JsonBody[schemas.EmbeddingBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The embeddings of texts."""
        return await self._embed(
            request, schemas.EmbeddingBody, body, embeddings.parse_embedding, embeddings.embedding_body
        )

    @admitted("/score", "req-", answers.Scores)
    async def score(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.ScoreBody], example(text_1="The capital of France", text_2=DOCUMENTS)],
    ) -> Response:
        """Scores of pairs of texts, by a cross-encoder or by their embeddings."""
        return await self._embed(request, schemas.ScoreBody, body, embeddings.parse_score, embeddings.score_body)

    @admitted("/classify", "req-", answers.Classifications)
    async def classify(
        self, request: Request, body: Annotated[JsonBody[schemas.ClassifyBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The classes of texts, by a sequence classifier."""
        build = partial(embeddings.classify_body, self._tokenizer.label)
        return await self._embed(request, schemas.ClassifyBody, body, embeddings.parse_classify, build)

    @admitted("/v1/rerank", "req-", answers.Ranking)
    async def rerank_v1(self, request: Request, body: RerankRequest) -> Response:
        """The same as /rerank."""
        return await self.rerank(request, body)

    @admitted("/rerank", "req-", answers.Ranking)
    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Documents in the order of their scores with a query, by a cross-encoder or by their embeddings."""
        return await self._embed(request, schemas.RerankBody, body, embeddings.parse_rerank, embeddings.rerank_body)

    async def _embed(
        self,
        request: Request,
        model: type[BodyType],
        body: JsonBody[BodyType],
        parse: Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo], Generation],
        build: Callable[[BodyType, Generation, Vectors], Json],
    ) -> Response:
        info, queue, draft = (
            _served(self._backend.model()),
            self._admission.parse_queue,
            _draft(request, self._admission),
        )
        parse_raw = partial(_parse_texts, model, body, queue.unknown_fields, parse, draft, self._tokenizer, info)
        fields, generation = await queue.run(request.state.key, body, parse_raw)
        slot = await _enter(self._admission, request, generation)
        if slot is None:
            return Response(status_code=CLIENT_GONE)
        vectors: list[Vectors] = []

        async def run() -> None:
            vectors.append(await embeddings.embed(generation, self._backend, slot.release))

        client: ClientConnection = request.state.client
        if not await client.run(run()):
            return Response(status_code=CLIENT_GONE)
        num_bytes = len(body) + sum(vector.nbytes for vector in vectors[0])
        if num_bytes < LARGE_BODY:
            return json_response(build(fields, generation, vectors[0]))
        return await asyncio.to_thread(lambda: json_response(build(fields, generation, vectors[0])))


async def _enter(admission: AdmissionController, request: Request, generation: Generation) -> AdmissionSlot | None:
    """Wait for admission, and set the headers of the key's quota. Return None if the client has left.

    Raises:
        RequestError: the request exceeds a limit of its key, or was dropped from a full queue.
    """
    state = request.state
    try:
        return await admission.enter(state.key, generation, state.client)
    finally:
        state.headers = admission.queue.headers(state.key)


def _draft(request: Request, admission: AdmissionController) -> RoutedRequest:
    """Return what an HTTP request tells besides its body."""
    headers, key, address = (
        request.headers,
        request.state.key,
        request.client.host if request.client is not None else "",
    )
    return RoutedRequest(
        request_id=request.state.request_id,
        prompt=(),
        sampling=SamplingParams(),
        received=time.monotonic(),
        session=headers.get(SESSION_HEADER, ""),
        traceparent=tracing.traceparent(headers) if tracing.TRACEPARENT_HEADER in headers else "",
        salt=admission.kv_salts[key],
        client=address if key == ANONYMOUS else key,
    )


# What the parse queue runs: functions that can be pickled, as what they get and return.


def _parse(
    model: type[BodyType],
    raw: bytes,
    unknown: UnknownFields | None,
    parse: Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo, int], Parsed],
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo | None,
    max_n: int,
) -> Parsed:
    body = parse_body(model, raw, unknown)
    return parse(body, draft, tokenizer, info or _served(info), max_n)


def _parse_texts(
    model: type[BodyType],
    raw: bytes,
    unknown: UnknownFields | None,
    parse: Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo], Generation],
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
) -> tuple[BodyType, Generation]:
    body = parse_body(model, raw, unknown)
    return body, parse(body, draft, tokenizer, info)


def _parse_message(
    body: schemas.MessagesBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> Generation:
    chat_body = messages.to_chat_body(body, knows_effort=tokenizer.knows_effort)
    return requests.parse_chat(chat_body, draft, tokenizer, info, max_n)


def _num_tokens(raw: bytes, unknown: UnknownFields | None, tokenizer: Tokenizer, info: ModelInfo | None) -> int:
    body = parse_body(schemas.CountTokensBody, raw, unknown)
    requests.check_model(body.model, _served(info).name)
    chat_body = messages.to_counted_body(body, knows_effort=tokenizer.knows_effort)
    return len(requests.render(chat_body, tokenizer)[0])


def _previous_response(raw: bytes, unknown: UnknownFields | None) -> str | None:
    return parse_body(schemas.ResponseBody, raw, unknown).previous_response_id


def _served(info: ModelInfo | None) -> ModelInfo:
    if info is None:
        raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
    return info
