"""The endpoints about the served model: /v1/models, /tokenize and /detokenize."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve.config import RouterConfig
from pdserve.errors import InvalidParameter, NotFound
from pdserve.model_path import resolve_model
from pdserve.router.api import answers, chat, requests, schemas
from pdserve.router.api.http_responses import json_response
from pdserve.router.api.parsing import BodyType, JsonBody, quote
from pdserve.router.backend import Backend, ModelInfo
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.endpoint import Access, Endpoints, endpoint, example
from pdserve.router.web.parse_queue import read_body

MAX_TEXT = 1 << 22  # characters of /detokenize: some tokens have a hundred, and each takes a few bytes of a body


class ModelEndpoints(Endpoints):
    """Describes the served model, and converts between text and its tokens."""

    tag = "model"

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, backend: Backend, admission: AdmissionController
    ) -> None:
        self._name = config.name
        self._root = str(resolve_model(config.model))  # vLLM's benchmark client loads its tokenizer from here
        self._tokenizer = tokenizer
        self._backend = backend
        self._admission = admission
        self._parse_queue = admission.parse_queue
        self._created = int(time.time())

    @endpoint("GET", "/v1/models", Access.CLIENT)
    async def models(self, request: Request) -> answers.ModelList:
        """The served model and its adapters; an empty list until an instance has registered."""
        return answers.ModelList(object="list", data=self._cards(request))

    @endpoint("GET", "/v1/models/{model:path}", Access.CLIENT, errors=[404])
    async def model(self, request: Request, model: str) -> answers.ModelCard | answers.ModelList:
        """The served model, if this is its name; without a name, the list."""
        if not model:
            return await self.models(request)
        for card in self._cards(request):
            if card.id == model:
                return card
        raise NotFound(f"the model {quote(model)} does not exist", kind="model_not_found", param="model")

    def _served(self, request: Request) -> ModelInfo | None:
        return self._admission.served(request.state.key, self._backend.model)

    def _names(self, request: Request) -> list[str]:
        """Return the name of the served model, and those of its adapters, which have its tokens."""
        info = self._served(request)
        return [self._name, *(() if info is None else info.adapters)]

    def _cards(self, request: Request) -> list[answers.ModelCard]:
        """Return the cards of the served model and of its adapters; none until an instance has registered."""
        info = self._served(request)
        if info is None:
            return []
        names = {info.name: self._root} | {name: adapter.path for name, adapter in info.adapters.items()}
        return [
            answers.ModelCard(
                id=name,
                object="model",
                created=self._created,
                owned_by="pdserve",
                root=root,
                parent=None if name == info.name else info.name,
                max_model_len=info.max_model_len,
            )
            for name, root in names.items()
        ]

    @endpoint("POST", "/tokenize", Access.CLIENT, errors=[404, 429], response_model=answers.Tokens)
    async def tokenize(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.TokenizeBody], example(prompt="The capital of France is")],
    ) -> Response:
        """Convert a text, or a conversation in the model's chat template, to tokens."""
        convert = partial(_tokens, self._names(request), self._tokenizer, self._backend.model)
        return await self._convert(request, schemas.TokenizeBody, body, convert)

    @endpoint("POST", "/detokenize", Access.CLIENT, errors=[404, 429], response_model=answers.Detokenized)
    async def detokenize(
        self, request: Request, body: Annotated[JsonBody[schemas.DetokenizeBody], example(tokens=[1, 2, 3])]
    ) -> Response:
        """Convert tokens to their text."""
        convert = partial(_text, self._names(request), self._tokenizer)
        return await self._convert(request, schemas.DetokenizeBody, body, convert)

    async def _convert(
        self,
        request: Request,
        model: type[BodyType],
        body: JsonBody[BodyType],
        convert: Callable[[BodyType], Response],
    ) -> Response:
        queue = self._parse_queue
        return await queue.run(request.state.key, body, partial(read_body, model, body, queue.unknown_fields, convert))


def _tokens(names: list[str], tokenizer: Tokenizer, info: ModelInfo | None, fields: schemas.TokenizeBody) -> Response:
    if fields.model not in names:
        requests.check_model(fields.model, names[0])
    ids = chat.tokenize(fields, tokenizer)
    strings = [tokenizer.id_to_token(token_id) for token_id in ids] if fields.return_token_strs else None
    length = None if info is None else info.max_model_len
    return json_response(answers.Tokens(count=len(ids), max_model_len=length, tokens=ids, token_strs=strings))


def _text(names: list[str], tokenizer: Tokenizer, fields: schemas.DetokenizeBody) -> Response:
    if fields.model not in names:
        requests.check_model(fields.model, names[0])
    requests.check_token_ids(fields.tokens, tokenizer.vocab_size, "tokens")
    length = sum(count * tokenizer.text_length(one) for one, count in Counter(fields.tokens).items())
    if length > MAX_TEXT:
        message = f"these tokens have {length} characters of text; at most {MAX_TEXT} are returned at once: send fewer"
        raise InvalidParameter("tokens", message)
    return json_response(answers.Detokenized(prompt=tokenizer.decode(fields.tokens, skip_special_tokens=False)))
