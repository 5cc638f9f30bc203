"""Dialects: the APIs in which clients ask the model. OpenAI's /v1/completions and /v1/chat/completions are built in.

The others are in `router/dialects/`, or in packages of their own. A router serves all that are installed:

    [project.entry-points."pdserve.dialects"]
    mine = "my_package.dialect:MyDialect"

The class is a `Dialect`. It makes its own routes, which answer with the help of `Service`, and its own errors.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve import plugins
from pdserve.config import RouterConfig
from pdserve.errors import Overloaded, RequestError
from pdserve.request import SamplingParams
from pdserve.router.api import answers, chat, requests, schemas
from pdserve.router.api.generation import Generation
from pdserve.router.api.http_responses import CLIENT_GONE
from pdserve.router.api.parsing import BodyType, JsonBody
from pdserve.router.api.streaming import (
    BuildBody,
    ChunkStream,
    EventStream,
    completion_body,
    whole_response,
)
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.limits.admission_queue import AdmissionSlot
from pdserve.router.limits.key_file import ANONYMOUS
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry import tracing
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.endpoint import Access, Endpoint, Endpoints, Method, endpoint, generation_examples
from pdserve.router.web.grammar_checker import GrammarChecker
from pdserve.router.web.parse_queue import Parse, Result, parse_request, read_body, served

ENTRY_POINT_GROUP = "pdserve.dialects"
SESSION_HEADER = "x-session-id"
STREAMED_TOO: Any = {200: {"content": {"text/event-stream": {}}}}
QUESTION = "What is the capital of France?"  # of the examples in the documentation


class Service:
    """Services for dialects: parsing in the parse queue, admission, and the served model.

    Functions that parse can be pickled, as what they get and return: large bodies are parsed in another process.

    Attributes:
        endpoints: those of all dialects that take a body, by path.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        backend: Backend,
        admission: AdmissionController,
        grammars: GrammarChecker | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.backend = backend
        self.admission = admission
        self.endpoints: dict[str, Endpoint] = {}
        self._grammars = grammars
        # A request for more choices than the router may run at once would stay queued for ever.
        self._max_n = min(config.max_n, config.max_requests)

    def model(self) -> ModelInfo:
        """Return the served model. Raises Unavailable until an instance has registered."""
        return served(self.backend.model)

    async def read(
        self, request: Request, model: type[BodyType], body: JsonBody[BodyType], get: Callable[[BodyType], Result]
    ) -> Result:
        """Return what a function takes from the validated body. Raises RequestError."""
        queue = self.admission.parse_queue
        return await queue.run(request.state.key, body, partial(read_body, model, body, queue.unknown_fields, get))

    async def parse(
        self,
        request: Request,
        model: type[BodyType],
        body: JsonBody[BodyType],
        parse: Parse[BodyType, Result],
        more_bytes: int = 0,
    ) -> Result:
        """Return the result of `parse`, such as a `Generation`, computed in the parse queue.

        Args:
            more_bytes: what `parse` works on besides the body.

        Raises:
            RequestError: the body is invalid, no instance has registered, or the key has no request left.
        """
        queue, draft, key = self.admission.parse_queue, self._draft(request), request.state.key
        info = self.admission.served(key, self.backend.model)
        unknown = queue.unknown_fields
        parse_raw = partial(parse_request, model, body, unknown, parse, draft, self.tokenizer, info, self._max_n)
        try:
            if key in self.admission.queue.limited:
                self.admission.queue.check(key)
            return await queue.run(key, body, parse_raw, more_bytes)
        except RequestError as error:
            self._charge(request, is_due=error.status < 500 and not isinstance(error, Overloaded))  # that was not read
            raise

    def count(self, request: Request) -> None:
        """Count a request that needs no admission, but work. Raises RequestError if its key has none left."""
        key, queue = request.state.key, self.admission.queue
        if key in queue.limited:
            try:
                queue.check(key, 0)
                queue.charge(key)
            finally:
                request.state.headers = queue.headers(key)

    def _charge(self, request: Request, *, is_due: bool) -> None:
        """Count a request that is not admitted, if that is due, and set the headers of the key's quota."""
        if is_due:
            self.admission.queue.charge(request.state.key)
        request.state.headers = self.admission.queue.headers(request.state.key)

    def _draft(self, request: Request) -> RoutedRequest:
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
            salt=self.admission.kv_salts[key],
            alone=not self.admission.has_prefix_cache,
            client=address if key == ANONYMOUS else key,
        )

    async def enter(self, request: Request, generation: Generation) -> AdmissionSlot | None:
        """Wait for admission, and set the headers of the key's quota. Return None if the client has left.

        Raises:
            RequestError: the request exceeds a limit of its key, or was dropped from a full queue.
        """
        state = request.state
        try:
            return await self.admission.enter(state.key, generation, state.client)
        finally:
            state.headers = self.admission.queue.headers(state.key)

    async def answer(
        self,
        request: Request,
        generation: Generation,
        stream: type[EventStream] = ChunkStream,
        build_body: BuildBody = completion_body,
    ) -> Response:
        """Run a generation once it is admitted, and answer with its whole text or a stream. Raises RequestError."""
        grammar = generation.requests[0].sampling.grammar
        if grammar and self._grammars is not None:
            try:
                await self._grammars.check(request.state.key, grammar, self.model())
            except RequestError as error:  # also if too many of the key's grammars wait: this one has been read
                self._charge(request, is_due=error.status < 500)
                raise

        async def begin() -> bool:
            slot = await self.enter(request, generation)
            if slot is not None:
                generation.start(self.tokenizer, self.backend, slot.release)
            return slot is not None

        if generation.stream and self.config.sse_keep_alive:
            events = stream(generation)
            events.keep_alive_s, events.beginning = self.config.sse_keep_alive, begin
            return events
        if not await begin():
            return Response(status_code=CLIENT_GONE)
        if generation.stream:
            return stream(generation)
        return await whole_response(generation, request.state.client, build_body)


class Dialect(Endpoints):
    """One API: its endpoints, its errors, and what it keeps for clients.

    Attributes:
        larger_bodies: path → most bytes of its bodies, where they may be larger than those of other paths.
    """

    larger_bodies: Mapping[str, int] = MappingProxyType({})

    def __init__(self, service: Service) -> None:
        self.service = service

    def start(self) -> None:
        """Begin what runs besides requests. Called once, on the event loop."""

    async def close(self) -> None:
        """End what runs besides requests, and close what it has opened."""


def load_dialects() -> list[type[Dialect]]:
    """Return OpenAI's dialect and those that are installed, by name. Raises SetupError."""
    found = plugins.names(ENTRY_POINT_GROUP)
    return [OpenAI, *(plugins.load(ENTRY_POINT_GROUP, name, Dialect) for name in found)]


def admitted(path: str, id_prefix: str, answer: type[answers.Answer], **options: Any) -> Callable[[Method], Method]:
    """Declare an endpoint whose requests wait for admission; `options` are those of `Endpoint`."""
    options |= {"id_prefix": id_prefix, "response_model": answer}
    return endpoint("POST", path, Access.CLIENT, errors=[404, 429], **options)


class OpenAI(Dialect):
    """OpenAI's completions and chat completions."""

    tag = "generation"

    @admitted("/v1/completions", "cmpl-", answers.Completion, responses=STREAMED_TOO)
    async def completions(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.CompletionBody], generation_examples(prompt="The capital of France is", max_tokens=8)
        ],
    ) -> Response:
        """Continue a text."""
        parsed = await self.service.parse(request, schemas.CompletionBody, body, requests.parse_completion)
        return await self.service.answer(request, parsed)

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
        parsed = await self.service.parse(request, schemas.ChatBody, body, chat.parse_chat)
        return await self.service.answer(request, parsed)
