"""The setting `--kv-events-config`: where an instance publishes its KV events, in vLLM's words."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.control.json_setting import read_json_setting
from pdserve.errors import SetupError

MAX_TOPIC = 200  # characters: a subscription to it is a message, whose length is limited
Count = Annotated[int, Field(ge=1)]


class KVEventsConfig(BaseModel):
    """Settings of the ZMQ publisher.

    Attributes:
        publisher: zmq, or null for none; by default zmq if `enable_kv_cache_events`.
        endpoint: PUB socket, bound if it has a `*` or `::` or is ipc:// or inproc://, else connected.
        replay_endpoint: ROUTER socket that repeats past batches; None: no replay.
        buffer_steps: batches kept for replay.
        hwm: batches that ZMQ keeps for a slow subscriber before it drops further ones.
        max_queue_size: batches that wait for the publishing thread; further ones are dropped and counted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: Annotated[str, Field(max_length=MAX_TOPIC)] = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def load_setting(cls, text: str) -> "KVEventsConfig":
        """Return the settings in a JSON object; an empty text turns events off.

        Raises:
            SetupError: the text is no JSON object, a key or value is unknown, or nothing says whether to publish.
        """
        config = read_json_setting("--kv-events-config", text or "{}", cls, cls)
        if config.model_fields_set and "enable_kv_cache_events" not in config.model_fields_set:
            raise SetupError('--kv-events-config: add "enable_kv_cache_events": true; without it nothing is published')
        return config
