"""Streams that move to another instance after any number of tokens have the same tokens, whoever picks the instances.

The real dispatcher and real engines around one table: frames are passed by hand, so a move happens after exactly the token at
which it is due.
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
from pdserve.instance import process
from pdserve.instance.engine_loop import Instance
from pdserve.keys import block_keys, root_key
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.dispatch.handover import Event
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.instances.fleet import Fleet
from pdserve.router.scheduling.policy import POLICIES
from pdserve.router.telemetry.metrics import Metrics

TOKENS, MOVES = 16, 3  # moves of a stream, at most
DEADLINE_S = 600.0


class Seat:
    """One instance at the table."""

    def __init__(self, name: str, model: Path, connector: str) -> None:
        config = InstanceConfig(
            model=str(model), connector=connector, instance_id=name, num_blocks=256, max_num_batched_tokens=64
        )
        self.frames: list[pb.InstanceFrame] = []
        self.instance = Instance(config, lambda _, frame: self.frames.append(frame))
        self.hello = process._hello(name.partition("-")[0], config, self.instance)

    def sit_down(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.told: list[pb.RouterFrame] = []
        self.told_at_once: set[int] = set()  # numbers of tokens
        self.handle = dispatcher.fleet.register(self.hello, self)
        self.kv_events = self.instance.kv_events.subscribe()

    def send(self, frame: pb.RouterFrame) -> None:
        self.told.append(frame)

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def turn(self) -> None:
        """What the router has sent, one step, and what comes of it."""
        told, self.told = self.told, []
        for frame in told:
            match frame.WhichOneof("frame"):
                case "submit":
                    self.instance.submit("router", frame.submit)
                case "hand_over":
                    self.instance.hand_over("router", frame.hand_over)
                case "cancel":
                    self.instance.cancel("router", frame.cancel.request_id)
        self.instance.run_once(wait=False)
        frames, self.frames = self.frames, []
        for output in (output for frame in frames for output in frame.step.outputs):
            self.told_at_once.add(len(output.token_ids))
            self.dispatcher.on_output(self.handle, output)
        removed, added = self.kv_events.pop_batch(1024)
        self.dispatcher.fleet._handle_kv_events(self.handle, pb.Blocks(removed=b"".join(removed), added=b"".join(added)))


@pytest.fixture(scope="module")
def seats(checkpoint: Callable[..., Path]) -> Iterator[list[Seat]]:
    connector = f"memory://{uuid.uuid4().hex}?timeout=600"
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    seats = [Seat(name, checkpoint("llama"), connector) for name in names]
    yield seats
    for seat in seats:
        seat.instance.layout_converter.close()
        seat.instance.connector.close()


def requests(seats: list[Seat], whole: bool = False) -> list[Request]:
    """Greedy ones and sampled ones, of all lengths around blocks; two share a beginning."""
    random = Random(3)
    prompts = [[random.randrange(256) for _ in range(length)] for length in (1, 16, 33, 90)]
    prompts.append([*prompts[-1][:64], 5, 6, 7])
    root = root_key(model_digest=seats[0].instance.engine.layout.model_digest)
    return [
        Request(
            request_id=f"r{i}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=TOKENS, temperature=i % 2 * 0.8, seed=i, ignore_eos=True),
            session=f"s{i % 3}",
            whole=whole,
            keys={16: block_keys(root, prompt, 16)},
        )
        for i, prompt in enumerate(prompts)
    ]


def serve(seats: list[Seat], policy: str, moves: list[list[int]], whole: bool = False) -> list[RequestState]:
    """All requests side by side; each moves when so many of its tokens are out, or after so many turns if they are wanted
    together: then it has tokens that only the instance knows."""
    fleet = Fleet("router", seats[0].hello.model, 60.0)
    config = RouterConfig(model=seats[0].hello.model, policy=policy, local_prefill_tokens=0)
    dispatcher = Dispatcher(config, fleet, Metrics(fleet))
    for seat in seats:
        seat.sit_down(dispatcher)
    states = [dispatcher.open(request) for request in requests(seats, whole)]
    turns = count()
    deadline = time.monotonic() + DEADLINE_S
    while not all(state.machine.is_over for state in states) or any(seat.instance.num_jobs for seat in seats):
        assert time.monotonic() < deadline, [(state.id, state.machine.state) for state in states]
        turn = next(turns)
        for seat in seats:
            for state, due in zip(states, moves, strict=True):
                if due and (turn if whole else len(state.emitted)) == due[0] and not state.machine.is_over:
                    del due[0]
                    state.cancel_on(state.final_instance)
                    dispatcher.handle(state, Event.DECODE_FAILED, Unavailable("it has to go", kind="drained"))
            seat.turn()  # of each request a token, at most
    for seat in seats:
        seat.instance.kv_events.unsubscribe(seat.kv_events)
    return states


def moves_of(random: Random, states: int) -> list[list[int]]:
    return [sorted(random.sample(range(TOKENS), random.randint(1, MOVES))) for _ in range(states)]


def test_streams_that_move_at_any_token_keep_their_tokens(
    seats: list[Seat], generate: Callable[..., Any], checkpoint: Any
) -> None:
    at_rest = serve(seats, "auto", [[] for _ in requests(seats)])
    expected = [state.emitted for state in at_rest]
    greedy = [request.prompt for request in requests(seats) if request.sampling.temperature == 0]
    assert expected[::2] == generate(checkpoint("llama"), greedy, TOKENS)
    random = Random(11)
    for policy in POLICIES:
        moves = moves_of(random, len(expected))
        wanted = [len(due) for due in moves]
        states = serve(seats, policy, moves)
        assert [state.emitted for state in states] == expected, policy
        assert [len(state.timeline.migrations) for state in states] == wanted, policy
        assert {state.timeline.error for state in states} == {""}
        decided = {decision.policy for state in states for _, decision in state.timeline.decisions}
        assert decided == {policy}


def test_whole_answers_move_with_tokens_that_nobody_has_seen(
    seats: list[Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.roles.job.BATCHED_TOKENS", 4)
    expected = [state.emitted for state in serve(seats, "auto", [[] for _ in requests(seats)])]
    random, lost = Random(12), 0
    for _ in range(4):
        states = serve(seats, "auto", moves_of(random, len(expected)), whole=True)
        assert [state.emitted for state in states] == expected
        lost += sum(len(state.timeline.migrations) for state in states)
        told = [[len(chunk.token_ids) for chunk in state._chunks] for state in states]
        assert told == [[TOKENS]] * len(states), "one chunk for the client"
        assert max(n for seat in seats for n in seat.told_at_once) == 4
    assert lost > 0
