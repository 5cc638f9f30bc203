"""The endpoints below /v1/responses: answers, and the responses that are kept, each for its API key only."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import InvalidParameter, NotFound, Unavailable
from pdserve.router.api.generation import Json
from pdserve.router.api.http_responses import json_response
from pdserve.router.api.parsing import JsonBody, is_ascending, page_limit, quote
from pdserve.router.api.streaming import EventStream
from pdserve.router.dialects.responses import output, schemas
from pdserve.router.dialects.responses.conversion import answer_message, items
from pdserve.router.dialects.responses.response_store import StoredResponse, open_store
from pdserve.router.web.dialect import QUESTION, STREAMED_TOO, Dialect, Service, admitted
from pdserve.router.web.endpoint import Access, endpoint, generation_examples

log = logging.getLogger(__name__)


class Responses(Dialect):
    """OpenAI's responses, which it keeps for clients with --response-store."""

    tag = "generation"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._store = open_store(service.config)

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
        key, earlier, num_bytes = request.state.key, list[Json](), 0
        if self._store is not None:
            previous = await self.service.read(request, schemas.ResponseBody, body, attrgetter("previous_response_id"))
            if previous is not None:
                stored = await self._stored(key, previous, "previous_response_id")
                earlier, num_bytes = stored.messages, stored.num_bytes
        parse = partial(output.parse_response, self._store is not None, earlier)
        generation = await self.service.parse(request, schemas.ResponseBody, body, parse, num_bytes)
        if generation.echoed["store"]:
            generation.keep = partial(self._keep, key, [*earlier, *generation.messages])
        answer = await self.service.answer(request, generation, output.ResponseEventStream, output.response_body)
        if generation.keep is not None and answer.status_code == 200 and not isinstance(answer, EventStream):
            await generation.keep(await asyncio.to_thread(json.loads, bytes(answer.body)))
        return answer

    @endpoint("GET", "/v1/responses/{response_id}", Access.CLIENT, errors=[404], response_model=schemas.ResponseObject)
    async def response(self, request: Request, response_id: str) -> Response:
        """A response that was kept for this API key."""
        if request.query_params.get("stream", "").lower() == "true":
            raise InvalidParameter("stream", "a kept response is not streamed; leave stream out")
        stored = await self._stored(request.state.key, response_id)
        return await asyncio.to_thread(json_response, stored.response)

    @endpoint(
        "GET", "/v1/responses/{response_id}/input_items", Access.CLIENT, errors=[404], response_model=schemas.InputItems
    )
    async def response_input_items(self, request: Request, response_id: str) -> Response:
        """The items that a kept response answers; the query parameters are limit, order and after."""
        stored = await self._stored(request.state.key, response_id)
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
        if self._store is None or not await self._store.delete(request.state.key, response_id):
            raise _unknown(response_id, "response_id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _stored(self, key: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return a response of the key. Raises NotFound or Unavailable."""
        found = None if self._store is None else await self._store.get(key, response_id)
        if found is None:
            raise _unknown(response_id, param)
        return found

    async def _keep(self, key: str, messages: Sequence[Json], response: Json) -> None:
        """Store the finished response to messages."""
        assert self._store is not None
        try:
            await self._store.put(key, StoredResponse(response, [*messages, answer_message(response)]))
        except Unavailable:  # the client gets its answer all the same
            log.warning("the response %s could not be kept", response["id"])


def _unknown(response_id: str, param: str) -> NotFound:
    message = f"there is no response {quote(response_id)} of this API key; it may have expired, or was not stored"
    return NotFound(message, kind="response_not_found", param=param)


def page_of_items(stored: StoredResponse, query: Mapping[str, str]) -> Json:
    """Return a page of the items before the response, those of the responses that it continues included.

    Args:
        query: `limit` from 1 to 100; `order`, `desc` for the newest first (the default) or `asc`; `after`, the id of an item.

    Raises:
        BadRequest: one of them is invalid.
    """
    limit, ascending = page_limit(query), is_ascending(query)
    found = items(stored.id, stored.messages[:-1])
    if not ascending:
        found.reverse()
    if "after" in query:
        ids = [item["id"] for item in found]
        if query["after"] not in ids:
            message = f"after must be the id of an item of this response; {quote(query['after'])} is none"
            raise InvalidParameter("after", message)
        found = found[ids.index(query["after"]) + 1 :]
    page = found[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(found)}
