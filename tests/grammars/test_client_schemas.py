"""Schemas as clients write them of Pydantic's models: random outputs by their grammars are valid, and Pydantic takes them."""

import copy
import datetime
import enum
import ipaddress
import json
import random
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Optional

import jsonschema
import numpy as np
import pytest
from openai.lib._pydantic import _ensure_strict_json_schema as strict_by_openai
from pydantic import UUID4, BaseModel, Field, PositiveInt, RootModel, TypeAdapter
from typing_extensions import TypedDict

from pdserve.grammars.specification import lark_grammar
from tests.grammars.byte_matcher import END, ByteMatcher
from tests.lazy import anthropic

MAX_BYTES = 300  # from which on an output ends where it can


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    mass: Annotated[float, Field(gt=0, lt=100)]


class Pets(BaseModel):
    first: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Cat | Dog | None] = Field(default_factory=list, max_length=2)


class Tree(BaseModel):
    value: PositiveInt
    children: list["Tree"] = []


@dataclass
class Recursive:
    inner: Optional["Recursive"] = None
    color: Color = Color.RED


class Row(TypedDict):
    a: int
    b: NotRequired[str]


class Sets(BaseModel):
    colors: set[Color]
    literals: frozenset[Literal["x", 1, None]] = frozenset()
    flags: set[bool] = Field(min_length=1)
    hours: set[Annotated[int, Field(ge=0, le=23)]]


class Collections(BaseModel):
    pair: tuple[int, Color]
    many: tuple[bool, ...]
    by_name: dict[str, int]
    by_color: dict[Color, Row]
    short: list[list[int]] = Field(min_length=1, max_length=2)


class Texts(BaseModel, extra="forbid"):
    alias: str = Field(alias='a "b"/é', max_length=4)
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")]
    day: datetime.date
    at: datetime.datetime
    number: uuid.UUID
    random_number: UUID4
    address: ipaddress.IPv4Address | None = None


class Open(BaseModel, extra="allow"):
    a: int = 0


class Rows(RootModel[list[Row]]):
    pass


MODELS = [
    Pets,
    Tree,
    Recursive,
    Row,
    Sets,
    Collections,
    Texts,
    Open,
    Rows,
    bool,
    Color,
    dict[str, int],
    Literal["a", 1],
]


def random_output(grammar: str, rng: random.Random) -> str:
    """Return an output by a grammar, with printable ASCII mostly; what closes a value is drawn often."""
    matcher, text = ByteMatcher(grammar).matcher, bytearray()
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(one) for one in np.flatnonzero(bits[: END + 1])]
        assert allowed, f"nothing may follow {text!r}: {matcher.get_error()}"
        closing = [one for one in allowed if one in (*b'"]}', END)]
        if closing and rng.random() < (0.2 if len(text) < MAX_BYTES else 0.95):
            allowed = closing
        token = rng.choice([one for one in allowed if 32 <= one < 127 or one == END] or allowed)
        if token == END:
            return text.decode()
        assert matcher.consume_token(token)
        text.append(token)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_answers_by_the_schemas_of_clients_are_valid(model: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    plain, rng = adapter.json_schema(), random.Random(0)
    by_anthropic = anthropic.transform_schema(copy.deepcopy(plain))
    for schema in (plain, by_anthropic, strict_by_openai(copy.deepcopy(plain), path=(), root=copy.deepcopy(plain))):
        grammar = lark_grammar({"json": schema}, {})
        for _ in range(5):
            text = random_output(grammar, rng)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            if schema is plain:
                adapter.validate_json(text)
