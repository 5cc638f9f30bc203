"""The endpoints below /v1/responses."""

import asyncio
import json
from functools import partial
from operator import attrgetter
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.api.http_responses import json_response
from pdserve.router.api.parsing import JsonBody
from pdserve.router.api.streaming import EventStream
from pdserve.router.dialects.responses import output, schemas
from pdserve.router.dialects.responses.input_items import page_of_items
from pdserve.router.dialects.responses.response_store import open_store
from pdserve.router.dialects.responses.turns import Turns
from pdserve.router.web.dialect import QUESTION, STREAMED_TOO, Dialect, Service, admitted
from pdserve.router.web.endpoint import Access, endpoint, generation_examples


class Responses(Dialect):
    """OpenAI's responses, which it keeps for clients with --response-store."""

    tag = "generation"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._store = open_store(service.config)
        self._turns = Turns(self._store)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    @admitted("/v1/responses", "resp_", schemas.ResponseObject, responses=STREAMED_TOO)
    async def responses(
        self,
        request: Request,
        body: Annotated[JsonBody[schemas.ResponseBody], generation_examples(input=QUESTION, max_output_tokens=8)],
    ) -> Response:
        """Continue a conversation, in the format of OpenAI's newer endpoint."""
        key, previous, has_store = request.state.key, None, self._turns.has_store
        if has_store:
            previous = await self.service.read(request, schemas.ResponseBody, body, attrgetter("previous_response_id"))
        turn = await self._turns.begin(key, previous)
        parse = partial(output.parse_response, has_store, turn.earlier)
        generation = await self.service.parse(request, schemas.ResponseBody, body, parse, turn.num_bytes)
        if generation.echoed["store"]:
            generation.keep = partial(self._turns.keep, key, [*turn.earlier, *generation.messages])
        answer = await self.service.answer(request, generation, output.ResponseEventStream, output.response_body)
        if generation.keep is not None and answer.status_code == 200 and not isinstance(answer, EventStream):
            await generation.keep(await asyncio.to_thread(json.loads, bytes(answer.body)))
        return answer

    @endpoint("GET", "/v1/responses/{response_id}", Access.CLIENT, errors=[404], response_model=schemas.ResponseObject)
    async def response(self, request: Request, response_id: str) -> Response:
        """A response that was kept for this API key."""
        stored = await self._turns.stored(request.state.key, response_id)
        return await asyncio.to_thread(json_response, stored.response)

    @endpoint(
        "GET", "/v1/responses/{response_id}/input_items", Access.CLIENT, errors=[404], response_model=schemas.InputItems
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
        response_model=schemas.DeletedResponse,
    )
    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Delete a response. Later ones that continue it keep the whole conversation."""
        await self._turns.delete(request.state.key, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
