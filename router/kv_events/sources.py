"""The setting `--kv-events-subscribe`: publishers of KV events that a router follows, in vLLM's words."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pdserve.control.json_setting import read_json_setting


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


def load_sources(text: str) -> list[KVEventsSource]:
    """Return the publishers of a JSON array; an empty text has none.

    Raises:
        SetupError: the text is no JSON array of objects, or a key or value is unknown.
    """
    return read_json_setting("--kv-events-subscribe", text or "[]", list[KVEventsSource], KVEventsSource)
