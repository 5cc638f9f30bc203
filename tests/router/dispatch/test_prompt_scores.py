"""Log probabilities of prompts come in pieces, once for all choices of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import RequestError
from pdserve.request import SamplingParams, TokenLogprobs
from pdserve.router.dispatch.request_state import RequestState
from pdserve.router.routed_request import RoutedRequest

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster

SAMPLING = SamplingParams(max_tokens=2, prompt_logprobs=0)
PROMPT = [1, 2, 3, 4, 5]


def scores(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value) for value in values]


def open_choices(cluster: Cluster, *names: str) -> list[RequestState]:
    requests = [RoutedRequest(request_id=name, prompt=PROMPT, sampling=SAMPLING) for name in names]
    return cluster.dispatcher.open_choices(requests)


def read(state: RequestState) -> list[list[float]]:
    return [[one.logprob for one in chunk.prompt_logprobs] for chunk in state.take()]


def test_choices_share_the_scores_of_the_first(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both")
    (both,) = cluster.instances
    first, second = open_choices(cluster, "first", "second")
    cluster.deliver(both, "first", prompt_logprobs=scores(-1, -2))
    assert not first.take()
    cluster.deliver(both, "first", prompt_logprobs=scores(-3, -4), token_ids=[7])
    cluster.deliver(both, "second", token_ids=[8])
    assert read(first) == read(second) == [[-1, -2, -3, -4]]
    for name, state in (("first", first), ("second", second)):
        cluster.deliver(both, name, token_ids=[9], finish_reason="length")
        assert read(state) == [[]]


@pytest.mark.parametrize(
    "outputs",
    [
        [("first", dict(token_ids=[7]))],
        [("first", dict(prompt_logprobs=scores(-1, -2))), ("first", dict(token_ids=[7]))],
        [("first", dict(prompt_logprobs=scores(-1, -2, -3, -4, -5)))],
        [("first", dict(prompt_logprobs=scores(-1, -2, -3), token_ids=[7]))],
        [("second", dict(prompt_logprobs=scores(-1)))],
        [("first", dict(prompt_logprobs=scores(-1, -2))), ("second", dict(token_ids=[7]))],
    ],
)
def test_too_few_and_too_many_scores_fail_the_request(
    make_cluster: type[Cluster], outputs: list[tuple[str, dict[str, Any]]]
) -> None:
    cluster = make_cluster("both")
    states = dict(zip(("first", "second"), open_choices(cluster, "first", "second"), strict=True))
    for name, output in outputs:
        cluster.deliver(cluster.instances[0], name, **output)
    with pytest.raises(RequestError, match="log probabilities"):
        states[outputs[-1][0]].take()
    assert cluster.fleet.instances


def test_scores_begin_anew_after_a_loss(make_cluster: type[Cluster]) -> None:
    cluster = make_cluster("both", "both")
    first, second = open_choices(cluster, "first", "second")
    cluster.deliver(first.final_instance, "first", prompt_logprobs=scores(-1, -2))
    cluster.fleet.deregister(first.final_instance, "test")
    for state, value in ((first, -1.0), (second, -2.0)):
        cluster.deliver(state.final_instance, state.id, prompt_logprobs=scores(*[value] * 4), token_ids=[7])
        assert read(state) == [[value] * 4]
