"""Migration at any token: a stream that migrates keeps its tokens, under every routing policy.

The real dispatcher and real engines run in one process and the test passes the frames between them, so that each migration
happens after exactly the chosen token.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pdserve.config import InstanceConfig, RouterConfig
from pdserve.errors import Unavailable
from pdserve.instance.hello import make_hello
from pdserve.instance.instance import Instance
from pdserve.keys import block_keys, root_key
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.handover import Event
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import POLICIES
from pdserve.router.telemetry.metrics import Metrics
from tests.outputs import outputs_of

TOKENS, MAX_MIGRATIONS = 16, 3  # per stream
DEADLINE_S = 600.0


class LocalInstance:
    """An instance in this process, and its link to the dispatcher."""

    def __init__(self, name: str, model: Path, connector: str, ranks: int = 1) -> None:
        config = InstanceConfig(
            model=str(model),
            connector=connector,
            instance_id=name,
            num_blocks=256,
            max_num_batched_tokens=64,
            tensor_parallel_size=ranks,
            convert_kv=True,
        )
        self.frames: list[pb.InstanceFrame] = []
        self.instance = Instance.start(config, lambda _, frame: self.frames.append(frame))
        self.hello = make_hello(name.partition("-")[0], config, self.instance)

    def connect(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.inbox: list[pb.RouterFrame] = []
        self.tokens_per_output: set[int] = set()
        self.handle = dispatcher.fleet.register(self.hello, self)
        self.kv_events = self.instance.kv_events.subscribe()

    def send(self, frame: pb.RouterFrame) -> None:
        self.inbox.append(frame)

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def step(self) -> None:
        """Process the router's frames, run one engine step, and pass the resulting frames to the dispatcher."""
        inbox, self.inbox = self.inbox, []
        for frame in inbox:
            match frame.WhichOneof("frame"):
                case "submit":
                    self.instance.submit("router", frame.submit)
                case "hand_over":
                    self.instance.hand_over("router", frame.hand_over)
                case "cancel":
                    self.instance.cancel("router", frame.cancel.request_id)
        self.instance.run_once(wait=False)
        frames, self.frames = self.frames, []
        for output in (output for frame in frames for output in outputs_of(frame)):
            self.tokens_per_output.add(len(output.token_ids))
            self.dispatcher.on_output(self.handle, output)
        removed, added = self.kv_events.pop_batch(1024)
        blocks = pb.Blocks(removed=b"".join(removed), added=b"".join(added))
        self.dispatcher.fleet.handle_frame(self.handle, pb.InstanceFrame(blocks=blocks))


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "gemma3_mixed"))],
)
def architecture(request: pytest.FixtureRequest) -> str:
    """Return a model's architecture: with KV of each token; with states of recurrent layers, or with windows, besides."""
    return str(request.param)


@pytest.fixture(scope="module")
def instances(checkpoint: Callable[..., Path], architecture: str) -> Iterator[list[LocalInstance]]:
    connector = f"memory://{uuid.uuid4().hex}?timeout=600"
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    instances = [LocalInstance(name, checkpoint(architecture), connector) for name in names]
    yield instances
    for instance in instances:
        instance.instance.layout_converter.close()
        instance.instance.connector.close()


def requests(instances: list[LocalInstance], whole: bool = False) -> list[RoutedRequest]:
    """Return greedy and sampled requests with prompt lengths around block borders; two share a prefix."""
    random = Random(3)
    prompts = [[random.randrange(256) for _ in range(length)] for length in (1, 16, 33, 90)]
    prompts.append([*prompts[-1][:64], 5, 6, 7])
    root = root_key(model_digest=instances[0].instance.engine.layout.model_digest)
    return [
        RoutedRequest(
            request_id=f"r{i}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=TOKENS, temperature=i % 2 * 0.8, seed=i, ignore_eos=True),
            session=f"s{i % 3}",
            whole=whole,
            keys={16: block_keys(root, prompt, 16)},
        )
        for i, prompt in enumerate(prompts)
    ]


def serve(
    instances: list[LocalInstance], policy: str, migrate_at: list[list[int]], whole: bool = False
) -> list[RequestState]:
    """Serve all requests concurrently, migrating request i at the token counts `migrate_at[i]`.

    With `whole` (answers sent in one piece) these are step counts: the instance then holds tokens that it has not sent.
    """
    fleet = Fleet("router", instances[0].hello.model, 60.0, time.monotonic)
    config = RouterConfig(model=instances[0].hello.model, policy=policy, local_prefill_tokens=0)
    dispatcher = Dispatcher(config, fleet, Metrics(fleet), seed=0)
    for instance in instances:
        instance.connect(dispatcher)
    states = [dispatcher.open(request) for request in requests(instances, whole)]
    steps = count()
    deadline = time.monotonic() + DEADLINE_S
    while not all(state.machine.is_over for state in states) or any(
        instance.instance.num_jobs for instance in instances
    ):
        assert time.monotonic() < deadline, [(state.id, state.machine.state) for state in states]
        step = next(steps)
        for instance in instances:
            for state, due in zip(states, migrate_at, strict=True):
                if due and (step if whole else len(state.emitted)) == due[0] and not state.machine.is_over:
                    del due[0]
                    state.cancel_on(state.final_instance)
                    dispatcher.handle(state, Event.DECODE_FAILED, Unavailable("the instance drains", kind="drained"))
            instance.step()  # at most one token per request
    for instance in instances:
        instance.instance.kv_events.unsubscribe(instance.kv_events)
    return states


def random_migrations(random: Random, num_requests: int) -> list[list[int]]:
    return [sorted(random.sample(range(TOKENS), random.randint(1, MAX_MIGRATIONS))) for _ in range(num_requests)]


def test_streams_that_migrate_at_any_token_keep_their_tokens(
    instances: list[LocalInstance], generate: Callable[..., Any], checkpoint: Any, architecture: str
) -> None:
    unmoved = serve(instances, "auto", [[] for _ in requests(instances)])
    expected = [state.emitted for state in unmoved]
    greedy = [request.prompt for request in requests(instances) if request.sampling.temperature == 0]
    assert expected[::2] == generate(checkpoint(architecture), greedy, TOKENS)
    random = Random(11)
    for policy in POLICIES:
        migrate_at = random_migrations(random, len(expected))
        num_migrations = [len(due) for due in migrate_at]
        states = serve(instances, policy, migrate_at)
        assert [state.emitted for state in states] == expected, policy
        assert [len(state.timeline.migrations) for state in states] == num_migrations, policy
        assert {state.timeline.error for state in states} == {""}
        decided = {decision.policy for state in states for _, decision in state.timeline.decisions}
        assert decided == {policy}


def test_whole_answers_migrate_with_tokens_not_yet_sent(
    instances: list[LocalInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.roles.job.BATCHED_TOKENS", 4)
    expected = [state.emitted for state in serve(instances, "auto", [[] for _ in requests(instances)])]
    random, num_migrations = Random(12), 0
    for _ in range(4):
        states = serve(instances, "auto", random_migrations(random, len(expected)), whole=True)
        assert [state.emitted for state in states] == expected
        num_migrations += sum(len(state.timeline.migrations) for state in states)
        chunks = [[len(chunk.token_ids) for chunk in state._outputs] for state in states]
        assert chunks == [[TOKENS]] * len(states), "one chunk for the client"
        assert max(n for instance in instances for n in instance.tokens_per_output) == 4
    assert num_migrations > 0
