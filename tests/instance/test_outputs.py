"""Outputs of an instance: log probabilities of long prompts in pieces, once for all choices; frames of limited size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config import InstanceConfig
from pdserve.instance import instance as instance_module
from pdserve.instance.instance import Instance
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.roles import job
from tests.outputs import outputs_of

PROMPT = [7 * i % 250 for i in range(60)]


class Driver:
    """One instance whose steps the test runs; `frames` are those that it has sent."""

    def __init__(self, path: Path) -> None:
        self.frames: list[pb.InstanceFrame] = []
        config = InstanceConfig(model=str(path), num_blocks=64, connector="memory://")
        self.instance = Instance(config, lambda _, frame: self.frames.append(frame))

    def run(self, name: str, n: int, max_tokens: int, logprobs: int | None = None) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=1, logprobs=logprobs
        )
        message = pb.Submit(
            request_id=f"{name}0", phase=pb.BOTH, request=Request(prompt=PROMPT, sampling=sampling).pack()
        )
        for i in range(1, n):
            message.members.add(request_id=f"{name}{i}", seed=i)
        self.frames.clear()
        self.instance.submit("router", message)
        idle = False
        while self.instance.num_jobs or not self.frames:
            idle = self.instance.run_once(wait=idle)
        assert self.instance.engine.pool.num_held == 0

    def outputs(self, name: str) -> list[Output]:
        return [one for frame in self.frames for one in outputs_of(frame) if one.request_id == name]


@pytest.fixture
def driver(checkpoint: Callable[..., Path]) -> Driver:
    return Driver(checkpoint("llama"))


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_scores_of_a_prompt_are_sent_once_and_before_the_tokens_of_all_choices(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, n: int, max_tokens: int
) -> None:
    driver.run("whole", n, max_tokens)
    (whole,) = [one for one in driver.outputs("whole0") if one.prompt_logprobs]
    assert len(whole.prompt_logprobs) == len(PROMPT) - 1 and whole.token_ids
    monkeypatch.setattr(job, "LOGPROBS_PER_OUTPUT", 20)  # ten tokens, each with one top token
    driver.run("cut", n, max_tokens)
    pieces = [one for one in driver.outputs("cut0") if one.prompt_logprobs]
    assert [len(one.prompt_logprobs) for one in pieces] == [10, 10, 10, 10, 10, 9]
    assert [entry for one in pieces for entry in one.prompt_logprobs] == [*whole.prompt_logprobs]
    assert not any(one.token_ids for one in pieces[:-1]) and pieces[-1].token_ids
    in_order = [one for frame in driver.frames for one in outputs_of(frame)]
    last = in_order.index(pieces[-1])
    for i in range(n):
        outputs = driver.outputs(f"cut{i}")
        assert sum(len(one.token_ids) for one in outputs) == max_tokens and outputs[-1].finish_reason == "length"
        assert i == 0 or not any(one.prompt_logprobs for one in outputs)
        assert not any(one.token_ids for one in in_order[:last])


def test_a_request_that_is_cancelled_between_pieces_leaves_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "LOGPROBS_PER_OUTPUT", 2)
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    message = pb.Submit(request_id="r", phase=pb.BOTH, request=Request(prompt=PROMPT, sampling=sampling).pack())
    driver.instance.submit("router", message)
    while not driver.frames:
        driver.instance.run_once(wait=False)
    driver.instance.cancel("router", "r")
    while driver.instance.num_jobs:
        driver.instance.run_once(wait=False)
    assert not any(one.token_ids for one in driver.outputs("r"))
    assert driver.instance.run_once(wait=False), "idle, with nothing unsent"


def test_frames_with_log_probabilities_are_split(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "LARGE_FRAME_BYTES", 100)
    driver.run("r", 4, 3, logprobs=20)
    assert all(len(outputs_of(frame)) <= 1 for frame in driver.frames if outputs_of(frame))
    for i in range(4):
        outputs = driver.outputs(f"r{i}")
        assert sum(len(one.token_ids) for one in outputs) == sum(len(one.logprobs) for one in outputs) == 3


def test_an_output_that_no_frame_can_hold_is_an_error_of_its_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "MAX_FRAME_BYTES", 1000)
    driver.run("large", 1, 3)
    assert [one.error.kind for one in driver.outputs("large0") if one.error is not None] == ["answer_too_large"]


def test_an_instance_with_unsent_pieces_is_not_idle(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LOGPROBS_PER_OUTPUT", 20)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    message = pb.Submit(request_id="r", phase=pb.BOTH, request=Request(prompt=PROMPT, sampling=sampling).pack())
    driver.instance.submit("router", message)
    while not driver.frames:
        driver.instance.run_once(wait=False)
    idle = [driver.instance.run_once(wait=False) for _ in range(5)]
    assert idle == [False] * 4 + [True] and driver.outputs("r")[-1].finish_reason == "length"
