"""The endpoints that generate: /v1/completions, /v1/chat/completions and /v1/responses."""

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.router.api import parsing, requests, responses, schemas
from pdserve.router.api.generation import Generation
from pdserve.router.api.http_responses import CLIENT_GONE
from pdserve.router.api.requests import ParsedRequest, RequestContext
from pdserve.router.api.streaming import BuildBody, ChunkStream, EventStream, completion_body, whole_response
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.telemetry import tracing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.endpoint import json_body, route

SESSION_HEADER = "x-session-id"

ParseBody = Callable[[bytes, RequestContext], ParsedRequest]


class GenerationEndpoints:
    """Parses a body, waits for admission, starts the generation, and answers with its whole text or a stream."""

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, backend: Backend, admission: AdmissionController
    ) -> None:
        # A request for more choices than the router may run at once would stay queued for ever.
        self._max_n = min(config.max_n, config.max_requests)
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission

    def routes(self) -> list[Route]:
        return [
            route("POST", "/v1/completions", self._completions),
            route("POST", "/v1/chat/completions", self._chat),
            route("POST", "/v1/responses", self._responses),
        ]

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, self._parse_completion)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, self._parse_chat)

    async def _responses(self, request: Request) -> Response:
        stream, build_body = responses.ResponseEventStream, responses.response_body
        return await self._generate(request, self._parse_response, stream, build_body)

    def _parse_completion(self, raw: bytes, context: RequestContext) -> ParsedRequest:
        body = parsing.validate(schemas.CompletionBody, parsing.parse_json(raw))
        return requests.parse_completion(body, context, self._tokenizer, self._model(), self._max_n)

    def _parse_chat(self, raw: bytes, context: RequestContext) -> ParsedRequest:
        body = parsing.validate(schemas.ChatBody, parsing.parse_json(raw))
        return requests.parse_chat(body, context, self._tokenizer, self._model(), self._max_n)

    def _parse_response(self, raw: bytes, context: RequestContext) -> ParsedRequest:
        body = parsing.validate(schemas.ResponseBody, parsing.parse_json(raw))
        chat_body = responses.to_chat_body(body)
        parsed = requests.parse_chat(chat_body, context, self._tokenizer, self._model(), self._max_n)
        return responses.with_echoed_fields(parsed, body)

    def _model(self) -> ModelInfo:
        info = self._backend.model()
        if info is None:
            raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
        return info

    async def _generate(
        self,
        request: Request,
        parse: ParseBody,
        stream: type[EventStream] = ChunkStream,
        build_body: BuildBody = completion_body,
    ) -> Response:
        raw = await json_body(request)
        session = request.headers.get(SESSION_HEADER, "")
        traceparent = tracing.traceparent(request.headers)
        context = RequestContext(request.state.request_id, time.monotonic(), session, traceparent)
        parsed = await self._admission.parse_queue.run(raw, lambda: parse(raw, context))
        try:
            slot = await self._admission.enter(request.state.key, parsed, request.receive)
        finally:
            request.state.headers = self._admission.headers(request.state.key)
        if slot is None:
            return Response(status_code=CLIENT_GONE)
        generation = Generation(parsed, self._tokenizer, self._backend, slot.release)
        return stream(generation) if parsed.stream else await whole_response(generation, request.receive, build_body)
