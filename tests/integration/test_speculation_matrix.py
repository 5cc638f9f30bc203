"""Every pair of proposer, length, topology, connector, feature and fault: tokens and log probabilities as without drafts."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.speculating import changed
from tests.integration.test_faults import instances
from tests.integration.test_strict_tools import make_model

DRAFTING = Path(__file__).with_name("drafting.py")
PROPOSERS = ("none", "ngram", "suffix", "auto", "draft", "random", "oracle", "erring")
LENGTHS = ("0", "1", "4", "16", "auto")
TOPOLOGIES = {"1P+1D": (1, 1, 0), "2P+2D": (2, 2, 0), "both": (0, 0, 2)}
CONNECTORS = ("shm", "file", "redis")
FAULTS = {"none": 2, "preempted": 12, "drained": 6, "killed": 6}  # with so many requests at once
TOKENS = 48
FAILED = r"^pdserve_(handover_fallbacks|kv_transfer_failures)_total.* [^0]"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
STRICT = {"name": "look", "strict": True, "parameters": SCHEMA | {"additionalProperties": False}}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cool": {"temperature": 0.2, "seed": 1},
    "top_p": {"temperature": 0.7, "seed": 2, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "seed": 3, "min_p": 0.1},
    "top_k": {"temperature": 0.9, "seed": 4, "top_k": 20, "logprobs": 2},
    "logprobs": {"temperature": 0, "logprobs": 5},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "penalties": {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logprobs": 0},
    "bias": {"temperature": 0, "logit_bias": {"97": 4, "99": -3}},
    "bad_words": {"temperature": 0, "bad_words": ["a", "bc"]},
    "allowed": {"temperature": 0.8, "seed": 6, "allowed_token_ids": [97, 98, 99]},
    "min_tokens": {"temperature": 0, "stop_token_ids": [*range(0, 120, 2)], "min_tokens": 9},
    "stop": {"temperature": 0, "stop": ["aa", "\n", "e", "c"], "logprobs": 1},
    "n": {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 1},
    "schema": {
        "temperature": 1.0,
        "seed": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "choice": {"temperature": 0.6, "seed": 9, "guided_choice": ["aaaaaaaaaaaaab", "aaaaaaaaaaaaac"], "logprobs": 1},
    "tools": {
        "temperature": 0.4,
        "seed": 10,
        "tools": [{"type": "function", "function": STRICT}],
        "tool_choice": "required",
    },
}
FREE = ("schema", "choice", "tools", "min_tokens")  # that end by themselves
PROMPTS = ["abcd" * 20, "a" * 40, "what is it? " * 3, "abc def abd dec " * 9, "zyx"]


@dataclass(frozen=True)
class Case:
    """A request: `number` says which prompt and feature, the rest how it is served."""

    number: int
    proposer: str
    length: str
    topology: str
    connector: str
    fault: str

    @property
    def feature(self) -> str:
        return [*FEATURES][self.number % len(FEATURES)]

    @property
    def request_id(self) -> str:
        return f"{self.number}-{self.proposer}-{self.length}"


def cases(topologies: Iterator[tuple[str, str]], per_fault: int) -> Iterator[Case]:
    """Yield the cases of deployments, `per_fault` of each fault. Features and (proposer, length) have cycles without common
    divisor, so that all of their combinations come in turn."""
    drafts, turn = [*product(PROPOSERS, LENGTHS)], 0
    for topology, connector in topologies:
        for fault in FAULTS:
            for _ in range(per_fault):
                proposer, length = drafts[turn % len(drafts)]
                yield Case(turn % (len(FEATURES) * len(PROMPTS)), proposer, length, topology, connector, fault)
                turn += 1


def all_cases() -> list[Case]:
    return [*cases(product(TOPOLOGIES, CONNECTORS), 56)]


def test_every_pair_occurs() -> None:
    planned = all_cases()
    assert len(planned) >= 2000
    values = {
        "proposer": PROPOSERS,
        "length": LENGTHS,
        "topology": TOPOLOGIES,
        "connector": CONNECTORS,
        "feature": FEATURES,
        "fault": FAULTS,
    }
    for one, other in combinations(values, 2):
        found = {(getattr(case, one), getattr(case, other)) for case in planned}
        assert found == {*product(values[one], values[other])}, (one, other)


def ask(url: str, model: str, number: int, request_id: str, salt: str = "") -> Any:
    """Return tokens, log probabilities and ends of a request's choices."""
    feature = [*FEATURES][number % len(FEATURES)]
    prompt = PROMPTS[number // len(FEATURES)]
    body: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "return_token_ids": True, **FEATURES[feature]}
    body |= {"ignore_eos": True} if feature not in FREE else {}
    body |= {"cache_salt": salt} if salt else {}
    path = "completions"
    if feature == "tools":
        path, body = "chat/completions", body | {"messages": [{"role": "user", "content": prompt}], "max_tokens": 96}
    else:
        body["prompt"] = prompt
    reply = httpx.post(f"{url}/v1/{path}", json=body, headers={"X-Request-Id": request_id}, timeout=600)
    assert reply.status_code == 200, (request_id, feature, reply.text)
    return [(one["token_ids"], one.get("logprobs"), one["finish_reason"]) for one in reply.json()["choices"]]


def nearly(one: Any, other: Any) -> bool:
    """Return whether two answers are equal but for float32's rounding of log probabilities in other batches."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nearly(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(nearly, one, other))
    return bool(one == other)


class Expected:
    """Answers without drafts, and the file in which the instances find them."""

    def __init__(self, deployment: Any, path: Path) -> None:
        url, name = deployment.url, deployment.config.name
        numbers = range(len(FEATURES) * len(PROMPTS))
        with ThreadPoolExecutor(4) as threads:
            self.answers = [*threads.map(lambda number: ask(url, name, number, f"of-{number}"), numbers)]
        known = {f"{n}.{i}": one[0] for n, found in enumerate(self.answers) for i, one in enumerate(found)}
        path.write_text(json.dumps(known))
        self.path = path


def disturb(deployment: Any, fault: str, wait_until: Callable[..., None]) -> None:
    """Kill or drain one instance of each role while it is busy, and wait until it serves again."""
    if fault not in ("killed", "drained"):
        return
    signum = signal.SIGKILL if fault == "killed" else signal.SIGTERM
    names = [name for name in ("decode-0", "prefill-0", "both-0") if name in instances(deployment.url)]
    for name in names:
        if name != "prefill-0":  # which is busy for moments only
            wait_until(lambda name=name: instances(deployment.url)[name]["requests"] > 0, f"{name} is busy", 60)
        pid = deployment.child(name).pid
        os.kill(pid, signum)

        def is_back(name: str = name, pid: int = pid) -> bool:
            deployment.check_children()
            return deployment.child(name).pid != pid and name in instances(deployment.url)

        wait_until(is_back, f"{name} serves again")


@dataclass
class Served:
    """A deployment whose instances propose as requests ask, and what its answers must be.

    Attributes:
        metric, wait_until: the fixtures.
        right: number of accepted drafts by proposer, but for answers with choices.
    """

    deployment: Any
    expected: Expected
    dtype: str
    metric: Callable[..., float]
    wait_until: Callable[..., None]
    right: Counter[str] = field(default_factory=Counter)

    def play(self, planned: list[Case]) -> None:
        """Send the cases of one deployment, fault by fault."""
        deployment, metric, wait_until = self.deployment, self.metric, self.wait_until
        for fault, at_once in FAULTS.items():
            mine = [case for case in planned if case.fault == fault]
            with ThreadPoolExecutor(at_once) as threads:
                futures = [threads.submit(self.ask, case, turn) for turn, case in enumerate(mine)]
                disturb(deployment, fault, wait_until)
                for case, future in zip(mine, futures, strict=True):
                    answer, accepted = future.result(600)
                    assert self.is_same(answer, self.expected.answers[case.number]), (case, case.feature)
                    self.right[case.proposer] += accepted
            if fault == "none" and deployment.config.decode:
                self.check_hand_over()
            if fault == "preempted":
                wait_until(lambda: metric(deployment, "num_preemptions_total") > 0, "some are preempted", 60)
        wait_until(lambda: metric(deployment, "kv_cache_blocks_held") == 0, "no block is held")
        assert metric(deployment, "migrations_total") > 0
        due = {*PROPOSERS} - {"none", "random", "auto"}  # what the last drafts depends on the machine's times
        assert (+self.right).keys() >= due, "drafts of each proposer are accepted"

    def ask(self, case: Case, turn: int) -> tuple[Any, int]:
        """Return the answer to a case, and how many of its drafts were accepted.

        Every other one has a salt of its own, so that nothing of its prompt is there.
        """
        url, salt = self.deployment.url, f"{case.fault}{turn}" if turn % 2 else ""
        answer = ask(url, self.deployment.config.name, case.number, case.request_id, salt)
        drafts = httpx.get(f"{url}/debug/requests/{case.request_id}", timeout=600).json().get("drafts")
        return answer, drafts["accepted"] if drafts else 0

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether two answers are equal, in float32 but for the rounding of log probabilities in other batches."""
        return nearly(one, other) if self.dtype == "float32" else bool(one == other)

    def check_hand_over(self) -> None:
        """Check that decode instances have computed no prompt, and that no transfer has failed."""
        metric, deployment = self.metric, self.deployment
        failed = [line for line in httpx.get(f"{deployment.url}/metrics").text.split("\n") if re.search(FAILED, line)]
        assert not failed, failed
        self.wait_until(lambda: metric(deployment, "kv_cache_blocks_held") == 0, "no block is held")
        loaded, computed = (
            metric(deployment, "prompt_tokens_by_source_total", role="decode", source=source)
            for source in ("loaded", "computed")
        )
        assert loaded > 0 == computed, "the hand-over happened: decode computed no prompt"


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: Any, deploy: Any
) -> Iterator[tuple[dict[str, Any], Expected]]:
    """Settings of deployments, and the answers that they give without drafts."""
    folder = tmp_path_factory.mktemp("matrix")
    path = make_model(checkpoint, folder / "model", "hermes")
    changed(path, folder / "draft")
    settings = {"model": str(path), "dtype": request.param, "reasoning_parser": "none", "speculate": "off"}
    with deploy(**settings, prefill=0, decode=0, both=1) as deployment:
        yield settings, Expected(deployment, folder / "answers.json")


@pytest.fixture
def serve(model: Any, connector_url: str, deploy: Any, metric: Any, wait_until: Any) -> Any:
    """serve("1P+1D", "exact") → a deployment over `connector_url`, as a context."""

    @contextmanager
    def run(topology: str, kind: str) -> Iterator[Served]:
        settings, expected = model[0] | {"kv_cache_memory": None}, model[1]
        roles = dict(zip(("prefill", "decode", "both"), TOPOLOGIES[topology], strict=True))
        programs = {role: [str(DRAFTING), str(expected.path), kind] for role in roles}
        flags = {role: ["--num-blocks", "36", "--drain-seconds", "600"] for role in ("decode", "both")}
        flags["router"] = ["--no-instance-timeout", "600"]
        with deploy(**settings, **roles, connector=connector_url, programs=programs, flags=flags) as deployment:
            yield Served(deployment, expected, settings["dtype"], metric, wait_until)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("connector_url", ["shm"], indirect=True)
def test_one_wrong_token_is_noticed(serve: Any) -> None:
    planned = [case for case in cases(iter([("1P+1D", "shm")]), 40) if case.fault == "none"]
    with serve("1P+1D", "mutant") as served, pytest.raises(AssertionError, match="Case"):
        served.play(planned)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("connector_url", CONNECTORS, indirect=True)
def test_the_whole_matrix(topology: str, serve: Any, request: pytest.FixtureRequest) -> None:
    connector = request.node.callspec.params["connector_url"]
    planned = [case for case in all_cases() if (case.topology, case.connector) == (topology, connector)]
    with serve(topology, "exact") as served:
        served.play(planned)
