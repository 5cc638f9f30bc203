"""Sampling parameters as bodies, frames and the engine have them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import fields

from pdserve.errors import InvalidParameter
from pdserve.keys import token_array
from pdserve.offline.params import SamplingParams as OfflineParams
from pdserve.reasoning import ReasoningSpan
from pdserve.request import BodyParams, Request, SamplingParams, Tenant, constraints
from pdserve.router.api.schemas import ChatBody, CompletionBody
from pdserve.router.dialects.responses.schemas import ResponseBody
from pdserve.router.routed_request import RoutedRequest

SPAN = ReasoningSpan((1, 2), ((3,), (4, 5)), (3,), budget=7)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**31),
        temperature=st.floats(0, 100),
        seed=st.integers(0, 2**63 - 1),
        logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=5),
        bad_words=st.lists(st.lists(st.integers(0, 2**31)).map(tuple)).map(tuple),
        logprobs=st.none() | st.integers(0, 20),
        early_stopping=st.sampled_from([True, False, "never"]),
        reasoning=st.sampled_from([None, SPAN]),
    )
)
def test_packed_parameters_are_the_same(sampling: SamplingParams) -> None:
    sampling.validate()
    request = Request(prompt=token_array([1, 2]), sampling=sampling, tenant=Tenant(3, 0.5), packed_keys=b"k")
    assert Request.unpack(request.pack()) == request


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.0}, {"top_p": math.nan}, {"seed": -1}, {"temperature": "hot"}, {"max_tokens": 0}, {"later": 1},
     {"logit_bias": {1: 101.0}}, {"stop_token_ids": [0] * 65}, {"reasoning": {"start": [1], "newer": 2}}],
)  # fmt: skip
def test_an_instance_refuses_what_no_router_may_send(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Request.unpack(msgspec.msgpack.encode({"prompt": bytes(4), "sampling": fields}))


def test_defaults_take_no_bytes() -> None:
    assert len(Request(prompt=[], sampling=SamplingParams()).pack()) <= len("prompt sampling") + 12


def test_instances_are_not_told_what_only_the_router_needs() -> None:
    routed = RoutedRequest(request_id="r", prompt=[1], sampling=SamplingParams(), client="secret", whole=True)
    assert Request.unpack(routed.pack()) == Request(prompt=token_array([1]), sampling=SamplingParams(), whole=True)
    assert b"secret" not in routed.pack()


@pytest.mark.parametrize("field", fields(BodyParams), ids=lambda field: field.name)
def test_every_client_knows_a_field_that_the_struct_declares(field: Any) -> None:
    for body in (CompletionBody, ChatBody, ResponseBody):
        schema = body.model_json_schema()["properties"][field.name]
        for meta in constraints(field.name):
            limits = (meta.ge, meta.gt, meta.le)
            assert limits == tuple(schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    assert getattr(OfflineParams(), field.name) == field.default
    for meta in constraints(field.name):
        with pytest.raises(InvalidParameter, match=f"{field.name} must be"):
            structs.replace(SamplingParams(), **{field.name: 10**9 if meta.le is not None else -1}).validate()


def test_a_wrong_value_inside_of_a_field_is_an_error_of_the_field() -> None:
    span: Any = {"start": [1], "ends": [], "closing": [], "budget": "x"}
    with pytest.raises(InvalidParameter, match="reasoning must be"):
        SamplingParams(reasoning=span).validate()
