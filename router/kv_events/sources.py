"""The setting `--kv-events-subscribe`: publishers of KV events that a router follows, in vLLM's words."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdserve.errors import SetupError


class KVEventsSource(BaseModel):
    """One publisher.

    Attributes:
        endpoint: its PUB socket, such as `tcp://store:5557`.
        replay_endpoint: its ROUTER socket, which repeats past batches; None: it has none.
        topic: only messages whose topic begins with this are read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    endpoint: Annotated[str, Field(min_length=1)]
    replay_endpoint: str | None = None
    topic: str = ""


_SOURCES = TypeAdapter(list[KVEventsSource])


def load_sources(text: str) -> list[KVEventsSource]:
    """Return the publishers of a JSON array; an empty text has none.

    Raises:
        SetupError: the text is no JSON array of objects, or a key or value is unknown.
    """
    try:
        return _SOURCES.validate_json(text or "[]")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        known = ", ".join(KVEventsSource.model_fields)
        reason = f"unknown key; known are {known}" if first["type"] == "extra_forbidden" else first["msg"]
        raise SetupError(f"--kv-events-subscribe: {place + ': ' if place else ''}{reason}") from error
