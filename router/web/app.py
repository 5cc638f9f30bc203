"""The HTTP side of the router: OpenAI's endpoints, and those that operators and newcomers look into.

    POST /v1/completions, /v1/chat/completions      GET /health, /ready, /metrics, /version
    POST /v1/responses                              GET /debug/requests, /debug/requests/{id}, /debug/instances
    GET  /v1/models, /v1/models/{id}                POST /tokenize, /detokenize
    POST /admin/instances/{id}/drain, /admin/instances/{id}/role
    GET  /                                          GET /debug/overview, /openapi.json

A request has one id: the response's `id` field, its `X-Request-Id` header (the client's own, if it sent one) and what
/debug/requests/{id} answers to are the same. When it asks for several choices, choice i is `{id}-{i}`.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, NotFound, RequestError, Unavailable
from pdserve.model_path import resolve_model
from pdserve.router.api import parsing, requests, responses, schemas
from pdserve.router.api.generation import Generation
from pdserve.router.api.http_responses import CLIENT_GONE, InternalError, error_response, json_response
from pdserve.router.api.openapi import describe
from pdserve.router.api.streaming import ChunkStream, EventStream, Word, answer, whole_body
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.limits.quota import RATE_HEADERS
from pdserve.router.telemetry import tracing
from pdserve.router.telemetry.timeline import Timeline
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.auth import Guard, Keys
from pdserve.router.web.middleware import BodyLimit, Endpoint, FastPath, RequestId

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SESSION_HEADER = "x-session-id"
LATEST = 50
PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LARGE_BODY = 32 * 1024  # from here on, tokenizing would keep other streams waiting: a thread does it


ParseBody = Callable[[bytes, requests.Origin], requests.ParsedRequest]
Result = TypeVar("Result")


class UnsupportedMediaType(BadRequest):
    status = 415


class MethodNotAllowed(BadRequest):
    status = 405


def create_app(
    config: RouterConfig,
    tokenizer: Tokenizer,
    backend: Backend,
    admission: AdmissionController,
    metrics_text: Callable[[], bytes],
    latest_timelines: Callable[[int], list[Timeline]],
    overview: Callable[[], dict[str, object]],
) -> Starlette:
    """The app; `metrics_text` is the body of /metrics, `latest_timelines(count)` that of /debug/requests, `overview` that of
    /debug/overview."""

    async def openapi(_: Request) -> Response:
        return json_response(describe(routes, config.name))

    generations = _Generations(config, tokenizer, backend, admission).routes()
    routes = [
        *generations,
        *_Models(config, tokenizer, backend).routes(),
        *_Operations(backend, metrics_text, latest_timelines, overview, config.max_n).routes(),
    ]
    app = Starlette(routes=[*routes, *_page(), _route("GET", "/openapi.json", openapi)])
    app.router.redirect_slashes = False
    _add_errors(app)
    app.add_middleware(FastPath, endpoints={route.path: route.endpoint for route in generations})
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, silence_s=config.client_timeout_seconds)
    app.add_middleware(Guard, clients=Keys(admission.keys), operators=Keys(load_api_keys(config.admin_key)))
    app.add_middleware(RequestId)  # around the others: their errors have an id too
    if config.cors_origins:
        origins = [origin.strip() for origin in config.cors_origins.split(",")]
        headers = ["X-Request-Id", "Retry-After", *RATE_HEADERS]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=headers,
        )
    return app


def _route(method: str, path: str, endpoint: Endpoint) -> Route:
    route = Route(path, endpoint, methods=[method])
    route.methods = {method}  # without the HEAD that comes with GET
    return route


class _Generations:
    """/v1/completions, /v1/chat/completions and /v1/responses."""

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, backend: Backend, admission: AdmissionController
    ) -> None:
        # Who asks for more places than there are would wait for ever.
        self._max_n = min(config.max_n, config.max_requests)
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission

    def routes(self) -> list[Route]:
        return [
            _route("POST", "/v1/completions", self._completions),
            _route("POST", "/v1/chat/completions", self._chat),
            _route("POST", "/v1/responses", self._responses),
        ]

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, self._parse_completion)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, self._parse_chat)

    async def _responses(self, request: Request) -> Response:
        return await self._generate(request, self._parse_response, responses.ResponseEvents, responses.whole_response)

    def _parse_completion(self, raw: bytes, origin: requests.Origin) -> requests.ParsedRequest:
        body = parsing.shape(schemas.CompletionBody, parsing.parse_json(raw))
        return requests.parse_completion(body, origin, self._tokenizer, self._model(), self._max_n)

    def _parse_chat(self, raw: bytes, origin: requests.Origin) -> requests.ParsedRequest:
        body = parsing.shape(schemas.ChatBody, parsing.parse_json(raw))
        return requests.parse_chat(body, origin, self._tokenizer, self._model(), self._max_n)

    def _model(self) -> ModelInfo:
        info = self._backend.model()
        if info is None:
            raise Unavailable("no instance has registered yet", kind="no_instance", retry_after_s=1)
        return info

    def _parse_response(self, raw: bytes, origin: requests.Origin) -> requests.ParsedRequest:
        body = parsing.shape(schemas.ResponseBody, parsing.parse_json(raw))
        chat = responses.chat_of(body)
        parsed = requests.parse_chat(chat, origin, self._tokenizer, self._model(), self._max_n)
        return responses.parse_response(body, parsed)

    async def _generate(
        self,
        request: Request,
        parse: ParseBody,
        stream: type[EventStream] = ChunkStream,
        word: Word = whole_body,
    ) -> Response:
        raw = await _json_body(request)
        session = request.headers.get(SESSION_HEADER, "")
        span = tracing.traceparent(request.headers)
        origin = requests.Origin(request.state.request_id, time.monotonic(), session, span)
        parsed = await _aside(raw, lambda: parse(raw, origin))
        try:
            slot = await self._admission.enter(request.state.key, parsed, request.receive)
        finally:
            request.state.headers = self._admission.headers(request.state.key)
        if slot is None:
            return Response(status_code=CLIENT_GONE)
        generation = Generation(parsed, self._tokenizer, self._backend, slot.release)
        return stream(generation) if parsed.stream else await answer(generation, request.receive, word)


class _Models:
    """/v1/models, /tokenize and /detokenize: what can be asked of the model without generating."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, backend: Backend) -> None:
        self._name = config.name
        self._root = str(resolve_model(config.model))  # where vLLM's benchmark client takes its tokenizer from
        self._tokenizer = tokenizer
        self._backend = backend
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            _route("GET", "/v1/models", self._list),
            _route("GET", "/v1/models/{model:path}", self._one),
            _route("POST", "/tokenize", self._tokenize),
            _route("POST", "/detokenize", self._detokenize),
        ]

    async def _list(self, _: Request) -> Response:
        return json_response({"object": "list", "data": self._cards()})

    async def _one(self, request: Request) -> Response:
        model = request.path_params["model"]
        for card in self._cards():
            if card["id"] == model:
                return json_response(card)
        raise NotFound(f"the model {model!r} does not exist", kind="model_not_found", param="model")

    def _cards(self) -> list[dict[str, object]]:
        """The served model, once an instance serves it."""
        info = self._backend.model()
        if info is None:
            return []
        card = {"id": info.name, "object": "model", "created": self._created, "owned_by": "pdserve"}
        return [{**card, "root": self._root, "parent": None, "max_model_len": info.max_model_len}]

    async def _tokenize(self, request: Request) -> Response:
        raw = await _json_body(request)
        return json_response(await _aside(raw, lambda: self._tokens(raw)))

    def _tokens(self, raw: bytes) -> dict[str, object]:
        body = parsing.shape(schemas.TokenizeBody, parsing.parse_json(raw))
        requests.check_model(body.model, self._name)
        ids = requests.tokens_of(body, self._tokenizer)
        info = self._backend.model()
        strings = [self._tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
        length = None if info is None else info.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    async def _detokenize(self, request: Request) -> Response:
        body = parsing.shape(schemas.DetokenizeBody, parsing.parse_json(await _json_body(request)))
        requests.check_model(body.model, self._name)
        requests.check_ids(body.tokens, self._tokenizer.vocab_size, "tokens")
        return json_response({"prompt": self._tokenizer.decode(body.tokens, skip_special=False)})


class _Operations:
    """What operators, probes and newcomers ask."""

    def __init__(
        self,
        backend: Backend,
        metrics_text: Callable[[], bytes],
        latest_timelines: Callable[[int], list[Timeline]],
        overview: Callable[[], dict[str, object]],
        max_n: int,
    ) -> None:
        self._backend = backend
        self._metrics_text = metrics_text
        self._latest_timelines = latest_timelines
        self._overview = overview
        self._max_n = max_n

    def routes(self) -> list[Route]:
        return [
            _route("GET", "/health", self._health),
            _route("GET", "/ready", self._ready),
            _route("GET", "/metrics", self._metrics),
            _route("GET", "/version", self._version),
            _route("GET", "/debug/overview", self._whole),
            _route("GET", "/debug/requests", self._requests),
            _route("GET", "/debug/requests/{request_id}", self._request),
            _route("GET", "/debug/instances", self._instances),
            _route("POST", "/admin/instances/{instance_id}/drain", self._drain),
            _route("POST", "/admin/instances/{instance_id}/role", self._role),
        ]

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        ready, reason = self._backend.ready()
        if not ready:
            raise Unavailable(f"not ready: {reason}", kind="not_ready", retry_after_s=1)
        return json_response({"status": "ready", "instances": len(self._backend.instances())})

    async def _metrics(self, _: Request) -> Response:
        return Response(self._metrics_text(), media_type=METRICS_TYPE)

    async def _version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def _whole(self, _: Request) -> Response:
        return json_response(self._overview(), headers={"Cache-Control": "no-store"})

    async def _requests(self, _: Request) -> Response:
        return json_response({"requests": [timeline.as_dict() for timeline in self._latest_timelines(LATEST)]})

    async def _request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        timeline = self._backend.timeline(request_id)
        if timeline is not None:
            return json_response(timeline.as_dict())
        found = [self._backend.timeline(f"{request_id}-{i}") for i in range(self._max_n)]
        choices = [choice.as_dict() for choice in found if choice is not None]
        if not choices:
            message = "no request with this id is remembered here; a router knows those that it served itself"
            raise NotFound(message, kind="request_not_found", param="request_id")
        return json_response({"request_id": request_id, "choices": choices})

    async def _instances(self, _: Request) -> Response:
        return json_response({"instances": self._backend.instances()})

    async def _drain(self, request: Request) -> Response:
        _refuse_other_pages(request)
        return self._ask(request)

    async def _role(self, request: Request) -> Response:
        _refuse_other_pages(request)
        body = parsing.shape(schemas.RoleBody, parsing.parse_json(await request.body()))
        return self._ask(request, body.role)

    def _ask(self, request: Request, role: str = "") -> Response:
        instance_id = request.path_params["instance_id"]
        self._backend.drain(instance_id, role)
        return json_response({"instance_id": instance_id, "role": role or None}, status=202)


def _refuse_other_pages(request: Request) -> None:
    """A page of another origin may send what it likes to a router without keys, but not this header."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        message = "this path takes orders only with the header Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")


def _page() -> list[Route]:
    """The live page. Its files hold no data and are open; what it shows comes from /debug/overview."""

    def file(path: str, name: str) -> Route:
        content = (PAGE / name).read_bytes()

        async def answer(_: Request) -> Response:
            return Response(content, headers=PAGE_HEADERS, media_type=PAGE_TYPES[name.rpartition(".")[2]])

        return Route(path, answer)

    return [file("/", "page.html"), file("/page.css", "page.css"), file("/page.js", "page.js")]


async def _json_body(request: Request) -> bytes:
    """The body, if it says that it is JSON. What `curl -d` says by itself, and nothing at all, pass for JSON too."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("", "application/json", "application/x-www-form-urlencoded") and not kind.endswith("+json"):
        message = "the body must be JSON, with Content-Type: application/json"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")
    return await request.body()


async def _aside(raw: bytes, work: Callable[[], Result]) -> Result:
    """Parses and tokenizes in a thread if there is much of it: other streams must not wait."""
    try:
        return await asyncio.to_thread(work) if len(raw) >= LARGE_BODY else work()
    except RecursionError:
        raise BadRequest("the body is nested too deeply", kind="invalid_json") from None


def _add_errors(app: Starlette) -> None:
    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_of_http(request, error))
        response.headers.update(error.headers or {})
        return response

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def bug(_: Request, error: Exception) -> Response:
        return error_response(InternalError())  # starlette raises it again, which brings the traceback into the log

    app.add_exception_handler(RequestError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)


def _of_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 405:
        return MethodNotAllowed(f"this path does not take {request.method}", kind="method_not_allowed")
    assert error.status_code == 404, error
    return NotFound("there is no such path; try /v1/models or /v1/completions", kind="not_found")
