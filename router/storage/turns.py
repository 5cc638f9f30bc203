"""The turns of conversations in /v1/responses: what a request continues, and whether its response is kept."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdserve.errors import BadRequest, NotFound, Unavailable
from pdserve.router.api.generation import Json
from pdserve.router.api.parsing import quote
from pdserve.router.api.responses.bodies import answer_message, conversation
from pdserve.router.api.schemas import ResponseBody
from pdserve.router.storage.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        earlier: the messages before its input.
        num_bytes: of these, as JSON.
        keep: stores the finished response; None if it is not kept.
    """

    earlier: list[Json] = field(default_factory=list)
    num_bytes: int = 0
    keep: Callable[[Json], Awaitable[None]] | None = None


class Turns:
    """Reads and stores responses, each for its API key only. Without a store, nothing is kept."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def begin(self, key: str, body: ResponseBody) -> Turn:
        """Return the turn of a request. A response is kept unless it says `store: false`, as at OpenAI.

        Raises:
            NotFound: the key has no response of the id that it continues.
            BadRequest: it needs a store, and there is none.
            Unavailable: the store does not answer.
        """
        if self._store is None:
            if body.previous_response_id is not None:
                param = "previous_response_id"
                message = (
                    f"{param} is not supported: this router keeps no responses; send the whole conversation in input, "
                    "or start the router with --response-store"
                )
                raise BadRequest(message, kind="unsupported_parameter", param=param)
            return Turn()
        earlier, num_bytes = list[Json](), 0
        if body.previous_response_id is not None:
            stored = await self.stored(key, body.previous_response_id, "previous_response_id")
            earlier, num_bytes = stored.messages, stored.num_bytes
        if body.store is False:
            return Turn(earlier, num_bytes)

        async def keep(response: Json) -> None:
            assert self._store is not None
            messages = await asyncio.to_thread(lambda: [*conversation(body, earlier), answer_message(response)])
            try:
                await self._store.put(key, StoredResponse(response, messages))
            except Unavailable:  # the client gets its answer all the same
                log.warning("the response %s could not be kept", response["id"])

        return Turn(earlier, num_bytes, keep)

    async def stored(self, key: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return a response of the key. Raises NotFound or Unavailable."""
        found = None if self._store is None else await self._store.get(key, response_id)
        if found is None:
            raise _unknown(response_id, param)
        return found

    async def delete(self, key: str, response_id: str) -> None:
        """Delete a response of the key. Raises NotFound or Unavailable."""
        if self._store is None or not await self._store.delete(key, response_id):
            raise _unknown(response_id, "response_id")


def _unknown(response_id: str, param: str) -> NotFound:
    message = f"there is no response {quote(response_id)} of this API key; it may have expired, or was not stored"
    return NotFound(message, kind="response_not_found", param=param)
