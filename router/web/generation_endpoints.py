"""The endpoints that run the model: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, and embeddings."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.router.api import answers, embeddings, messages, requests, schemas
from pdserve.router.api.embeddings import Vectors
from pdserve.router.api.generation import Generation, Json
from pdserve.router.api.http_responses import CLIENT_GONE, json_response
from pdserve.router.api.json_body import JsonBody
from pdserve.router.api.parsing import BodyType
from pdserve.router.api.requests import ParsedRequest, RequestContext
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
from pdserve.router.storage.turns import Turns
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
Parsed = TypeVar("Parsed", bound=ParsedRequest)
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
        return await self._answer(request, await self._parsed(request, body, requests.parse_completion))

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
        return await self._answer(request, await self._parsed(request, body, requests.parse_chat))

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
            previous = await self._admission.parse_queue.run(key, body.raw, partial(_previous_response, body))
        turn = await self._turns.begin(key, previous)
        parse = partial(response_output.parse_response, has_store, turn.earlier)
        parsed = await self._parsed(request, body, parse, turn.num_bytes)
        keep = partial(self._turns.keep, key, [*turn.earlier, *parsed.messages]) if parsed.echoed["store"] else None
        answer = await self._answer(request, replace(parsed, keep=keep), stream, build_body)
        if keep is not None and answer.status_code == 200 and not isinstance(answer, EventStream):
            await keep(await asyncio.to_thread(json.loads, bytes(answer.body)))
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
        return await self._answer(request, await self._parsed(request, body, _parse_message), stream, build_body)

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
        parse = partial(_num_tokens, body, self._tokenizer, self._backend.model())
        count = await self._admission.parse_queue.run(request.state.key, body.raw, parse)
        return json_response({"input_tokens": count})

    async def _parsed(
        self,
        request: Request,
        body: JsonBody[BodyType],
        parse: Callable[[BodyType, RequestContext, Tokenizer, ModelInfo, int], Parsed],
        more_bytes: int = 0,
    ) -> Parsed:
        context = _context(request, self._admission)
        parse_body = partial(_parse, body, parse, context, self._tokenizer, self._backend.model(), self._max_n)
        return await self._admission.parse_queue.run(request.state.key, body.raw, parse_body, more_bytes)

    async def _answer(
        self,
        request: Request,
        parsed: ParsedRequest,
        stream: type[EventStream] = ChunkStream,
        build_body: BuildBody = completion_body,
    ) -> Response:
        grammar = parsed.requests[0].sampling.grammar
        if grammar and self._grammars is not None:
            await self._grammars.check(request.state.key, grammar, _served(self._backend.model()))
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
        info, context = _served(self._backend.model()), _context(request, self._admission)
        parse_body = partial(_parse_texts, body, parse, context, self._tokenizer, info)
        fields, parsed = await self._admission.parse_queue.run(request.state.key, body.raw, parse_body)
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
        state.headers = admission.queue.headers(state.key)


def _context(request: Request, admission: AdmissionController) -> RequestContext:
    session, traceparent = request.headers.get(SESSION_HEADER, ""), tracing.traceparent(request.headers)
    key, address = request.state.key, request.client.host if request.client is not None else ""
    salt, client = admission.kv_salts[key], address if key == ANONYMOUS else key
    return RequestContext(request.state.request_id, time.monotonic(), session, traceparent, salt, client)


# What the parse queue runs: functions that can be pickled, as what they get and return.


def _parse(
    body: JsonBody[BodyType],
    parse: Callable[[BodyType, RequestContext, Tokenizer, ModelInfo, int], Parsed],
    context: RequestContext,
    tokenizer: Tokenizer,
    info: ModelInfo | None,
    max_n: int,
) -> Parsed:
    return parse(body.parse(), context, tokenizer, _served(info), max_n)


def _parse_texts(
    body: JsonBody[BodyType],
    parse: Callable[[BodyType, RequestContext, Tokenizer, ModelInfo], ParsedRequest],
    context: RequestContext,
    tokenizer: Tokenizer,
    info: ModelInfo,
) -> tuple[BodyType, ParsedRequest]:
    fields = body.parse()
    return fields, parse(fields, context, tokenizer, info)


def _parse_message(
    body: schemas.MessagesBody, context: RequestContext, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> ParsedRequest:
    chat_body = messages.to_chat_body(body, knows_effort=tokenizer.knows_effort)
    return requests.parse_chat(chat_body, context, tokenizer, info, max_n)


def _num_tokens(body: JsonBody[schemas.CountTokensBody], tokenizer: Tokenizer, info: ModelInfo | None) -> int:
    fields = body.parse()
    requests.check_model(fields.model, _served(info).name)
    chat_body = messages.to_counted_body(fields, knows_effort=tokenizer.knows_effort)
    return len(requests.render(chat_body, tokenizer)[0])


def _previous_response(body: JsonBody[schemas.ResponseBody]) -> str | None:
    return body.parse().previous_response_id


def _served(info: ModelInfo | None) -> ModelInfo:
    if info is None:
        raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
    return info
