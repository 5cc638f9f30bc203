"""The endpoints about the served model: /v1/models, /tokenize and /detokenize."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.config import RouterConfig
from pdserve.errors import NotFound
from pdserve.model_path import resolve_model
from pdserve.router.api import parsing, requests, schemas
from pdserve.router.api.http_responses import json_response
from pdserve.router.backend import Backend
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.endpoint import json_body, route
from pdserve.router.web.parse_queue import ParseQueue


class ModelEndpoints:
    """Describes the served model, and converts between text and its tokens."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, backend: Backend, parse_queue: ParseQueue) -> None:
        self._name = config.name
        self._root = str(resolve_model(config.model))  # vLLM's benchmark client loads its tokenizer from here
        self._tokenizer = tokenizer
        self._backend = backend
        self._parse_queue = parse_queue
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/models", self._list),
            route("GET", "/v1/models/{model:path}", self._get),
            route("POST", "/tokenize", self._tokenize),
            route("POST", "/detokenize", self._detokenize),
        ]

    async def _list(self, _: Request) -> Response:
        return json_response({"object": "list", "data": self._cards()})

    async def _get(self, request: Request) -> Response:
        model = request.path_params["model"]
        for card in self._cards():
            if card["id"] == model:
                return json_response(card)
        raise NotFound(f"the model {model!r} does not exist", kind="model_not_found", param="model")

    def _cards(self) -> list[dict[str, object]]:
        """Return the card of the served model; none until an instance has registered."""
        info = self._backend.model()
        if info is None:
            return []
        card = {"id": info.name, "object": "model", "created": self._created, "owned_by": "pdserve"}
        return [{**card, "root": self._root, "parent": None, "max_model_len": info.max_model_len}]

    async def _tokenize(self, request: Request) -> Response:
        raw = await json_body(request)
        return json_response(await self._parse_queue.run(raw, lambda: self._tokens(raw)))

    def _tokens(self, raw: bytes) -> dict[str, object]:
        body = parsing.validate(schemas.TokenizeBody, parsing.parse_json(raw))
        requests.check_model(body.model, self._name)
        ids = requests.tokenize(body, self._tokenizer)
        info = self._backend.model()
        strings = [self._tokenizer.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
        length = None if info is None else info.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    async def _detokenize(self, request: Request) -> Response:
        body = parsing.validate(schemas.DetokenizeBody, parsing.parse_json(await json_body(request)))
        requests.check_model(body.model, self._name)
        requests.check_token_ids(body.tokens, self._tokenizer.vocab_size, "tokens")
        return json_response({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})
