"""The turns of conversations in /v1/responses: what a request continues, and the responses that are kept."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.errors import NotFound, Unavailable
from pdserve.router.api.generation import Json
from pdserve.router.api.parsing import quote
from pdserve.router.dialects.responses.conversion import answer_message
from pdserve.router.dialects.responses.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """The earlier part of a conversation, which a request to /v1/responses continues.

    Attributes:
        earlier: the messages before its input.
        num_bytes: of these, as JSON.
    """

    earlier: list[Json] = field(default_factory=list)
    num_bytes: int = 0


class Turns:
    """Reads and stores responses, each for its API key only. Without a store, nothing is kept."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    @property
    def has_store(self) -> bool:
        return self._store is not None

    async def begin(self, key: str, previous: str | None) -> Turn:
        """Return the turn of a request that continues a response of this id, or none.

        Raises:
            NotFound: the key has no such response.
            Unavailable: the store does not answer.
        """
        if previous is None:
            return Turn()
        stored = await self.stored(key, previous, "previous_response_id")
        return Turn(stored.messages, stored.num_bytes)

    async def keep(self, key: str, messages: Sequence[Json], response: Json) -> None:
        """Store the finished response to messages."""
        assert self._store is not None
        try:
            await self._store.put(key, StoredResponse(response, [*messages, answer_message(response)]))
        except Unavailable:  # the client gets its answer all the same
            log.warning("the response %s could not be kept", response["id"])

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
