"""A simulated cluster: a dispatcher over instances whose outputs the test delivers, and whose frames it reads."""

from typing import Any

import pytest

from pdserve.config import RouterConfig
from pdserve.control.frame_connection import PROTOCOL_VERSION
from pdserve.output import Output, pack, unpack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet, InstanceHandle
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.telemetry.metrics import Metrics


class SentFrames(list[pb.RouterFrame]):
    """Fake connection to an instance; records the frames that were sent."""

    send = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Cluster:
    """A dispatcher and its instances, one per role: `Cluster("prefill", "decode", **settings of the router)`.

    Attributes:
        now: the time on the router's clock, which stands still unless a test sets it.
    """

    def __init__(self, *roles: str, lease_seconds: float = 1e9, **settings: Any) -> None:
        """With the default lease, the router counts as awake however long a test lets it wait between two checks. Requests
        do not wait for instances, unless the settings say so.
        """
        self.now = 1000.0
        self.fleet = Fleet("router", "model", lease_seconds, lambda: self.now)
        config = RouterConfig(model="model", **{"local_prefill_tokens": 0, "no_instance_timeout": 0.0, **settings})
        self.metrics = Metrics(self.fleet)
        self.dispatcher = Dispatcher(config, self.fleet, self.metrics, seed=0)
        self.instances = [self.join(f"{role}-{i}", role) for i, role in enumerate(roles)]

    def join(self, name: str, role: str) -> InstanceHandle:
        """Attach an instance."""
        hello = pb.Hello(instance_id=name, role=role, model="model", max_model_len=100, vocab_size=50, num_blocks=99)
        hello.block_size = 2
        hello.protocol_version = PROTOCOL_VERSION
        return self.fleet.register(hello, SentFrames())

    def open(self, request_id: str = "r", max_tokens: int = 4, **request: Any) -> RequestState:
        """Open a request with a prompt of three tokens."""
        request = {"prompt": [1, 2, 3], "sampling": SamplingParams(max_tokens=max_tokens), **request}
        state = self.dispatcher.open(RoutedRequest(request_id=request_id, **request))
        self._first_submission = state.id
        return state

    def deliver(self, instance: InstanceHandle, request_id: str | None = None, **output: Any) -> None:
        """Deliver an output of an instance to the dispatcher, by default for the first submission of the latest request."""
        [sent] = unpack(pack([Output(request_id=request_id or self._first_submission, **output)]))
        self.dispatcher.on_output(instance, sent)

    @staticmethod
    def sent(instance: InstanceHandle) -> list[tuple[str, Any]]:
        """Return and clear the frames sent to an instance, as (kind, content)."""
        assert isinstance(instance.connection, SentFrames)
        frames: list[tuple[str, Any]] = []
        for frame in instance.connection:
            kind = frame.WhichOneof("frame")
            assert kind is not None
            frames.append((kind, getattr(frame, kind)))
        instance.connection.clear()
        return frames

    @staticmethod
    def tokens(state: RequestState) -> list[int]:
        """Read the stream, which must have ended, to its end."""
        tokens: list[int] = []
        finish_reason = None
        while finish_reason is None:
            chunks = state.take()
            assert chunks, f"the stream has not ended after {tokens}"
            tokens += [token for chunk in chunks for token in chunk.token_ids]
            finish_reason = chunks[-1].finish_reason
        return tokens

    def advance(self, seconds: float) -> None:
        """Let time pass, then have the dispatcher check the progress of its requests."""
        self.now += seconds
        self.dispatcher.check_progress()


@pytest.fixture(scope="session")
def make_cluster() -> type[Cluster]:
    return Cluster
