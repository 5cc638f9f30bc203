"""A dialect of another package: a text in, its continuation as lines, one for each delta, and errors in a word."""

from collections.abc import Mapping
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import RequestError
from pdserve.router.api import requests
from pdserve.router.api.answers import Answer
from pdserve.router.api.generation import Delta, Generation, Json
from pdserve.router.api.parsing import Body, JsonBody
from pdserve.router.api.schemas import CompletionBody
from pdserve.router.api.streaming import EventStream
from pdserve.router.backend import ModelInfo
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.dialect import Dialect, admitted
from pdserve.router.web.endpoint import example


class TerseBody(Body):
    say: list[int]
    count: int


class TerseError(Answer):
    wrong: str
    request: str


class Lines(EventStream):
    """The text of each delta as a line, and `.` at the end."""

    def delta_events(self, delta: Delta) -> list[Json]:
        return [{"ids": delta.token_ids}]

    def final_events(self) -> list[Json]:
        return [{"end": self._generation.completion_tokens}]

    def encode(self, event: Json) -> bytes:
        return " ".join(str(value) for value in event.values()).encode() + b"\n"


class Terse(Dialect):
    tag = "terse"
    error_model = TerseError

    def error_body(self, error: RequestError, request_id: str) -> Mapping[str, object]:
        return {"wrong": error.kind, "request": request_id}

    @admitted("/terse", "terse-", TerseError)
    async def terse(
        self, request: Request, body: Annotated[JsonBody[TerseBody], example(say=[1], count=2)]
    ) -> Response:
        """Continue tokens."""
        return await self.service.answer(request, await self.service.parse(request, TerseBody, body, parse), Lines)


def parse(body: TerseBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, max_n: int) -> Generation:
    fields = {"prompt": body.say, "max_tokens": body.count, "temperature": 0, "ignore_eos": True, "stream": True}
    return requests.parse_completion(CompletionBody(**fields), draft, tokenizer, info, max_n)
