"""The endpoints that run the model: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, and embeddings."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.router.api import answers, embeddings, messages, requests, schemas
from pdserve.router.api.embeddings import Vectors
from pdserve.router.api.generation import Generation, Json
from pdserve.router.api.http_responses import CLIENT_GONE, json_response
from pdserve.router.api.json_body import JsonBody, ParsedBody
from pdserve.router.api.parsing import BodyType
from pdserve.router.api.requests import ParsedRequest, RequestContext
from pdserve.router.api.responses import bodies as response_bodies
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
from pdserve.router.storage.input_items import page_of_items
from pdserve.router.storage.response_store import ResponseStore
from pdserve.router.storage.turns import Turn, Turns
from pdserve.router.telemetry import tracing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.auth import Access
from pdserve.router.web.endpoint import Endpoints, Method, endpoint, example, generation_examples
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.parse_queue import LARGE_BODY

SESSION_HEADER = "x-session-id"

DOCUMENTS = ["Paris is the capital of France.", "Rome is the capital of Italy."]
QUESTION = "What is the capital of France?"
RerankRequest = Annotated[JsonBody[schemas.RerankBody], example(query="The capital of France", documents=DOCUMENTS)]
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
        return await self._generate(request, body, self._parse_completion)

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
        return await self._generate(request, body, self._parse_chat)

    @admitted("/v1/responses", "resp_", answers.ResponseObject, responses=STREAMED_TOO)
    async def responses(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.ResponseBody], generation_examples(input=QUESTION, max_output_tokens=8)],
    ) -> Response:
        """Continue a conversation, in the format of OpenAI's newer endpoint."""
        stream, build_body = response_output.ResponseEventStream, response_output.response_body
        key = request.state.key
        parsed = ParsedBody(await self._admission.parse_queue.run(key, body.raw, body.parse), body.raw)
        turn = await self._turns.begin(key, parsed.parse())
        parse = partial(self._parse_response, turn)
        answer = await self._generate(request, parsed, parse, stream, build_body, turn.num_bytes)
        if turn.keep is not None and answer.status_code == 200 and not isinstance(answer, EventStream):
            await turn.keep(await asyncio.to_thread(json.loads, bytes(answer.body)))
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

    @admitted("/v1/messages", "msg_", answers.MessageAnswer, error_model=answers.MessageError, responses=STREAMED_TOO)
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
        return await self._generate(request, body, self._parse_message, stream, build_body)

    @endpoint(
        "POST",
        "/v1/messages/count_tokens",
        Access.CLIENT,
        errors=[404],
        response_model=answers.CountedTokens,
        error_model=answers.MessageError,
    )
    async def count_tokens(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.CountTokensBody], example(messages=[{"role": "user", "content": QUESTION}])],
    ) -> Response:
        """Count the tokens of a conversation, in Anthropic's format."""
        count = await self._admission.parse_queue.run(
            request.state.key, body.raw, lambda: self._num_tokens(body.parse())
        )
        return json_response({"input_tokens": count})

    def _num_tokens(self, body: schemas.CountTokensBody) -> int:
        requests.check_model(body.model, self._model().name)
        chat_body = messages.to_counted_body(body, knows_effort=self._tokenizer.knows_effort)
        return len(requests.render(chat_body, self._tokenizer)[0])

    def _parse_message(self, body: schemas.MessagesBody, context: RequestContext) -> ParsedRequest:
        return self._parse_chat(messages.to_chat_body(body, knows_effort=self._tokenizer.knows_effort), context)

    def _parse_completion(self, body: schemas.CompletionBody, context: RequestContext) -> ParsedRequest:
        return requests.parse_completion(body, context, self._tokenizer, self._model(), self._max_n)

    def _parse_chat(self, body: schemas.ChatBody, context: RequestContext) -> ParsedRequest:
        return requests.parse_chat(body, context, self._tokenizer, self._model(), self._max_n)

    def _parse_response(self, turn: Turn, body: schemas.ResponseBody, context: RequestContext) -> ParsedRequest:
        chat_body = response_bodies.to_chat_body(body, turn.earlier)
        parsed = requests.parse_chat(chat_body, context, self._tokenizer, self._model(), self._max_n)
        return response_output.with_echoed_fields(parsed, body, turn.keep)

    def _model(self) -> ModelInfo:
        return _model(self._backend)

    async def _generate(
        self,
        request: Request,
        body: JsonBody[BodyType],
        parse: Callable[[BodyType, RequestContext], ParsedRequest],
        stream: type[EventStream] = ChunkStream,
        build_body: BuildBody = completion_body,
        more_bytes: int = 0,
    ) -> Response:
        context, key = _context(request, self._admission), request.state.key
        queue = self._admission.parse_queue
        parsed = await queue.run(key, body.raw, lambda: parse(body.parse(), context), more_bytes)
        grammar = parsed.requests[0].sampling.grammar
        if grammar and self._grammars is not None:
            await self._grammars.check(key, grammar, self._model())
        generation = Generation(parsed, self._tokenizer, self._backend)

        async def begin() -> bool:
            slot = await _enter(self._admission, request, parsed)
            if slot is not None:
                generation.start(slot.release)
            return slot is not None

        if parsed.stream and self._keep_alive_s:
            events = stream(generation)
            events.keep_alive_s, events.beginning = self._keep_alive_s, begin
            return events
        if not await begin():
            return Response(status_code=CLIENT_GONE)
        if parsed.stream:
            return stream(generation)
        return await whole_response(generation, request.state.client, build_body)


class EmbeddingEndpoints(Endpoints):
    """Parses a body, waits for admission, has its texts embedded, and answers with what follows from the vectors."""

    tag = "embeddings"

    def __init__(self, tokenizer: Tokenizer, backend: Backend, admission: AdmissionController) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission

    @admitted("/v1/embeddings", "embd-", answers.Embeddings)
    async def embeddings(
        self, request: Request, body: Annotated[JsonBody[schemas.EmbeddingBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The embeddings of texts."""
        return await self._embed(request, body, embeddings.parse_embedding, embeddings.embedding_body)

    @admitted("/score", "score-", answers.Scores)
    async def score(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.ScoreBody], example(text_1="The capital of France", text_2=DOCUMENTS)],
    ) -> Response:
        """Scores of pairs of texts, by a cross-encoder or by their embeddings."""
        return await self._embed(request, body, embeddings.parse_score, embeddings.score_body)

    @admitted("/classify", "classify-", answers.Classifications)
    async def classify(
        self, request: Request, body: Annotated[JsonBody[schemas.ClassifyBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The classes of texts, by a sequence classifier."""
        build = partial(embeddings.classify_body, self._tokenizer.label)
        return await self._embed(request, body, embeddings.parse_classify, build)

    @admitted("/v1/rerank", "rerank-", answers.Ranking)
    async def rerank_v1(self, request: Request, body: RerankRequest) -> Response:
        """The same as /rerank."""
        return await self.rerank(request, body)

    @admitted("/rerank", "rerank-", answers.Ranking)
    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Documents in the order of their scores with a query, by a cross-encoder or by their embeddings."""
        return await self._embed(request, body, embeddings.parse_rerank, embeddings.rerank_body)

    async def _embed(
        self,
        request: Request,
        body: JsonBody[BodyType],
        parse: Callable[[BodyType, RequestContext, Tokenizer, ModelInfo], ParsedRequest],
        build: Callable[[BodyType, ParsedRequest, Vectors], Json],
    ) -> Response:
        info, context, key = _model(self._backend), _context(request, self._admission), request.state.key

        def parse_body() -> tuple[BodyType, ParsedRequest]:
            fields = body.parse()
            return fields, parse(fields, context, self._tokenizer, info)

        fields, parsed = await self._admission.parse_queue.run(key, body.raw, parse_body)
        slot = await _enter(self._admission, request, parsed)
        if slot is None:
            return Response(status_code=CLIENT_GONE)
        vectors: list[Vectors] = []

        async def run() -> None:
            vectors.append(await embeddings.embed(parsed, self._backend, slot.release))

        client: ClientConnection = request.state.client
        if not await client.run(run()):
            return Response(status_code=CLIENT_GONE)
        num_bytes = len(body.raw) + sum(vector.nbytes for vector in vectors[0])
        if num_bytes < LARGE_BODY:
            return json_response(build(fields, parsed, vectors[0]))
        return await asyncio.to_thread(lambda: json_response(build(fields, parsed, vectors[0])))


async def _enter(admission: AdmissionController, request: Request, parsed: ParsedRequest) -> AdmissionSlot | None:
    """Wait for admission, and set the headers of the key's quota. Return None if the client has left.

    Raises:
        RequestError: the request exceeds a limit of its key, or was dropped from a full queue.
    """
    state = request.state
    try:
        return await admission.enter(state.key, parsed, state.client)
    finally:
        state.headers = admission.headers(state.key)


def _context(request: Request, admission: AdmissionController) -> RequestContext:
    session, traceparent = request.headers.get(SESSION_HEADER, ""), tracing.traceparent(request.headers)
    key, address = request.state.key, request.client.host if request.client is not None else ""
    salt, client = admission.kv_salts[key], address if key == ANONYMOUS else key
    return RequestContext(request.state.request_id, time.monotonic(), session, traceparent, salt, client)


def _model(backend: Backend) -> ModelInfo:
    info = backend.model()
    if info is None:
        raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
    return info
