"""The endpoints below /v1/messages."""

from collections.abc import Mapping
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import RequestError
from pdserve.router.api import chat, requests
from pdserve.router.api.generation import Generation
from pdserve.router.api.http_responses import json_response
from pdserve.router.api.parsing import JsonBody, renamed
from pdserve.router.backend import ModelInfo
from pdserve.router.dialects.messages import conversion, schemas
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.dialect import QUESTION, STREAMED_TOO, Dialect, admitted
from pdserve.router.web.endpoint import Access, endpoint, example, generation_examples


class Messages(Dialect):
    """Anthropic's messages."""

    tag = "generation"
    error_model = schemas.MessageError

    def error_body(self, error: RequestError, request_id: str) -> Mapping[str, object]:
        return conversion.error_body(error, request_id)

    @admitted("/v1/messages", "msg_", schemas.MessageAnswer, responses=STREAMED_TOO)
    async def messages(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.MessagesBody],
            generation_examples(messages=[{"role": "user", "content": QUESTION}], max_tokens=8),
        ],
    ) -> Response:
        """Continue a conversation, in Anthropic's format."""
        parsed = await self.service.parse(request, schemas.MessagesBody, body, _parse_message)
        return await self.service.answer(request, parsed, conversion.MessageEventStream, conversion.message_body)

    @endpoint("POST", "/v1/messages/count_tokens", Access.CLIENT, errors=[404], response_model=schemas.CountedTokens)
    async def count_tokens(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.CountTokensBody], example(messages=[{"role": "user", "content": QUESTION}])],
    ) -> Response:
        """Count the tokens of a conversation, in Anthropic's format."""
        count = await self.service.parse(request, schemas.CountTokensBody, body, _num_tokens)
        return json_response({"input_tokens": count})


@renamed(conversion.FIELDS)
def _parse_message(
    body: schemas.MessagesBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> Generation:
    chat_body = conversion.to_chat_body(body, knows_effort=tokenizer.knows_effort)
    return chat.parse_chat(chat_body, draft, tokenizer, info, max_n)


@renamed(conversion.FIELDS)
def _num_tokens(
    body: schemas.CountTokensBody, _: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int
) -> int:
    requests.check_model(body.model, info.name)
    chat_body = conversion.to_counted_body(body, knows_effort=tokenizer.knows_effort)
    return len(chat.render(chat_body, tokenizer)[0])
